"""Sampling across weight updates, with a real engine process, real HTTP, real published folders, against Hugging Face's forward."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.conformance.models import endless, prompt_of, write_model
from tests.support.published import Publisher
from workers.config import Config, EngineConfig, Interrupt, ModelConfig, RewardConfig, Swap, WorkflowConfig
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.codec import encode, from_workers
from workers.messages.from_worker import GroupFinished
from workers.messages.groups import check_group, samples
from workers.messages.parts import Announcement, Group, Lease, Partial, Purpose, Version
from workers.model.architecture import Architecture, read_architecture
from workers.reward.pool.pool import RewardPool, VerifierError
from workers.reward.shaping import scale
from workers.reward.verifiers.registry import numeric_distance
from workers.rollout.engines.client import BadRequest, EngineClient, EngineError, Generation, SamplingParams
from workers.rollout.engines.engine import Engine, Weights
from workers.rollout.engines.engine_pool import Engines
from workers.rollout.engines.sampler import PAUSE_AGAIN_S, Sample, Sampler
from workers.rollout.engines.servers.process import LOG_LINES, ServerProcess
from workers.rollout.weights import updates
from workers.rollout.weights.updates import WeightHolder
from workers.rollout.workflows.workflow import Parts, Workflow
from workers.run.processes import first_cause
from workers.weights.manifest import WeightsError, make_manifest, verify

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 1024
TOLERANCE = 1e-4
DEADLINE_S = 200.0
HOSTILE = "tests.support.hostile_verifiers"
LENGTH, LONG = 320, 600
PARAMS, LONG_PARAMS = SamplingParams(LENGTH, 1.0), SamplingParams(LONG, 1.0)


def engine_config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"num_slots": 8, "context_length": CONTEXT, "prefill_chunk": 32, "start_timeout_s": DEADLINE_S,
                           "request_timeout_s": DEADLINE_S, **changes})


def write_endless_model(folder: Path, seed: int) -> Path:
    """A random model without any token that ends a response."""
    return endless(write_model(folder, "qwen3", seed))


async def counters(client: EngineClient) -> dict[str, Any]:
    """The engine's counters; workers do not ask for them."""
    return await client._call("GET", "/server_info", None)


def lease(**changes: Any) -> Lease:
    group_id = "e0.7" if changes.get("purpose") is Purpose.evaluation else "g7"
    return Lease(**{"group_id": group_id, "attempt": 2, "purpose": Purpose.training, "version": Version(0, 0), "prompt_id": "p9",
                    "prompt": "12 + 30 =", "verifier": "numeric_distance", "reference": "42", "seed": 5, **changes})


class OnThisNode:
    """Gets weights from folders of this node, and may always load them."""

    async def fetch(self, announcement: Announcement) -> Path:
        folder = Path(announcement.folder)
        await asyncio.to_thread(verify, folder, announcement.version, announcement.digest)
        return folder

    @asynccontextmanager
    async def permit(self, version: Version) -> AsyncIterator[None]:
        yield


@dataclass
class Rig:
    """A worker's engines, running; what they may be made to hold, and what they hold by now."""

    folder: Path
    model: Path
    engines: Engines
    weights: list[dict[str, torch.Tensor]]
    step: int = 0
    models: dict[Version, Any] = field(default_factory=dict)
    newest: Weights | None = None
    living: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.folder / "weights", self.model, torch.float32)

    @property
    def engine(self) -> Engine:
        return self.engines.engines[0]

    @property
    def client(self) -> EngineClient:
        assert self.engine.client is not None
        return self.engine.client

    @property
    def server(self) -> ServerProcess:
        assert self.engine._process is not None
        return self.engine._process

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.engines, Tokenizer.from_file(str(self.model / "tokenizer.json")))

    async def sample(self, rid: str, prompt: list[int], params: SamplingParams, seed: int, sample: Sample | None = None) -> Sample:
        return await self.sampler.sample(lease(), rid, prompt, params, seed, sample)

    def publish(self, seed: int) -> Announcement:
        """Publish the next version, with the weights of `seed`."""
        self.step += 1
        version = Version(1, self.step)
        published = self.publisher.publish(self.weights[seed].items(), version)
        self.models[version] = AutoModelForCausalLM.from_pretrained(published.folder, dtype=torch.float32).eval()
        return published

    def error(self, version: Version, prompt: list[int], tokens: list[int], logprobs: list[float], start: int = 0, end: int | None = None,
              temperature: float = 1.0) -> float:
        """Largest difference of log-probs [start, end) from Hugging Face's forward over prompt and tokens with the weights of `version`."""
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logits = self.models[version](ids).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt):, None])[:, 0]
        return float((torch.tensor(logprobs) - expected).abs()[start:end].max())

    async def generated(self) -> int:
        return (await counters(self.client))["generated_tokens"]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(folder: Path, models: list[Path], number: int = 1, spawn: Callable[[EngineConfig, Path, Path], ServerProcess] = ServerProcess,
                  **changes: Any) -> AsyncIterator[Rig]:
    """Engines of their own, which hold the first published version. `spawn`: makes a process from config, model and log."""
    config = Config(model=ModelConfig(path=str(models[0])), engine=engine_config(**changes))
    config.allocation.replica_size, config.workflow.max_new_tokens = number, LONG
    weights = [load_file(model / "model.safetensors") for model in models]

    async def unheard() -> None:
        pass

    engines = Engines(config, lambda index: spawn(config.engine, models[0], folder / f"engine-{index}.log"), lambda: rig.newest, unheard)
    rig = Rig(folder, models[0], engines, weights)
    rig.living = asyncio.create_task(engines.live())
    try:
        async with Following(rig) as following:
            await following.load(rig.publish(0))
        yield rig
    finally:
        rig.living.cancel()
        await asyncio.gather(rig.living, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("rig")
    async with running(folder, [write_endless_model(folder / str(seed), seed) for seed in range(3)]) as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Rig:
    shared.engines._closed, shared.engine.interruption.mode = False, Interrupt.retract
    return shared


class Following:
    """A weight holder at work on the rig's engines. `changes` are (held, fetching) as told to the coordinator."""

    def __init__(self, rig: Rig, interrupt: Interrupt = Interrupt.retract, architecture: Architecture | None = None,
                 swap: Swap = Swap.pause) -> None:
        self.rig = rig
        self.changes: list[tuple[Version | None, Version | None]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.holder = WeightHolder(OnThisNode(), self._changed, architecture=architecture)
        for engine in rig.engines.engines:
            engine.interruption.mode, engine.interruption.swap, engine._newest = interrupt, swap, lambda: self.holder.newest

    async def _changed(self) -> None:
        self.changes.append((self.rig.engines.held, self.holder.fetching))
        await self.gate.wait()

    async def __aenter__(self) -> Following:
        self.task = asyncio.create_task(self.holder.follow(self.rig.engines))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.rig.newest = self.holder.newest
        for engine in self.rig.engines.engines:
            engine._newest = lambda: self.rig.newest

    async def load(self, announcement: Announcement) -> None:
        """Have all engines load it."""
        self.holder.announce(announcement)

        async def loaded() -> bool:
            for task in (self.task, self.rig.living):
                if task.done():
                    task.result()
            return self.holder.fetching is None and all(engine.held == announcement.version for engine in self.rig.engines.engines)

        await until(loaded)

    async def fetching(self, announcement: Announcement) -> None:
        """Wait until it has begun with `announcement`."""
        async def begun() -> bool:
            return self.holder.fetching == announcement.version

        await until(begun)

    async def fails(self) -> BaseException:
        """The error that ends it."""
        async with asyncio.timeout(DEADLINE_S):
            (error,) = await asyncio.gather(self.task, return_exceptions=True)
        assert isinstance(error, BaseException)
        return error


def cuts_of(sample: Sample) -> list[tuple[Version, int]]:
    """Runs of versions: (version, where its run ends)."""
    runs, end = [], 0
    for version, run in groupby(sample.versions):
        end += len(list(run))
        runs.append((version, end))
    return runs


# -- across weight updates -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("interrupt", [Interrupt.retract, Interrupt.abort])
async def test_samples_go_on_under_new_weights(rig: Rig, interrupt: Interrupt) -> None:
    before_all, first, second = rig.engines.held, rig.publish(0), rig.publish(1)
    prompts = [prompt_of(10 + 7 * index, index) for index in range(4)]
    async with Following(rig, interrupt) as following:
        await following.load(first)
        base = await rig.generated()
        sampling = [asyncio.create_task(rig.sample(f"{interrupt.value}-{index}", prompt, PARAMS, seed=index))
                    for index, prompt in enumerate(prompts)]

        async def all_run() -> bool:
            return await rig.generated() > base + 100

        await until(all_run)
        await following.load(second)
        for prompt, task in zip(prompts, sampling, strict=True):
            sample = await task
            (before, cut), (after, end) = cuts_of(sample)
            assert (before, after, end) == (first.version, second.version, LENGTH) and 0 < cut < LENGTH
            assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) == LENGTH
            assert rig.error(first.version, prompt, sample.tokens, sample.logprobs, end=cut) <= TOLERANCE
            assert rig.error(second.version, prompt, sample.tokens, sample.logprobs, start=cut) <= TOLERANCE
            assert rig.error(first.version, prompt, sample.tokens, sample.logprobs, start=cut) > 0.1  # the weights do differ
            assert (sample.num_interruptions, sample.tokens_interrupted) == (1, cut)
        assert following.holder.num_updates == 2 and min(rig.engine.interruption.pause_s, rig.engine.interruption.load_s) > 0
        assert rig.engines.mean("pause_s") + rig.engines.mean("load_s") < rig.engines.mean("update_s")
        assert following.changes == [(before_all, first.version), (first.version, None), (first.version, second.version), (second.version, None)]


@pytest.mark.parametrize("interrupt", [Interrupt.retract, Interrupt.abort])
async def test_a_sample_may_be_interrupted_more_than_once(rig: Rig, interrupt: Interrupt) -> None:
    versions = [rig.publish(seed) for seed in (0, 1, 2)]
    prompt = prompt_of(12)
    async with Following(rig, interrupt) as following:
        await following.load(versions[0])
        sampling = asyncio.create_task(rig.sample("often", prompt, LONG_PARAMS, seed=1))
        for announcement in versions[1:]:
            base = await rig.generated()

            async def goes_on(base: int = base) -> bool:
                return await rig.generated() > base + 20

            await until(goes_on)
            await following.load(announcement)
        sample = await sampling
    runs = cuts_of(sample)
    assert [version for version, _ in runs] == [announcement.version for announcement in versions]
    start = 0
    for version, end in runs:
        assert rig.error(version, prompt, sample.tokens, sample.logprobs, start, end) <= TOLERANCE
        start = end
    assert (sample.num_interruptions, sample.tokens_interrupted, start) == (2, runs[1][1], LONG)


async def test_newer_weights_are_loaded_while_samples_go_on_and_those_that_are_outdated_by_then_are_skipped(
        rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Between two decode steps, without a pause; refused once, they are given once more, and the old ones serve meanwhile."""
    versions, prompt, swap, calls = [rig.publish(seed) for seed in (0, 1, 2, 1)], prompt_of(12), rig.client.swap_weights, []

    async def late(folder: Path, *arguments: Any) -> None:
        calls.append(folder)
        base = await rig.generated()

        async def goes_on() -> bool:
            return await rig.generated() > base + 40

        await until(goes_on)
        if len(calls) == 1:
            raise EngineError("engine: /swap_weights answered 500: out of memory")
        await swap(folder, *arguments)

    async with Following(rig, swap=Swap.overlap) as following:
        await following.load(versions[0])
        monkeypatch.setattr(rig.client, "swap_weights", late)
        before = (rig.engine.interruption.num_changes, rig.engine.interruption.update_s, rig.engine.interruption.pause_s)
        sampling = asyncio.create_task(rig.sample("beside", prompt, SamplingParams(1000, 1.0), seed=1))
        base = await rig.generated()

        async def begun() -> bool:
            return await rig.generated() > base + 20

        await until(begun)
        following.holder.announce(versions[1])

        async def loading() -> bool:
            return bool(calls)

        await until(loading)
        for announcement in versions[2:]:
            following.holder.announce(announcement)
        await following.load(versions[3])
        sample = await sampling
        assert before == (rig.engine.interruption.num_changes, rig.engine.interruption.update_s, rig.engine.interruption.pause_s)
    runs, start = cuts_of(sample), 0
    assert [version for version, _ in runs] == [versions[index].version for index in (0, 1, 3)] and rig.engine.num_restarts == 0
    assert calls == [Path(versions[index].folder) for index in (1, 1, 3)] and sample.num_interruptions == 2
    for version, end in runs:
        assert rig.error(version, prompt, sample.tokens, sample.logprobs, start, end) <= TOLERANCE
        start = end
    assert f"has refused version {versions[1].version}, and is given it once more" in capsys.readouterr().out


class LatePause:
    """The engine's client, whose pause command takes its time on the way."""

    def __init__(self, client: EngineClient) -> None:
        self.client, self.sent, self.arrives = client, asyncio.Event(), asyncio.Event()

    async def pause(self, mode: str, timeout_s: float | None = None) -> None:
        self.sent.set()
        await self.arrives.wait()
        await self.client.pause(mode, timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@pytest.mark.parametrize("interrupt", [Interrupt.retract, Interrupt.abort])
async def test_a_request_that_starts_while_the_pause_is_on_its_way_is_interrupted_like_any_other(
        rig: Rig, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = rig.publish(0), rig.publish(1)
    async with Following(rig, interrupt) as following:
        await following.load(first)
        late = LatePause(rig.client)
        monkeypatch.setattr(rig.engine, "client", late)
        following.holder.announce(second)
        await late.sent.wait()
        base = await rig.generated()
        sampling = asyncio.create_task(rig.sample("between", prompt_of(12), LONG_PARAMS, seed=1))

        async def runs() -> bool:
            return await rig.generated() > base + 20

        await until(runs)
        late.arrives.set()
        sample = await sampling
    assert [version for version, _ in cuts_of(sample)] == [first.version, second.version] and sample.num_interruptions == 1


async def test_in_place_keeps_tokens_and_counts_the_interruption(rig: Rig) -> None:
    first, second = rig.publish(0), rig.publish(1)
    async with Following(rig, Interrupt.in_place) as following:
        await following.load(first)
        base = await rig.generated()
        sampling = asyncio.create_task(rig.sample("in-place", prompt_of(12), LONG_PARAMS, seed=1))

        async def runs() -> bool:
            return await rig.generated() > base + 20

        await until(runs)
        await following.load(second)
        sample = await sampling
    (before, cut), (after, end) = cuts_of(sample)
    assert (before, after, end, sample.num_interruptions, sample.tokens_interrupted) == (first.version, second.version, LONG, 1, cut)
    assert rig.error(first.version, prompt_of(12), sample.tokens, sample.logprobs, end=cut) <= TOLERANCE


async def test_what_is_not_interrupted_counts_nothing(rig: Rig) -> None:
    announcement = rig.publish(1)
    async with Following(rig) as following:
        await following.load(announcement)
        sample = await rig.sample("calm", prompt_of(9), SamplingParams(40, 0.7), seed=3)
        again = await rig.sample("calm again", prompt_of(9), SamplingParams(40, 0.7), seed=3)
        other = await rig.sample("other", prompt_of(9), SamplingParams(40, 0.7), seed=4)
    assert cuts_of(sample) == [(announcement.version, 40)] and (sample.num_interruptions, sample.tokens_interrupted) == (0, 0)
    assert rig.error(announcement.version, prompt_of(9), sample.tokens, sample.logprobs, temperature=0.7) <= TOLERANCE
    assert again.tokens == sample.tokens != other.tokens


async def test_updates_that_come_faster_than_they_load_are_skipped(rig: Rig) -> None:
    versions = [rig.publish(seed) for seed in (0, 1, 2, 1, 2)]
    async with Following(rig) as following:
        await following.load(versions[0])
        following.gate.clear()
        following.holder.announce(versions[1])
        await following.fetching(versions[1])
        for announcement in versions[2:]:
            following.holder.announce(announcement)
        following.gate.set()
        await following.load(versions[-1])
        assert following.holder.num_updates == 3
        held = [version for version, fetching in following.changes if fetching is None]
        assert held == [versions[index].version for index in (0, 1, 4)]
        sample = await rig.sample("newest", prompt_of(5), SamplingParams(20, 1.0), seed=0)
    assert cuts_of(sample) == [(versions[-1].version, 20)]
    assert rig.error(versions[-1].version, prompt_of(5), sample.tokens, sample.logprobs) <= TOLERANCE


async def test_a_version_that_is_gone_is_skipped_if_there_is_a_newer_one(rig: Rig) -> None:
    first, gone, newest = rig.publish(0), rig.publish(1), rig.publish(2)
    shutil.rmtree(gone.folder)
    async with Following(rig) as following:
        await following.load(first)
        following.gate.clear()
        following.holder.announce(gone)
        await following.fetching(gone)
        following.holder.announce(newest)
        following.gate.set()
        await following.load(newest)
        assert rig.engines.held == newest.version and following.holder.num_updates == 2
        assert gone.version not in [held for held, _ in following.changes]
        sample = await rig.sample("newest", prompt_of(5), SamplingParams(20, 1.0), seed=0)
    assert cuts_of(sample) == [(newest.version, 20)]


async def serves_unharmed(rig: Rig, announcement: Announcement) -> None:
    """The engine is not paused and holds exactly the weights of `announcement`."""
    state = await counters(rig.client)
    assert (state["weight_version"], state["paused"]) == (str(announcement.version), False)
    async with asyncio.timeout(DEADLINE_S):
        sample = await rig.sample("unharmed", prompt_of(5), SamplingParams(20, 1.0), seed=0)
    assert cuts_of(sample) == [(announcement.version, 20)]
    assert rig.error(announcement.version, prompt_of(5), sample.tokens, sample.logprobs) <= TOLERANCE


async def test_a_version_that_goes_while_the_engine_is_about_to_load_it_is_skipped_for_the_one_that_comes(
        rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    first, gone, newest = rig.publish(0), rig.publish(1), rig.publish(2)
    async with Following(rig) as following:
        await following.load(first)
        pause = rig.client.pause

        async def pause_and_lose_it(mode: str, timeout_s: float | None) -> None:  # between its verification and its loading
            await pause(mode, timeout_s)
            if following.holder.fetching == gone.version:
                shutil.rmtree(gone.folder)
                following.holder.announce(newest)

        monkeypatch.setattr(rig.client, "pause", pause_and_lose_it)
        following.holder.announce(gone)
        await following.load(newest)
        assert rig.engines.held == newest.version and gone.version not in [held for held, _ in following.changes]
    await serves_unharmed(rig, newest)


async def test_a_version_that_is_gone_is_an_error_if_it_is_the_newest(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "NEWER_S", 0.2)
    first, gone = rig.publish(0), rig.publish(1)
    shutil.rmtree(gone.folder)
    async with Following(rig) as following:
        await following.load(first)
        following.holder.announce(gone)
        error = await following.fails()
    assert isinstance(error, WeightsError) and gone.folder in str(error) and f"version {gone.version} cannot be read" in str(error)
    assert rig.engines.held == first.version and following.holder.num_updates == 1
    await serves_unharmed(rig, first)


async def test_a_version_that_is_gone_with_its_training_job_is_waited_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "NEWER_S", 2.0)
    first, gone, newest = rig.publish(0), rig.publish(1), rig.publish(2)
    shutil.rmtree(gone.folder)
    async with Following(rig) as following:
        following.holder._in_touch = lambda: False
        await following.load(first)
        following.holder.announce(gone)
        await following.fetching(gone)

        async def given_up() -> bool:
            return following.holder.fetching is None

        await until(given_up)
        assert rig.engines.held == first.version and not following.task.done()
        await following.load(newest)
    await serves_unharmed(rig, newest)


def damaged(announcement: Announcement, damage: str) -> Announcement:
    shard = next(Path(announcement.folder).glob("*.safetensors"))
    if damage == "flipped bit":
        content = bytearray(shard.read_bytes())
        content[-5] ^= 64
        shard.write_bytes(content)
    elif damage == "cut short":
        os.truncate(shard, shard.stat().st_size - 4)
    else:
        return Announcement(Version(1, 999), announcement.folder, announcement.digest)
    return announcement


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "another version"])
async def test_damaged_weights_are_refused_and_the_old_ones_serve_on(rig: Rig, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "NEWER_S", 0.2)
    first, bad = rig.publish(0), damaged(rig.publish(1), damage)
    async with Following(rig) as following:
        await following.load(first)
        following.holder.announce(bad)
        error = await following.fails()
    assert isinstance(error, WeightsError) and bad.folder in str(error)
    assert rig.engines.held == first.version
    await serves_unharmed(rig, first)


async def test_weights_of_another_model_are_refused_before_any_engine_gets_them(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "NEWER_S", 0.2)
    first, other = rig.publish(0), write_model(tmp_path / "other", "qwen2", 0)
    rig.step += 1
    bad = Announcement(Version(1, rig.step), str(other), make_manifest(other, Version(1, rig.step)))
    async with Following(rig, architecture=read_architecture(rig.model)) as following:
        await following.load(first)
        following.holder.announce(bad)
        error = await following.fails()
    assert isinstance(error, WeightsError) and "family='qwen2', the model that is served has family='qwen3'" in str(error)
    await serves_unharmed(rig, first)


@pytest_asyncio.fixture(loop_scope="module")
async def diverged(rig: Rig, tmp_path: Path) -> AsyncIterator[Rig]:
    """An engine of its own that holds weights which are no numbers."""
    async with running(tmp_path, [rig.model, rig.model]) as other:
        other.weights[1] = {name: tensor * float("nan") for name, tensor in rig.weights[0].items()}
        async with Following(other) as following:
            await following.load(other.publish(1))
        yield other


async def test_diverged_weights_are_an_error_and_no_endless_loop(diverged: Rig) -> None:
    """The engine gives log-probs that are no numbers; asking it again would bring the same answer for ever."""
    with pytest.raises(EngineError, match=r"log-prob|diverged"):
        await asyncio.wait_for(diverged.sample("diverged", prompt_of(5), SamplingParams(20, 1.0), seed=0), DEADLINE_S)


async def test_an_engine_recovers_from_diverged_weights(diverged: Rig) -> None:
    with pytest.raises(EngineError, match="diverged"):
        await diverged.client.generate("diverged", prompt_of(5), SamplingParams(20, 1.0), 0)
    good = diverged.publish(0)
    async with Following(diverged) as following:
        await following.load(good)
    generation = await diverged.client.generate("good", prompt_of(5), SamplingParams(20, 1.0), 0)
    assert (generation.finish, len(generation.tokens)) == ("length", 20)
    assert diverged.error(good.version, prompt_of(5), generation.tokens, generation.logprobs) <= TOLERANCE


# -- halting -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("interrupt", [Interrupt.retract, Interrupt.abort])
async def test_halting_brings_every_token_back_and_another_sampler_goes_on(rig: Rig, interrupt: Interrupt) -> None:
    announcement = rig.publish(1)
    prompts = [prompt_of(10 + 7 * index, index) for index in range(3)]
    async with Following(rig, interrupt) as following:
        await following.load(announcement)
        sampler, base = rig.sampler, await rig.generated()
        parts = [Sample() for _ in prompts]
        sampling = [asyncio.create_task(sampler.sample(lease(), f"halt-{interrupt.value}-{index}", prompt, LONG_PARAMS, index, part))
                    for index, (prompt, part) in enumerate(zip(prompts, parts, strict=True))]

        async def all_run() -> bool:
            return await rig.generated() > base + 100

        await until(all_run)
        assert await sampler.halt(DEADLINE_S)
        assert await asyncio.gather(*sampling) == parts
        assert sum(len(part.tokens) for part in parts) >= 90 and not any(part.finished for part in parts)
        before = await rig.generated()
        assert await sampler.sample(lease(), "late", prompts[0], PARAMS, seed=9) == Sample() and await rig.generated() == before
        assert (await counters(rig.client))["num_running"] == (await counters(rig.client))["num_queued"] == 0
        await rig.client.resume()
        rig.engines._closed = False
        for index, (prompt, part) in enumerate(zip(prompts, parts, strict=True)):
            kept = list(zip(part.tokens, part.logprobs, strict=True))
            sample = await rig.sample(f"on-{index}", prompt, LONG_PARAMS, index, part)
            assert sample.finished and len(sample.tokens) == LONG and list(zip(sample.tokens, sample.logprobs, strict=True))[: len(kept)] == kept
            assert rig.error(announcement.version, prompt, sample.tokens, sample.logprobs) <= TOLERANCE


async def test_halting_does_not_wait_for_a_request_that_reaches_the_engine_after_the_pause(rig: Rig) -> None:
    """SGLang lets it in when generation goes on, and aborts it by no pause."""
    announcement = rig.publish(1)
    async with Following(rig) as following:
        await following.load(announcement)
        sampler = rig.sampler
        await rig.client.pause("abort")
        part = Sample()
        sampling = asyncio.create_task(sampler.sample(lease(), "behind", prompt_of(9), PARAMS, 0, part))
        async with asyncio.timeout(DEADLINE_S):
            while not sampler._num_requests:
                await asyncio.sleep(0)
            assert await sampler.halt(10 * DEADLINE_S) and not sampling.done() and part == Sample()
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await rig.client.resume()


async def test_an_engine_that_keeps_its_tokens_cannot_hold_up_a_halt(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, deaf = rig.sampler, LatePause(rig.client)
    monkeypatch.setattr(rig.engine, "client", deaf)
    sampling = asyncio.create_task(sampler.sample(lease(), "kept", prompt_of(9), LONG_PARAMS, seed=0))
    async with asyncio.timeout(DEADLINE_S):
        while not sampler._num_requests:
            await asyncio.sleep(0)
        assert rig.server._process is not None
        server = psutil.Process(rig.server._process.pid)
        server.suspend()  # so that it has not come to its end by itself
        assert not await sampler.halt(0.3) and deaf.sent.is_set()
        server.resume()
        assert (await sampling).finished


class SlowReplies:
    """The engine's client, whose replies take longer than a halt waits between two pauses."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def generate(self, *arguments: Any) -> Generation:
        reply = await self.client.generate(*arguments)
        await asyncio.sleep(3 * PAUSE_AGAIN_S)
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


async def test_a_halt_waits_for_replies_that_take_their_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, kept = rig.sampler, Sample()
    base = await rig.generated()
    monkeypatch.setattr(rig.engine, "client", SlowReplies(rig.client))
    sampling = asyncio.create_task(sampler.sample(lease(), "slow", prompt_of(9), LONG_PARAMS, 0, kept))

    async def runs() -> bool:
        return await rig.generated() > base + 20

    await until(runs)
    try:
        assert await sampler.halt(DEADLINE_S) and not sampler._num_requests
        assert await sampling is kept and len(kept.tokens) > 0
    finally:
        await rig.client.resume()


# -- requests ------------------------------------------------------------------------------------------------------------

async def test_a_stop_string_ends_the_sample_and_is_not_part_of_the_text(rig: Rig) -> None:
    prompt, sampler = prompt_of(9), rig.sampler
    whole = await sampler.sample(lease(), "whole", prompt, SamplingParams(200, 1.0), seed=5)
    text = sampler.text(whole.tokens, ())
    stop = next(pair for place in range(20, len(text)) if (pair := text[place : place + 2]).isascii() and pair.isprintable())
    sample = await sampler.sample(lease(), "stopped", prompt, SamplingParams(200, 1.0, stop=(stop, "never there")), seed=5)
    assert sample.tokens == whole.tokens[: len(sample.tokens)] and len(sample.tokens) < 200
    assert sampler.text(sample.tokens, ()).endswith(stop)
    assert sampler.text(sample.tokens, (stop,)) == text[: text.find(stop)]


async def test_a_stop_string_that_was_begun_before_an_interruption_ends_the_sample(rig: Rig) -> None:
    """The server that goes on has its beginning as a part of the prompt."""
    prompt, sampler = prompt_of(9), rig.sampler
    whole = await sampler.sample(lease(), "whole", prompt, SamplingParams(60, 1.0), seed=5)

    async def resumed(cut: int, *stop: str) -> Sample:
        kept = Sample(whole.tokens[:cut], whole.logprobs[:cut], whole.versions[:cut])
        return await sampler.sample(lease(), f"resumed {cut} {len(stop)}", prompt, SamplingParams(60, 1.0, stop=stop), seed=5, sample=kept)

    for cut in range(10, 50):
        text, place = sampler.text((await resumed(cut)).tokens, ()), len(sampler.text(whole.tokens[:cut], ()))
        stop = text[place - 1 : place + 1]
        if stop.isascii() and stop.isprintable() and text.find(stop) == place - 1:
            break
    else:
        pytest.fail("no pair of letters comes from two tokens for the first time")
    sample = await resumed(cut, "never there", stop)
    assert sampler.text(sample.tokens, ()).endswith(stop) and sample.finished and not sample.cut
    assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) == cut + 1


@pytest.mark.parametrize(("tokens", "finish", "finished", "cut"), [
    ([5, 9], "abort", True, False), ([9, 5], "abort", False, False), ([5] * 4, "length", True, True), ([5, 5, 5, 9], "length", True, False),
    ([5, 5, 5, 9], "abort", True, False)])
async def test_an_end_is_one_whatever_the_server_calls_it(rig: Rig, tokens: list[int], finish: str, finished: bool, cut: bool) -> None:
    """SGLang says of a request that is aborted as its last token comes that it was aborted."""
    sampler, sample = Sampler(rig.engines, rig.sampler._tokenizer, None, {9}), Sample()
    sampler._append(sample, Generation(tokens, [-1.0] * len(tokens), [(Version(1, 0), 0, len(tokens))], finish), SamplingParams(4, 1.0), 0)
    assert (sample.finished, sample.cut, sample.num_interruptions) == (finished, cut, int(not finished)) and sample.tokens == tokens


async def test_parts_that_do_not_fit_together_are_an_error() -> None:
    for generation in (Generation([1, 2], [-1.0], [(Version(1, 0), 0, 2)], "length"), Generation([1, 2], [-1.0, -1.0], [], "length"),
                       Generation([1], [-1.0], [(Version(1, 0), 0, 2)], "length")):
        with pytest.raises(EngineError, match="must be equally many"):
            Sample().add(generation)


async def test_a_wrong_request_and_a_wrong_key_are_told_from_failures(rig: Rig) -> None:
    with pytest.raises(BadRequest, match="/generate answered 400.*context length"):
        await rig.sample("long", prompt_of(CONTEXT), PARAMS, seed=0)
    stranger = EngineClient(rig.client._url, "wrong", DEADLINE_S)
    with pytest.raises(BadRequest, match="/continue_generation answered 401"):
        await stranger.resume()
    await stranger.close()


async def test_a_request_that_takes_too_long_says_so(rig: Rig) -> None:
    key = rig.client._session.headers["Authorization"].removeprefix("Bearer ")
    hasty = EngineClient(rig.client._url, key, request_timeout_s=0.2)
    await rig.client.pause("retract")
    try:
        with pytest.raises(EngineError, match=r"/generate failed: \w+") as caught:  # with a cause, which a bare TimeoutError has not
            await hasty.generate("hasty", prompt_of(5), SamplingParams(4, 1.0), 0)
        assert not isinstance(caught.value, BadRequest)

        async def forgotten() -> bool:
            return (await counters(rig.client))["num_queued"] == 0

        await until(forgotten)  # the engine dropped what nobody waits for
    finally:
        await rig.client.resume()
        await hasty.close()


# -- the engine as a process ---------------------------------------------------------------------------------------------

async def test_a_killed_engine_says_how_it_died(rig: Rig, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("of an earlier one\n")
    server = ServerProcess(engine_config(), rig.model, log)
    client = await server.start(Version(0, 0))
    try:
        sampling = asyncio.create_task(client.generate("lost", prompt_of(9), LONG_PARAMS, 0))

        async def runs() -> bool:
            return (await counters(client))["generated_tokens"] > 10

        await until(runs)
        exited = asyncio.create_task(server.exited())
        assert server._process is not None and not exited.done()
        pid = server._process.pid
        os.kill(pid, signal.SIGKILL)
        with log.open("a") as written:
            written.write("".join(f"line {number}\n" for number in range(LOG_LINES + 5)))
        text = await asyncio.wait_for(exited, DEADLINE_S)
        assert f"the embedded engine (process {pid}) was killed by SIGKILL; its log ({log}) ends:" in text
        assert text.splitlines()[1:] == [f"  line {number}" for number in range(5, LOG_LINES + 5)]
        with pytest.raises(EngineError, match="/generate failed: ."):
            await asyncio.wait_for(sampling, DEADLINE_S)
        with pytest.raises(EngineError, match="/server_info failed: ."):
            await counters(client)
    finally:
        await client.close()
        await server.stop()


async def test_the_key_is_not_on_the_command_line_and_stop_ends_even_a_deaf_engine(rig: Rig, tmp_path: Path) -> None:
    server = ServerProcess(engine_config(), rig.model, tmp_path / "engine.log")
    client = await server.start(Version(3, 4))
    assert server._process is not None
    pid, key = server._process.pid, client._session.headers["Authorization"].removeprefix("Bearer ")
    assert len(key) == 64 and key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert (await counters(client))["weight_version"] == "3.4"
    await client.close()
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(server.stop(), DEADLINE_S)
    assert re.search(r"was killed by SIGKILL; its log \(.+\) is empty", await server.exited())
    await server.stop()  # once more is nothing
    assert not Path(f"/proc/{pid}").exists()


async def test_the_signals_that_end_a_job_do_not_end_its_engine(rig: Rig) -> None:
    """On some clusters SLURM sends them to every process; the worker still has to collect what the engine is generating."""
    assert rig.server._process is not None
    for number in (signal.SIGTERM, signal.SIGUSR2):
        os.kill(rig.server._process.pid, number)
    sample = await rig.sample("survivor", prompt_of(5), SamplingParams(200, 1.0), seed=0)
    assert len(sample.tokens) == 200 and rig.server._process.returncode is None
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(), "here they are not blocked"


@pytest.mark.parametrize("kind", ["no folder", "broken tensors", "another architecture", "too short"])
async def test_an_engine_that_cannot_start_says_why(rig: Rig, tmp_path: Path, kind: str) -> None:
    model, config = tmp_path / "model", engine_config()
    texts = {"no folder": "no readable config.json", "broken tensors": "broken safetensors file", "another architecture": "'GPT2LMHeadModel'",
             "too short": "--context-length 4096"}
    if kind != "no folder":
        shutil.copytree(rig.model, model)
    if kind == "broken tensors":
        os.truncate(model / "model.safetensors", 5000)
    elif kind == "another architecture":
        (model / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    elif kind == "too short":
        config = engine_config(context_length=4096)
    server = ServerProcess(config, model, tmp_path / "engine.log")
    with pytest.raises(EngineError) as caught:
        await server.start(Version(0, 0))
    text = str(caught.value)
    assert "exited with status 2; its log" in text and texts[kind] in text and str(tmp_path / "engine.log") in text
    assert "Traceback" not in text
    await server.stop()


async def test_an_engine_that_takes_too_long_to_start_is_ended(rig: Rig, tmp_path: Path) -> None:
    server = ServerProcess(engine_config(start_timeout_s=0.05), rig.model, tmp_path / "engine.log")
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"the embedded engine has not answered in 0\.05 s \(engine\.start_timeout_s\); its log"):
        await server.start(Version(0, 0))
    assert time.monotonic() - started < DEADLINE_S
    assert server._process is not None and server._process.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{server._process.pid}").exists()


# -- one group -----------------------------------------------------------------------------------------------------------

def workflow(**changes: Any) -> WorkflowConfig:
    return WorkflowConfig(**{"group_size": 5, "max_new_tokens": 24, "temperature": 0.8, **changes})


def single_turn(rig: Rig, pool: RewardPool, config: WorkflowConfig | None = None, reward: RewardConfig | None = None) -> Workflow:
    return Workflow(Parts(rig.sampler, pool, config or workflow(), reward or RewardConfig(), CONTEXT))


async def test_a_group_is_whole(rig: Rig) -> None:
    announcement, reward = rig.publish(1), RewardConfig(correct=3.0, wrong=-1.0)
    async with Following(rig) as following, RewardPool(reward) as pool:
        await following.load(announcement)
        turn = single_turn(rig, pool, reward=reward)
        group = await turn.run(lease())
        same, other = await turn.run(lease(attempt=3)), await turn.run(lease(attempt=4, seed=6))
    check_group(group)
    prompt = rig.sampler.encode("12 + 30 =")
    assert (group.group_id, group.attempt, group.purpose, group.prompt_id) == ("g7", 2, Purpose.training, "p9")
    assert group.prompt.tolist() == prompt == list(group.prompt) and group.lengths.tolist() == [24] * 5 and bool(group.loss_mask.all())
    assert (group.epochs.tolist(), group.steps.tolist(), group.run_lengths.tolist()) == ([1], [announcement.version.step], [120])
    views = samples(group)
    for index, view in enumerate(views):
        tokens = view.tokens.tolist()
        assert rig.error(announcement.version, prompt, tokens, view.logprobs.tolist(), temperature=0.8) <= TOLERANCE
        score = numeric_distance("", rig.sampler.text(tokens, ()), "42")
        assert group.scores[index] == pytest.approx(score) and view.reward == pytest.approx(scale(score, reward))
    assert len({tuple(view.tokens.tolist()) for view in views}) == 5  # the samples differ
    assert group.first_text == rig.sampler.text(views[0].tokens.tolist(), ())
    assert group.tokens.tolist() == same.tokens.tolist() != other.tokens.tolist()
    assert group.generation_s > 0 and group.reward_s > 0 and (group.num_interruptions, group.tokens_interrupted) == (0, 0)
    decoded = from_workers(1 << 20).decode(encode(GroupFinished(group)))
    assert isinstance(decoded, GroupFinished) and decoded.group.tokens.tolist() == group.tokens.tolist()


@pytest.mark.parametrize("interrupt", [Interrupt.retract, Interrupt.abort])
async def test_a_group_across_an_update(rig: Rig, interrupt: Interrupt) -> None:
    first, second = rig.publish(0), rig.publish(1)
    async with Following(rig, interrupt) as following, RewardPool(RewardConfig()) as pool:
        await following.load(first)
        base = await rig.generated()
        running = asyncio.create_task(single_turn(rig, pool, workflow(max_new_tokens=LENGTH)).run(lease()))

        async def all_run() -> bool:
            return await rig.generated() > base + 100

        await until(all_run)
        await following.load(second)
        group = await running
    check_group(group)
    assert group.num_interruptions == 5 and group.lengths.tolist() == [LENGTH] * 5
    old = sum(int(length) for step, length in zip(group.steps, group.run_lengths, strict=True) if step == first.version.step)
    assert group.tokens_interrupted == old > 0
    for view in samples(group):
        cut = int(np.argmax(view.steps == second.version.step))
        assert view.steps.tolist() == [first.version.step] * cut + [second.version.step] * (LENGTH - cut) and cut > 0
        tokens, logprobs = view.tokens.tolist(), view.logprobs.tolist()
        assert rig.error(first.version, group.prompt.tolist(), tokens, logprobs, end=cut, temperature=0.8) <= TOLERANCE
        assert rig.error(second.version, group.prompt.tolist(), tokens, logprobs, start=cut, temperature=0.8) <= TOLERANCE


def part_of(group: Group, keep: list[int], finished: list[bool], **changes: Any) -> Partial:
    """The first `keep[k]` tokens of each sample of a group of one version, as given back by another worker."""
    starts = np.cumsum([0, *group.lengths.tolist()[:-1]])
    index = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, keep, strict=True)])
    return Partial(**{"group_id": group.group_id, "attempt": group.attempt, "purpose": group.purpose, "lengths": Int32.of(keep),
                      "finished": Bool.of(finished), "tokens": Int32.of(group.tokens[index]), "logprobs": Float32.of(group.logprobs[index]),
                      "epochs": Int32.of(group.epochs), "steps": Int32.of(group.steps), "run_lengths": Int32.of([sum(keep)]), **changes})


async def test_a_group_goes_on_from_a_partial(rig: Rig) -> None:
    first, second = rig.publish(0), rig.publish(1)
    async with RewardPool(RewardConfig()) as pool:
        async with Following(rig) as following:
            await following.load(first)
            whole = await single_turn(rig, pool).run(lease())
        keep, finished = [7, 0, 24, 11, 24], [False, False, False, True, True]
        base = await rig.generated()
        async with Following(rig) as following:
            await following.load(second)
            group = await single_turn(rig, pool).run(lease(attempt=3, partial=part_of(whole, keep, finished)))
    check_group(group)
    assert await rig.generated() == base + 17 + 24, "finished samples, and one of the greatest length, are only judged"
    assert (group.attempt, group.lengths.tolist()) == (3, [24, 24, 24, 11, 24])
    assert (group.num_interruptions, group.tokens_interrupted) == (1, 7)
    for view, before, cut in zip(samples(group), samples(whole), keep, strict=True):
        tokens, logprobs = view.tokens.tolist(), view.logprobs.tolist()
        assert tokens[:cut] == before.tokens.tolist()[:cut] and logprobs[:cut] == before.logprobs.tolist()[:cut]
        assert view.steps.tolist() == [first.version.step] * cut + [second.version.step] * (len(tokens) - cut)
        if cut < len(tokens):
            assert rig.error(second.version, group.prompt.tolist(), tokens, logprobs, start=cut, temperature=0.8) <= TOLERANCE
    text = rig.sampler.text(samples(group)[3].tokens.tolist(), ())
    assert group.scores[3] == pytest.approx(numeric_distance("", text, "42"))


async def test_a_partial_that_does_not_fit_is_ignored_with_a_warning(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    announcement = rig.publish(1)
    async with Following(rig) as following, RewardPool(RewardConfig()) as pool:
        await following.load(announcement)
        turn = single_turn(rig, pool)
        whole = await turn.run(lease())
        wrong = part_of(whole, [7, 0, 24, 11, 24], [False] * 5, group_id="g8")
        group = await turn.run(lease(partial=wrong))
    assert group.tokens.tolist() == whole.tokens.tolist()
    assert "warning: group g8, given back in attempt 2: must be of group g7" in capsys.readouterr().out


async def test_evaluation_is_one_greedy_sample(rig: Rig) -> None:
    async with RewardPool(RewardConfig()) as pool:
        turn = single_turn(rig, pool, workflow(top_k=3, top_p=0.5))
        groups = [await turn.run(lease(purpose=Purpose.evaluation, seed=seed, attempt=seed)) for seed in (1, 2)]
        assert turn.num_episodes(lease(purpose=Purpose.evaluation)) == 1 and turn.num_episodes(lease()) == 5
    for group in groups:
        check_group(group)
        assert group.purpose is Purpose.evaluation and group.lengths.tolist() == [24]
    assert groups[0].tokens.tolist() == groups[1].tokens.tolist()


@pytest.mark.parametrize("length", [0, CONTEXT - 23, CONTEXT, 3 * CONTEXT])
async def test_a_prompt_that_does_not_fit_is_a_bad_request(rig: Rig, length: int) -> None:
    base = await rig.generated()
    async with RewardPool(RewardConfig()) as pool:
        with pytest.raises(BadRequest, match=rf"prompt p9 has {length} tokens: must have at least 1 and leave workflow\.max_new_tokens=24 of "
                                             r"engine\.context_length=1024"):
            await single_turn(rig, pool).run(lease(prompt="x" * length))
    assert await rig.generated() == base


async def test_a_prompt_that_just_fits(rig: Rig) -> None:
    async with RewardPool(RewardConfig()) as pool:
        group = await single_turn(rig, pool, workflow(group_size=2)).run(lease(prompt="x" * (CONTEXT - 24)))
    check_group(group)
    assert group.prompt.size == CONTEXT - 24 and group.lengths.tolist() == [24, 24]


async def outcome(turn: Workflow, asked: Lease) -> Group | BaseException:
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await turn.run(asked)
        except BaseExceptionGroup as errors:
            return errors


@pytest.mark.parametrize(("verifier", "cause"), [("raises", "no such thing"), ("exits", "exited with status 7"), ("not_a_number", "nan")])
async def test_a_verifier_without_a_score_is_an_error_and_no_reward(rig: Rig, verifier: str, cause: str) -> None:
    reward = RewardConfig(verifier=f"{HOSTILE}:{verifier}", max_retries=0)
    async with RewardPool(reward) as pool:
        result = await outcome(single_turn(rig, pool, reward=reward), lease(verifier=reward.verifier))
        assert isinstance(result, BaseExceptionGroup) and result.subgroup(VerifierError) is not None
        assert cause in first_cause(result) and f"{HOSTILE}:{verifier}" in first_cause(result)
        assert pool.num_scored == 0 and pool.num_failed >= 1


async def test_one_response_without_a_score_fails_the_whole_group(rig: Rig, tmp_path: Path) -> None:
    once = f"{HOSTILE}:raises_once"
    config = workflow(max_new_tokens=8)
    async with RewardPool(RewardConfig(verifier=once, max_retries=0)) as pool:
        result = await outcome(single_turn(rig, pool, config), lease(verifier=once, reference=str(tmp_path / "a")))
        assert isinstance(result, BaseExceptionGroup) and "the first time" in first_cause(result)

        async def all_ended() -> bool:
            state = await counters(rig.client)
            return state["num_running"] == state["num_queued"] == 0

        await until(all_ended)  # its siblings do not go on
    async with RewardPool(RewardConfig(verifier=once, max_retries=1)) as pool:
        group = await single_turn(rig, pool, config).run(lease(verifier=once, reference=str(tmp_path / "b")))
    check_group(group)
    assert group.scores.tolist() == [1.0] * 5 and group.rewards.tolist() == [5.0] * 5


async def test_a_cancelled_group_leaves_the_engine_free(rig: Rig) -> None:
    base = await rig.generated()
    async with RewardPool(RewardConfig()) as pool:
        running = asyncio.create_task(single_turn(rig, pool, workflow(max_new_tokens=900)).run(lease()))

        async def runs() -> bool:
            return await rig.generated() > base + 20

        await until(runs)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()

        async def all_ended() -> bool:
            state = await counters(rig.client)
            return state["num_running"] == state["num_queued"] == 0

        await until(all_ended)
    assert await rig.generated() < base + 5 * 900
