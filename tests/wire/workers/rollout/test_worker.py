"""A rollout worker with two servers, as its coordinator sees it: what it can take, and what becomes of leases when a server dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.wire.fleet import Weights, ended, make_config, make_lease, make_run, playing, working
from tests.wire.workers.rollout.engines.test_engine import pid_of
from tests.wire.workers.rollout.leases.test_drain import assert_nothing_runs, versions_of
from workers.config import Config
from workers.messages.from_coordinator import Finish
from workers.messages.from_worker import GroupFailed, GroupFinished, GroupParked, Heartbeat, WorkerFailed
from workers.messages.groups import check_group, check_partial
from workers.messages.parts import Version
from workers.rollout.worker import RolloutWorker
from workers.run.folder import RunFolder
from workers.slurm.termination import Termination, WorkerEnded


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


def two_servers(weights: Weights, **changes: float) -> Config:
    config = make_config(weights.models[0])
    config.allocation.replica_size = 2
    for name, value in changes.items():
        setattr(config.engine, name, value)
    return config


def engines_of(worker: RolloutWorker) -> list:
    assert worker._engines is not None
    return worker._engines.engines


async def test_a_server_that_dies_costs_no_lease_and_is_told(run: RunFolder, weights: Weights) -> None:
    async with playing(run, 1, weights.publish(Version(1, 1))) as play, working(run, two_servers(weights)) as (worker, task):
        ready, began = await play.until_ready(), time.monotonic()
        await play.until(lambda: play.all(Heartbeat)[-1].capacity == 24)
        assert ready.held == Version(1, 1) and ready.status.sample_s == 0
        await play.lease(*(make_lease(f"g{index}") for index in range(1, 5)))
        await play.until(lambda: play.all(Heartbeat)[-1].tokens_in_flight >= 4 * 3 * 300)
        engines = engines_of(worker)
        assert [load.num_samples for load in worker._engines._routing.loads] == [6, 6]  # type: ignore[union-attr]
        os.kill(pid_of(engines[0]), signal.SIGKILL)
        await play.until(lambda: play.all(Heartbeat)[-1].capacity == 12)
        told = play.all(Heartbeat)[-1]
        assert told.held == Version(1, 1), "the other one works"
        await play.until(lambda: "engine 1 of 2 to start again (restart 1 of 3): the synthetic engine" in play.all(Heartbeat)[-1].status.waiting_for)
        await play.until(lambda: len(play.all(GroupFinished)) == 4)
        await play.until(lambda: play.all(Heartbeat)[-1].capacity == 24 and not play.all(Heartbeat)[-1].leases)
        last = play.all(Heartbeat)[-1]
        assert (last.status.num_restarts, last.status.waiting_for, last.tokens_in_flight) == (1, "leases", 0)
        assert 0 < last.status.sample_s < 12 * (time.monotonic() - began)
        await play.say(Finish(""))
        assert await ended(task) == Termination("finished", "")
    for message in play.all(GroupFinished):
        check_group(message.group)
        assert message.group.lengths.tolist() == [600] * 3 and set(versions_of(message.group)) == {Version(1, 1)}
    assert play.all(GroupFailed) == play.all(WorkerFailed) == []
    assert_nothing_runs()


async def test_the_cause_is_told_once_restarts_are_used_up(run: RunFolder, weights: Weights) -> None:
    async with playing(run, 1, weights.publish(Version(1, 2))) as play, working(run, two_servers(weights, max_restarts=0)) as (worker, task):
        await play.until_ready()
        await play.until(lambda: play.all(Heartbeat)[-1].capacity == 24)
        await play.lease(make_lease("g1"))
        await play.until(lambda: play.all(Heartbeat)[-1].leases)
        os.kill(pid_of(engines_of(worker)[1]), signal.SIGKILL)
        with pytest.raises(BaseExceptionGroup) as caught:
            await ended(task)
        assert caught.group_contains(WorkerEnded, match="was killed by SIGKILL")
        await play.until(lambda: play.all(WorkerFailed))
        assert "the synthetic engine" in play.all(WorkerFailed)[0].cause and play.all(GroupFailed) == []
    assert_nothing_runs()


async def test_a_drain_brings_back_what_both_servers_have(run: RunFolder, weights: Weights) -> None:
    async with playing(run, 1, weights.publish(Version(1, 3))) as play, working(
            run, two_servers(weights, synthetic_tokens_per_s=200.0)) as (worker, task):
        await play.until_ready()
        await play.until(lambda: play.all(Heartbeat)[-1].capacity == 24)
        await play.lease(make_lease("g1"), make_lease("g2"))
        for engine in engines_of(worker):
            while (await engine.client._call("GET", "/server_info", None))["generated_tokens"] < 90:
                pass
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (await ended(task)).how == "drained"
        await play.until(lambda: {message.partial.group_id for message in play.all(GroupParked)} == {"g1", "g2"})
    for message in play.all(GroupParked):
        check_partial(message.partial)
        assert message.partial.tokens.size >= 80
    assert_nothing_runs()
