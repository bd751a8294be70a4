"""Adapters alone on their way to engines: the trainer's real publishing and server, workers of one node, an engine; the coordinator is played."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.conformance.endpoint import Client, Endpoint
from tests.conformance.engines import start_embedded
from tests.support.megatron_case import write_model
from tests.unit.workers.trainer.weights.test_announcer import Trainer, claim
from tests.wire.workers.rollout.weights.test_fetch import NOWHERE, Hand
from workers.config import Transport
from workers.messages.parts import Announcement
from workers.rollout.weights.merging import Merging
from workers.run.folder import RunFolder
from workers.transport.keys import make_keys
from workers.weights import peft_folder
from workers.weights.manifest import MANIFEST

pytestmark = pytest.mark.usefixtures("megatron_groups")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3-tied", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def trainers(tmp_path: Path, model: Path) -> Iterator[tuple[Trainer, Trainer]]:
    """One that publishes adapters alone, and one that publishes the same policy merged."""
    made = []
    for name in ("alone", "merged"):
        run = RunFolder.create(tmp_path / name)
        make_keys(run)
        claim(run)
        made.append(Trainer(run, model, rank=4, adapter_only=name == "alone"))
    yield made[0], made[1]
    for trainer in made:
        trainer.announcer.close()


@pytest.fixture
async def hands(trainers: tuple[Trainer, Trainer], tmp_path: Path) -> AsyncIterator[list[Hand]]:
    """Two workers of the trainer's node, and one elsewhere that reads files."""
    config = trainers[0].config
    reads = msgspec.convert(msgspec.to_builtins(config), type(config))
    reads.weights.transport, reads.weights.dir = Transport.disk, "auto"
    made = [Hand(trainers[0].run, tmp_path, given=given) for given in (config, config, reads)]
    yield made
    for hand in made:
        await hand.fetch.close()
    assert not any(trainers[0].run.merged(where).exists() for where in ("auto", config.weights.dir)), "the last worker that leaves removes it"


def publish(trainer: Trainer, step: int) -> Announcement:
    """Announced, after a training step."""
    trainer.publish(step)
    trainer.announcer.wait()
    trainer.train()
    return cast(Announcement, trainer.link.told[-1])


def published(trainer: Trainer, step: int) -> Path:
    return trainer.run.store(trainer.config.weights.dir) / "published" / f"1.{step}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


async def answers(engine: Any, *folders: Path) -> list[list[Any]]:
    """What an engine that has loaded each says to a prompt, with the log-probs of its tokens."""
    found, endpoint = [], Endpoint("embedded", engine.base_url, engine.api_key, folders[0], folders[0], engine.process.pid)
    async with aiohttp.ClientSession(engine.base_url, headers={"Authorization": f"Bearer {engine.api_key}"}) as session:
        client = Client(endpoint, session)
        for number, folder in enumerate(folders):
            await client.update(folder, str(number))
            found.append((await client.generate([5, 6, 7], 12, temperature=0.0))["meta_info"]["output_token_logprobs"])
    return found


async def test_engines_get_the_bits_of_the_merged_path(trainers: tuple[Trainer, Trainer], hands: list[Hand], model: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first version on, whose adapters add nothing; each version merged once on a node, and two of them kept there."""
    alone, merged = trainers
    written, real, folders = [], Merging._write, []
    monkeypatch.setattr(Merging, "_write", lambda self, *args: (written.append(args[0].step), real(self, *args))[1])
    for step in range(4):
        announcement = publish(alone, step)
        publish(merged, step)
        if step == 3:
            announcement = msgspec.structs.replace(announcement, sources=[NOWHERE], folder=str(published(alone, step)))
        here = await asyncio.gather(*(hand.get(announcement) for hand in hands[:2]))
        there = await hands[2].get(msgspec.structs.replace(announcement, folder=str(published(alone, step))))
        folders.append(here[0])
        assert here[0] == here[1] != there and contents(here[0]) == contents(there) == contents(published(merged, step))
        assert [folder.exists() for folder in folders] == [number > step - 2 for number in range(step + 1)]
    assert sorted(written) == [0, 0, 1, 1, 2, 2, 3, 3], "once on either node"
    assert [hand.fetch.num_fallbacks for hand in hands] == [1, 1, 0] and {hand.fetch.via for hand in hands} == {"disk"}
    assert alone.link.metrics["weights_bytes"] < merged.link.metrics["weights_bytes"] / 3
    assert sum(hand.fetch.fetch_bytes for hand in hands) < 4 * alone.link.metrics["weights_bytes"], "nothing else has travelled"
    with await asyncio.to_thread(start_embedded, model, context_length=64) as engine:
        first, second, start, last = await answers(engine, folders[-1], published(merged, 3), model, folders[-2])
        assert first == second and len({str(answer) for answer in (second, start, last)}) == 3


async def test_who_leaves_while_it_merges_leaves_nothing_half(trainers: tuple[Trainer, Trainer], hands: list[Hand],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    reached, opened, real = threading.Event(), threading.Event(), peft_folder.iter_merged

    def held(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for named in real(*args):
            yield named
            reached.set()
            assert opened.wait(60)

    announcement = publish(trainers[0], 0)
    with monkeypatch.context() as slow:
        slow.setattr(peft_folder, "iter_merged", held)
        leaving = hands[0].get(announcement)
        assert await asyncio.to_thread(reached.wait, 60)
        waiting = hands[1].get(announcement)
        await hands[1].waits_for("adapters of version 1.0 to be merged")
        leaving.cancel()
        opened.set()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        folder = await waiting
    assert folder.is_dir() and len(contents(folder)) == 3 and [path for path in folder.parent.iterdir() if path.suffix in (".part", ".arrived")] == []
