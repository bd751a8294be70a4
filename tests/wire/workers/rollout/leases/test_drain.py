"""Workers that leave before the run is over: nothing that was generated is lost, and another one goes on from there."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.processes import command_line
from tests.wire.fleet import DEADLINE_S, Weights, ended, engine_state, generated, make_config, make_lease, make_run, playing, working
from workers.config import Server
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.codec import from_workers
from workers.messages.from_coordinator import Acknowledged, Drain, Finish, Suspended
from workers.messages.from_worker import Draining, Goodbye, GroupFailed, GroupFinished, GroupParked, Heartbeat, Register, WorkerFailed
from workers.messages.groups import check_group, check_partial, group_episodes, samples
from workers.messages.parts import Group, Partial, Purpose, Version
from workers.rollout.worker import RolloutWorker
from workers.run.folder import RunFolder
from workers.slurm import termination
from workers.slurm.termination import Termination, WorkerEnded
from workers.transport.peer import Peer

TOLERANCE = 1e-4
NEVER = "tests.wire.stubborn:never_right"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


def versions_of(part: Group | Partial) -> list[Version]:
    runs = zip(part.epochs.tolist(), part.steps.tolist(), part.run_lengths.tolist(), strict=True)
    return [version for epoch, step, length in runs for version in [Version(epoch, step)] * length]


def split(part: Group | Partial) -> list[tuple[list[int], list[float], list[Version]]]:
    """Tokens, log-probs and versions of each sample."""
    found, start, versions = [], 0, versions_of(part)
    for length in part.lengths.tolist():
        end = start + length
        found.append((part.tokens[start:end].tolist(), part.logprobs[start:end].tolist(), versions[start:end]))
        start = end
    return found


def assert_goes_on(partial: Partial, group: Group) -> None:
    """Every sample of `group` begins with exactly what `partial` has of it."""
    assert group.group_id == partial.group_id
    for before, after in zip(split(partial), split(group), strict=True):
        for kept, whole in zip(before, after, strict=True):
            assert whole[: len(kept)] == kept  # type: ignore[index]


def oracle(folder: str, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray:
    """Hugging Face's log-probs of `tokens` after `prompt`."""
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits[0, len(prompt) - 1: -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt):, None])[:, 0].numpy()


def assert_nothing_runs() -> None:
    """No engine and no reward process of ours is left."""
    assert [words for child in psutil.Process().children(recursive=True) if "workers." in (words := " ".join(command_line(child)))] == []


async def test_a_drained_worker_gives_back_every_token_and_another_one_goes_on(run: RunFolder, weights: Weights) -> None:
    config = make_config(weights.models[0], server=Server.embedded)
    old, new = weights.publish(Version(1, 1), 0), weights.publish(Version(1, 2), 1)
    async with playing(run, 1, old) as play:
        async with working(run, config) as (worker, task):
            await play.until_ready()
            await play.lease(make_lease("g1"), make_lease("g2"))
            await generated(worker, 300)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert await ended(task) == Termination("drained", "told by SIGUSR2", signal.SIGUSR2)
        await play.until(lambda: play.all(Goodbye))
        assert play.all(Goodbye) == [Goodbye("told by SIGUSR2")] and play.all(Draining) == [Draining("told by SIGUSR2")]
        assert play.all(Heartbeat)[-1].capacity == 0
        parked = {message.partial.group_id: message.partial for message in play.all(GroupParked)}
        assert sorted(parked) == ["g1", "g2"] and list(run.partials.iterdir()) == []
        for partial in parked.values():
            check_partial(partial)
            assert set(versions_of(partial)) == {Version(1, 1)} and not partial.finished.any()
        assert sum(partial.tokens.size for partial in parked.values()) >= 290  # tokens under way when it was asked are counted too
        assert_nothing_runs()

        play.announcement = new
        async with working(run, config) as (_, task):
            await play.until(lambda: len(play.all(Register)) == 2)
            await play.until_ready()
            await play.lease(*(make_lease(group_id, 1, partial=partial) for group_id, partial in parked.items()))
            await play.until(lambda: len(play.all(GroupFinished)) == 2)
            await play.say(Finish(""))
            assert await ended(task) == Termination("finished", "")
    for message in play.all(GroupFinished):
        group, partial = message.group, parked[message.group.group_id]
        check_group(group)
        assert_goes_on(partial, group)
        assert group.attempt == 1 and group.lengths.tolist() == [600] * 3
        assert group.tokens_interrupted == partial.tokens.size and group.num_interruptions == int((partial.lengths > 0).sum())
        for (tokens, logprobs, versions), cut in zip(split(group), partial.lengths.tolist(), strict=True):
            assert versions == [Version(1, 1)] * cut + [Version(1, 2)] * (600 - cut)
            prompt = group.prompt.tolist()
            assert np.abs(oracle(old.folder, prompt, tokens, 0.8) - logprobs)[:cut].max(initial=0) <= TOLERANCE
            assert np.abs(oracle(new.folder, prompt, tokens, 0.8) - logprobs)[cut:].max() <= TOLERANCE


async def test_an_episode_of_many_turns_goes_on_token_by_token_elsewhere(run: RunFolder, weights: Weights) -> None:
    config = make_config(weights.models[0], server=Server.embedded, max_new_tokens=60)
    config.workflow.name, config.workflow.max_turns, config.workflow.feedback = "multi_turn", 14, " no: "
    config.reward.verifier = NEVER
    length = 14 * 60 + 13 * len(" no: ")
    old, new = weights.publish(Version(2, 1), 0), weights.publish(Version(2, 2), 1)
    async with playing(run, 1, old) as play:
        async with working(run, config) as (worker, task):
            await play.until_ready()
            await play.lease(*(msgspec.structs.replace(make_lease(group_id), verifier=NEVER) for group_id in ("g1", "g2")))
            await generated(worker, 500)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (await ended(task)).how == "drained"
        await play.until(lambda: play.all(Goodbye))
        parked = {message.partial.group_id: message.partial for message in play.all(GroupParked)}
        assert sorted(parked) == ["g1", "g2"]
        for partial in parked.values():
            check_partial(partial)
            assert partial.turns is not None and partial.lengths.size > 3 and set(partial.turns.episodes.tolist()) == {0, 1, 2}
        play.announcement = new
        async with working(run, config) as (_, task):
            await play.until(lambda: len(play.all(Register)) == 2)
            await play.until_ready()
            await play.lease(*(msgspec.structs.replace(make_lease(group_id, 1, partial=partial), verifier=NEVER)
                               for group_id, partial in parked.items()))
            await play.until(lambda: len(play.all(GroupFinished)) == 2)
            await play.say(Finish(""))
            assert await ended(task) == Termination("finished", "")
    for message in play.all(GroupFinished):
        group, partial = message.group, parked[message.group.group_id]
        check_group(group)
        assert group.lengths.tolist() == [length] * 3 and group.scores.tolist() == [0.0] * 3 and group_episodes(group).tolist() == [0, 1, 2]
        assert sum(int(view.loss_mask[view.steps == 1].sum()) for view in samples(group)) == partial.tokens.size, "nothing was sampled twice"
        assert partial.turns is not None
        for episode, view in enumerate(samples(group)):
            tokens, first = view.tokens.tolist(), view.steps == 1
            kept = [tokens_of for tokens_of, number in zip(split(partial), partial.turns.episodes.tolist(), strict=True) if number == episode]
            assert [token for part, _, _ in kept for token in part] == view.tokens[view.loss_mask & first].tolist()
            assert view.loss_mask.tolist() == ([True] * 60 + [False] * 5) * 13 + [True] * 60
            assert not first[int(first.sum()):].any(), "the old weights' tokens come first"
            for folder, which in ((old.folder, first), (new.folder, ~first)):
                chosen = which & view.loss_mask
                assert np.abs(oracle(folder, group.prompt.tolist(), tokens, 0.8) - view.logprobs)[chosen].max(initial=0) <= TOLERANCE


async def test_the_coordinator_can_ask_for_everything_back(run: RunFolder, weights: Weights) -> None:
    async with playing(run, 1, weights.publish(Version(1, 3))) as play, working(run, make_config(weights.models[0])) as (worker, task):
        await play.until_ready()
        await play.lease(make_lease("g1"), make_lease("g2"), make_lease("e0.3", purpose=Purpose.evaluation),
                         make_lease("g4", version=Version(1, 99)))
        await generated(worker, 50)
        await play.say(Drain("the run is saved"))
        assert await ended(task) == Termination("drained", "the run is saved", None)
        await play.until(lambda: play.all(Goodbye))
        parked = {message.partial.group_id: message.partial for message in play.all(GroupParked)}
        assert sorted(parked) == ["g1", "g2", "g4"], "an evaluation is not given back"
        assert parked["g4"].tokens.size == 0 and parked["g4"].lengths.tolist() == [0, 0, 0], "one that waited for its version is"
        assert play.all(GroupFinished) == play.all(GroupFailed) == play.all(WorkerFailed) == []
    assert_nothing_runs()


async def test_what_nobody_takes_is_written_down(run: RunFolder, weights: Weights) -> None:
    """One group finishes while there is no coordinator, another one is in the middle when SIGTERM comes."""
    config = make_config(weights.models[0], max_new_tokens=600)
    async with playing(run, 1, weights.publish(Version(1, 4))) as play, working(run, config) as (worker, task):
        await play.until_ready()
        play.deaf = True
        half = Partial("g1", 0, Purpose.training, *arrays([599, 599, 600], [False, False, True]))
        await play.lease(make_lease("g1", 1, partial=half))
        await play.until(lambda: play.all(GroupFinished))
        await play.lease(make_lease("g2"))
        await generated(worker, 100)
        await play.say(Suspended("its time is over"))
        await until_out_of_touch(worker)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await ended(task) == Termination("drained", "told by SIGTERM", signal.SIGTERM)
        assert play.all(GroupParked) == []
    decoder = from_workers(1 << 20)
    assert sorted(path.name for path in run.partials.iterdir()) == ["g1.1.msgpack", "g2.0.msgpack"]
    finished, parked = (decoder.unpack((run.partials / name).read_bytes()) for name in ("g1.1.msgpack", "g2.0.msgpack"))
    assert isinstance(finished, GroupFinished) and finished.group.lengths.tolist() == [600] * 3
    assert isinstance(parked, GroupParked) and parked.partial.tokens.size >= 90
    check_group(finished.group)
    check_partial(parked.partial)
    assert_goes_on(half, finished.group)
    assert_nothing_runs()


def arrays(lengths: list[int], finished: list[bool]) -> tuple:
    """The arrays of a partial of one version."""
    total = sum(lengths)
    return (Int32.of(lengths), Bool.of(finished), Int32.of([5] * total), Float32.of([-1.5] * total), Int32.of([1]), Int32.of([0]),
            Int32.of([total]))


async def until_out_of_touch(worker: RolloutWorker | Peer) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while worker.in_touch:
            await asyncio.sleep(0.01)


async def test_leases_that_are_under_way_when_it_leaves_are_given_back(run: RunFolder, weights: Weights) -> None:
    async with playing(run, 1, weights.publish(Version(1, 17))) as play, working(run, make_config(weights.models[0])) as (_, task):
        await play.until_ready()
        play.under_way = [make_lease("g1"), make_lease("g2")]
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (await ended(task)).how == "drained"
        await play.until(lambda: play.all(Goodbye))
        assert {message.partial.group_id: message.partial.tokens.size for message in play.all(GroupParked)} == {"g1": 0, "g2": 0}


async def test_a_deaf_coordinator_costs_the_deadline_and_no_token(run: RunFolder, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "AFTER_TERM_S", 2.0)
    async with playing(run, 1, weights.publish(Version(1, 5))) as play, working(run, make_config(weights.models[0])) as (worker, task):
        await play.until_ready()
        play.deaf = True
        await play.lease(make_lease("g1"))
        await generated(worker, 50)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await ended(task)).how == "drained"
        assert len(play.all(GroupParked)) >= 1
    assert [path.name for path in run.partials.iterdir()] == ["g1.0.msgpack"]


async def test_a_lease_that_nobody_wants_is_given_up_and_one_that_comes_twice_is_run_once(run: RunFolder, weights: Weights) -> None:
    async with playing(run, 1, weights.publish(Version(1, 6))) as play, working(run, make_config(weights.models[0])) as (worker, task):
        ready = await play.until_ready()
        assert (ready.capacity, ready.leases) == (12, [])
        await play.lease(make_lease("g1"), make_lease("g1"), make_lease("g2"))
        await play.lease(make_lease("g2"))
        await play.until(lambda: [lease.group_id for lease in play.all(Heartbeat)[-1].leases] == ["g1", "g2"])
        await generated(worker, 30)
        assert (await engine_state(worker))["num_running"] == 6
        await play.say(Acknowledged("g1", 0, accepted=False))
        await play.say(Acknowledged("g2", 3, accepted=False))  # of another attempt: means nothing
        await play.until(lambda: [lease.group_id for lease in play.all(Heartbeat)[-1].leases] == ["g2"])
        async with asyncio.timeout(DEADLINE_S):
            while (await engine_state(worker))["num_running"] > 3:
                await asyncio.sleep(0.01)
        await play.until(lambda: play.all(GroupFinished))
        await play.until(lambda: not play.all(Heartbeat)[-1].leases)
        assert [message.group.group_id for message in play.all(GroupFinished)] == ["g2"] and play.accepted == [("g2", 0)]
        assert play.all(GroupFailed) == play.all(GroupParked) == []
        await play.say(Finish("enough"))
        assert await ended(task) == Termination("finished", "enough")


async def test_on_one_machine_a_signal_is_still_an_error(run: RunFolder, weights: Weights) -> None:
    config = make_config(weights.models[0], local=True)
    async with playing(run, 1, weights.publish(Version(1, 7))) as play, working(run, config) as (worker, task):
        await play.until_ready()
        await play.lease(make_lease("g1"))
        await generated(worker, 30)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(WorkerEnded, match="told to end by SIGTERM"):
            await ended(task)
        await play.until(lambda: play.all(Goodbye))
        assert "SIGTERM" in play.all(WorkerFailed)[0].cause and play.all(GroupParked) == []
    assert list(run.partials.iterdir()) == []


async def test_a_signal_while_there_is_no_coordinator_yet(run: RunFolder, weights: Weights) -> None:
    async with working(run, make_config(weights.models[0])) as (worker, task):
        async with asyncio.timeout(DEADLINE_S):
            while worker._told is None:
                await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert await ended(task) == Termination("drained", "told by SIGUSR2", signal.SIGUSR2)


async def test_a_signal_while_the_engine_starts(run: RunFolder, weights: Weights) -> None:
    async with playing(run, 1) as play, working(run, make_config(weights.models[0])) as (_, task):
        await play.until(lambda: play.all(Register))
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (await ended(task)).how == "drained"
        await play.until(lambda: play.all(Goodbye))
    assert_nothing_runs()
