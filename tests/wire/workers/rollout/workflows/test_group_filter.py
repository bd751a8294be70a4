"""Rejected groups between real rollout workers and coordinators: told in figures, until someone has heard it; held-out prompts never."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.wire.fleet import DEADLINE_S, Weights, make_config, make_lease, make_run, playing, working
from workers.config import Config, ConfigError, Server
from workers.messages.from_coordinator import Finish
from workers.messages.from_worker import GroupFailed, GroupFinished, GroupRejected, Heartbeat, Register, WorkerFailed
from workers.messages.parts import Announcement, Purpose, Version
from workers.run.folder import RunFolder

LENGTH = 5


def never(scores: list[float], lengths: list[int]) -> bool:
    assert len(scores) == len(lengths) == 3 and max(lengths) <= LENGTH
    return False


def always(scores: list[float], lengths: list[int]) -> bool:
    return True


def broken(scores: list[float], lengths: list[int]) -> bool:
    raise LookupError("no such prompt")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def beginning(weights: Weights) -> Announcement:
    return weights.publish(Version(1, 0))


def keeping(weights: Weights, name: str, server: Server = Server.synthetic) -> Config:
    config = make_config(weights.models[0], server=server, max_new_tokens=LENGTH, idle_s=600.0)
    config.workflow.keep = f"{__name__}:{name}"
    config.check()
    return config


@pytest.mark.parametrize(("name", "server"), [("never", Server.embedded), ("never", Server.synthetic), ("always", Server.synthetic)])
async def test_groups_are_kept_or_rejected_and_held_out_prompts_never(run: RunFolder, weights: Weights, beginning: Announcement, name: str,
                                                                        server: Server) -> None:
    async with playing(run, 1, beginning) as play, working(run, keeping(weights, name, server)):
        await play.until_ready()
        await play.lease(make_lease("g1"), make_lease("g2", 3), make_lease("e0.4", 7, purpose=Purpose.evaluation))
        await play.until(lambda: len(play.accepted) == 3)
        rejected = {(message.group_id, message.attempt): message for message in play.all(GroupRejected)}
        finished = {(message.group.group_id, message.group.attempt) for message in play.all(GroupFinished)}
        training = {("g1", 0), ("g2", 3)}
        assert (set(rejected), finished) == ((training, {("e0.4", 7)}) if name == "never" else (set(), training | {("e0.4", 7)}))
        for message in rejected.values():
            assert 0 < message.num_tokens <= 3 * LENGTH and 0 <= message.score <= 1 and message.tokens_interrupted == 0
        await play.until(lambda: play.all(Heartbeat)[-1].leases == [])
        assert play.all(Heartbeat)[-1].status.num_running == 0 and play.all(GroupFailed) == []


async def test_a_rejection_that_nobody_has_heard_is_told_to_the_next_coordinator(run: RunFolder, weights: Weights, beginning: Announcement) -> None:
    async with working(run, keeping(weights, "never")):
        async with playing(run, 1, beginning) as play:
            play.deaf = True
            await play.until_ready()
            await play.lease(make_lease("g1", 2))
            await play.until(lambda: play.all(GroupRejected))
        async with playing(run, 2, weights.publish(Version(2, 0))) as play:
            await play.until(lambda: play.accepted)
            assert play.accepted == [("g1", 2)] and [(held.group_id, held.attempt) for held in play.all(Register)[0].leases] == [("g1", 2)]
            assert {(message.group_id, message.attempt) for message in play.all(GroupRejected)} == {("g1", 2)}
            await play.until(lambda: play.all(Heartbeat) and play.all(Heartbeat)[-1].leases == [])


async def test_a_function_that_fails_costs_the_group_and_not_the_worker(run: RunFolder, weights: Weights, beginning: Announcement) -> None:
    async with playing(run, 1, beginning) as play, working(run, keeping(weights, "broken")) as (_, task):
        await play.until_ready()
        await play.lease(make_lease("g1"))
        await play.until(lambda: play.accepted)
        [failed] = {message.cause: message for message in play.all(GroupFailed)}.values()
        assert failed.fatal and "LookupError: no such prompt" in failed.cause and __file__ in failed.cause and "in broken" in failed.cause
        assert not task.done()
        await play.say(Finish(""))
        await asyncio.wait_for(asyncio.shield(task), DEADLINE_S)


async def test_a_worker_without_the_function_says_so_before_it_generates(run: RunFolder, weights: Weights, beginning: Announcement) -> None:
    async with playing(run, 1, beginning) as play, working(run, keeping(weights, "missing")) as (_, task):
        await play.until(lambda: play.all(WorkerFailed))
        assert "no function 'missing'" in play.all(WorkerFailed)[0].cause
        with pytest.raises(BaseException) as raised:
            await asyncio.wait_for(asyncio.shield(task), DEADLINE_S)
        assert raised.group_contains(ConfigError) if isinstance(raised.value, BaseExceptionGroup) else isinstance(raised.value, ConfigError)
