"""Engines that die, hang, refuse their weights, or do not know how to be interrupted: real processes, over all their lives."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.conformance.models import prompt_of, write_model
from tests.wire.workers.rollout.engines import test_sampler
from tests.wire.workers.rollout.engines.test_sampler import (
    DEADLINE_S,
    LONG,
    LONG_PARAMS,
    TOLERANCE,
    Following,
    Rig,
    cuts_of,
    lease,
    running,
    until,
    write_endless_model,
)
from workers.config import Interrupt, Server
from workers.messages.parts import Announcement, Version
from workers.rollout.engines.client import BadRequest, EngineClient, EngineError, NoAnswer, SamplingParams
from workers.rollout.engines.engine import Engine
from workers.rollout.engines.sampler import Sample
from workers.run.processes import first_cause
from workers.slurm.termination import WorkerEnded
from workers.weights.manifest import make_manifest

SHORT = SamplingParams(20, 1.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_endless_model(folder / str(seed), seed) for seed in range(2)]


@pytest_asyncio.fixture
async def real(tmp_path: Path, models: list[Path]) -> AsyncIterator[Rig]:
    """The embedded engine."""
    async with running(tmp_path, models) as rig:
        yield rig


@pytest_asyncio.fixture
async def one(tmp_path: Path, models: list[Path]) -> AsyncIterator[Rig]:
    async with running(tmp_path, models, **slow()) as rig:
        yield rig


def pid_of(engine: Engine) -> int:
    assert engine._process is not None and engine._process._process is not None
    return engine._process._process.pid


def slow(**changes: Any) -> dict[str, Any]:
    """A synthetic engine that takes two seconds for the longest sample."""
    return {"server": Server.synthetic, "synthetic_tokens_per_s": 300.0, "synthetic_mean_tokens": 1e6, **changes}


def sample_all(rig: Rig, number: int, params: SamplingParams = LONG_PARAMS) -> list[asyncio.Task[Sample]]:
    """Samples of groups of their own."""
    sampler = rig.sampler
    return [asyncio.create_task(sampler.sample(lease(group_id=f"g{index}"), f"{index:04d}", prompt_of(9, index), params, index))
            for index in range(number)]


async def generating(engine: Engine, num_tokens: int = 20) -> None:
    """Wait until a server has generated so many more tokens."""
    client = engine.client
    assert client is not None
    base = (await client._call("GET", "/server_info", None))["generated_tokens"]

    async def does() -> bool:
        return (await client._call("GET", "/server_info", None))["generated_tokens"] > base + num_tokens

    await until(does)


async def restarted(engine: Engine, version: Version, times: int = 1) -> None:
    async def again() -> bool:
        return engine.num_restarts == times and engine.held == version

    await until(again)


async def raised(task: asyncio.Task[None]) -> None:
    """Raise the first cause of what ends `task`."""
    async with asyncio.timeout(test_sampler.DEADLINE_S):
        (error,) = await asyncio.gather(task, return_exceptions=True)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BaseException)
    raise error


# -- death and hanging ---------------------------------------------------------------------------------------------------

async def test_a_killed_engine_is_started_again_and_its_requests_go_on(real: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = real.publish(0), real.publish(1)
    async with Following(real, Interrupt.abort) as following:
        await following.load(first)
        (sampling,) = sample_all(real, 1)
        await generating(real.engine)
        await following.load(second)  # what it had by now is on our side
        await generating(real.engine)
        killed = pid_of(real.engine)
        os.kill(killed, signal.SIGKILL)
        sample = await sampling
        (before, cut), (after, end) = cuts_of(sample)
        assert (before, after, end, sample.finished) == (first.version, second.version, LONG, True) and cut > 0
        assert real.error(first.version, prompt_of(9, 0), sample.tokens, sample.logprobs, end=cut) <= TOLERANCE
        assert real.error(second.version, prompt_of(9, 0), sample.tokens, sample.logprobs, start=cut) <= TOLERANCE
        assert real.engine.num_restarts == 1 and pid_of(real.engine) != killed and real.engines.waiting_for == ""
    assert f"the engine is started again in 1 s: the embedded engine (process {killed}) was killed by SIGKILL" in capsys.readouterr().out


async def test_while_it_starts_again_status_says_so_and_it_takes_no_work(one: Rig) -> None:
    assert one.engines.held is not None and one.engines.capacity == 8
    killed = pid_of(one.engine)
    os.kill(killed, signal.SIGKILL)

    async def gone() -> bool:
        return one.engines.waiting_for != ""

    await until(gone)
    assert (one.engines.held, one.engines.capacity) == (None, 0)
    how = f"the synthetic engine (process {killed}) was killed by SIGKILL"
    assert one.engines.waiting_for == f"the engine to start again (restart 1 of 3): {how}"
    (sampling,) = sample_all(one, 1, SHORT)
    await asyncio.sleep(0)
    assert one.engines.tokens_in_flight > 0, "it waits for the server"
    assert one.newest is not None and cuts_of(await sampling) == [(one.newest.version, 20)] and one.engines.tokens_in_flight == 0


async def test_an_engine_that_hangs_is_ended_and_started_again(tmp_path: Path, models: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    async with running(tmp_path, models, **slow(health_timeout_s=2.0)) as rig:
        (sampling,) = sample_all(rig, 1)
        await generating(rig.engine)
        hung = pid_of(rig.engine)
        os.kill(hung, signal.SIGSTOP)
        assert rig.newest is not None and cuts_of(await sampling) == [(rig.newest.version, LONG)]
        assert not psutil.pid_exists(hung) and rig.engine.num_restarts >= 1
    assert "the engine has given no sign of life for 2 s (engine.health_timeout_s)" in capsys.readouterr().out


async def test_an_engine_that_hangs_while_it_loads_is_ended_and_gets_the_weights_again(tmp_path: Path, models: list[Path]) -> None:
    async with running(tmp_path, models, **slow(health_timeout_s=100.0, load_timeout_s=8.0)) as rig:
        second = rig.publish(1)
        async with Following(rig) as following:
            os.kill(pid_of(rig.engine), signal.SIGSTOP)
            following.holder.announce(second)
            await restarted(rig.engine, second.version)
            assert cuts_of(await rig.sample("again", prompt_of(5), SHORT, 0)) == [(second.version, 20)]


async def test_an_engine_that_dies_while_it_stands_still_for_a_broadcast_is_started_again(one: Rig) -> None:
    async def dies() -> bool:
        os.kill(pid_of(one.engine), signal.SIGKILL)
        while one.engine.client is client:
            await asyncio.sleep(0)
        return True

    async def load(_: EngineClient) -> None:
        await client.begin_update(DEADLINE_S)

    client, version = one.engine.client, Version(1, 1)
    assert client is not None and one.newest is not None
    assert not await one.engine.receive(version, dies, load)
    await restarted(one.engine, one.newest.version)
    assert one.engine.num_restarts == 1 and one.engine.interruption.num_changes % 2 == 0


async def test_a_server_that_dies_right_after_it_has_taken_weights_does_not_hold_them(one: Rig) -> None:
    async def go() -> bool:
        return True

    async def load(_: EngineClient) -> None:
        os.kill(pid_of(one.engine), signal.SIGKILL)
        while one.engine.client is client:
            await asyncio.sleep(0)

    client, version = one.engine.client, Version(1, 1)
    assert client is not None and one.newest is not None
    assert not await one.engine.receive(version, go, load)
    await restarted(one.engine, one.newest.version)


async def test_a_pause_is_no_hang(tmp_path: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rollout.engines.engine.PROBE_S", 0.05)
    async with running(tmp_path, models, **slow(health_timeout_s=30.0)) as rig:
        update, started, going_on = rig.client.update_weights, asyncio.Event(), asyncio.Event()

        async def long_update(*arguments: Any, **options: Any) -> None:
            started.set()
            await going_on.wait()
            await update(*arguments, **options)

        async def deaf(path: str, timeout_s: float) -> bool:
            probes.append(path)
            return False

        probes: list[str] = []
        async with Following(rig) as following:
            loading = asyncio.create_task(following.load(rig.publish(1)))
            monkeypatch.setattr(rig.client, "update_weights", long_update)
            await started.wait()
            monkeypatch.setattr(rig.client, "answers", deaf)
            await asyncio.sleep(1.0)  # time for twenty probes
            assert probes == []
            monkeypatch.undo()
            going_on.set()
            await loading
            assert rig.engine.num_restarts == 0


async def test_too_many_deaths_end_the_worker_with_the_cause(tmp_path: Path, models: list[Path]) -> None:
    with pytest.raises(WorkerEnded) as caught:
        async with running(tmp_path, models, **slow(max_restarts=1)) as rig:
            for times in (1, 2):
                assert rig.newest is not None
                await restarted(rig.engine, rig.newest.version, times - 1)
                os.kill(pid_of(rig.engine), signal.SIGKILL)
            await raised(rig.living)
    cause = str(caught.value)
    assert "the synthetic engine" in cause and "was killed by SIGKILL" in cause
    assert "It has been started again 1 times within 60 minutes (engine.max_restarts)" in cause


async def test_an_engine_that_cannot_even_start_once_ends_the_worker_at_once(tmp_path: Path, models: list[Path]) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running(tmp_path, models, **slow(context_length=1 << 20)):
            pass
    assert "exited with status 2" in first_cause(caught.value) and "--context-length 1048576" in first_cause(caught.value)


# -- refusals ------------------------------------------------------------------------------------------------------------

async def test_weights_that_are_refused_once_are_given_once_more(
        one: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    update, calls = one.client.update_weights, []

    async def flaky(*arguments: Any, **options: Any) -> None:
        calls.append((await one.client._call("GET", "/server_info", None))["paused"])
        if len(calls) == 1:
            raise EngineError("engine: /update_weights_from_disk answered 500: out of memory")
        await update(*arguments, **options)

    monkeypatch.setattr(one.client, "update_weights", flaky)
    second = one.publish(1)
    (sampling,) = sample_all(one, 1)
    await generating(one.engine)
    async with Following(one) as following:
        await following.load(second)
    assert calls == [True, True] and one.engine.num_restarts == 0
    assert [version for version, _ in cuts_of(await sampling)][-1] == second.version
    assert f"has refused version {second.version}, and is given it once more" in capsys.readouterr().out


async def test_an_engine_that_keeps_refusing_starts_again_with_the_new_weights(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*arguments: Any, **options: Any) -> None:
        raise EngineError("engine: /update_weights_from_disk answered 400: it is confused")

    monkeypatch.setattr(one.client, "update_weights", refuse)
    second = one.publish(1)
    (sampling,) = sample_all(one, 1)
    await generating(one.engine)
    async with Following(one) as following:
        following.holder.announce(second)
        await restarted(one.engine, second.version)
    assert cuts_of(await sampling) == [(second.version, LONG)], "what the old server had of it may have come from half an update"


async def test_weights_that_no_engine_takes_end_the_worker_with_the_cause(one: Rig, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "qwen2", 0)
    held, bad = one.engines.held, Version(1, 99)
    async with Following(one) as following:
        following.holder.announce(Announcement(bad, str(other), make_manifest(other, bad)))
        with pytest.raises(EngineError, match="/update_weights_from_disk answered 400"):
            await raised(one.living)
        assert one.engine.num_restarts == 1 and one.engine.held is None and held is not None


async def test_no_answer_is_not_taken_for_a_refusal(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    async def lost(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        raise NoAnswer("engine: /update_weights_from_disk failed: TimeoutError")

    monkeypatch.setattr(one.client, "update_weights", lost)
    second = one.publish(1)
    async with Following(one) as following:
        following.holder.announce(second)
        await restarted(one.engine, second.version)
    assert len(calls) == 1


async def test_a_server_that_does_not_know_the_mode_is_interrupted_by_abort_and_that_is_said_once(
        real: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pause, modes = real.client.pause, []

    async def older(mode: str, timeout_s: float | None = None) -> None:
        modes.append(mode)
        if mode != "abort":
            raise BadRequest("engine: /pause_generation answered 422: mode: extra fields not permitted")
        await pause(mode, timeout_s)

    monkeypatch.setattr(real.client, "pause", older)
    versions = [real.publish(seed) for seed in (0, 1, 0)]
    async with Following(real) as following:
        await following.load(versions[0])
        (sampling,) = sample_all(real, 1)
        for announcement in versions[1:]:
            await generating(real.engine)
            await following.load(announcement)
        sample = await sampling
    assert modes == ["retract", "abort", "abort", "abort"]
    assert [version for version, _ in cuts_of(sample)] == [announcement.version for announcement in versions]
    start = 0
    for version, end in cuts_of(sample):
        assert real.error(version, prompt_of(9, 0), sample.tokens, sample.logprobs, start, end) <= TOLERANCE
        start = end
    assert capsys.readouterr().out.count("does not know engine.interrupt=retract") == 1


# -- several servers -----------------------------------------------------------------------------------------------------

@pytest_asyncio.fixture
async def two(tmp_path: Path, models: list[Path]) -> AsyncIterator[Rig]:
    async with running(tmp_path, models, number=2, **slow()) as rig:
        yield rig


async def test_groups_stay_together_and_are_shared_by_both_servers(two: Rig) -> None:
    assert two.engines.capacity == 16
    sampler, asked = two.sampler, lease(group_id="together")
    group = [asyncio.create_task(sampler.sample(asked, f"{index:04d}", prompt_of(9), LONG_PARAMS, index)) for index in range(4)]
    others = sample_all(two, 4)

    async def half_each() -> bool:
        clients = [engine.client for engine in two.engines.engines]
        return [(await client._call("GET", "/server_info", None))["num_running"] for client in clients if client is not None] == [4, 4]

    await until(half_each)
    for sample in await asyncio.gather(*group, *others):
        assert len(sample.tokens) == LONG


async def test_servers_are_updated_one_after_the_other(two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    for index, engine in enumerate(two.engines.engines):
        client = engine.client
        assert client is not None

        def noted(name: str, index: int, call: Any) -> Any:
            async def wrapped(*arguments: Any, **options: Any) -> None:
                events.append((name, index))
                await call(*arguments, **options)
            return wrapped

        for name in ("pause", "resume"):
            monkeypatch.setattr(client, name, noted(name, index, getattr(client, name)))
    second = two.publish(1)
    samples = sample_all(two, 4)
    async with Following(two) as following:
        for engine in two.engines.engines:
            await generating(engine)
        await following.load(second)
        assert events == [("pause", 0), ("resume", 0), ("pause", 1), ("resume", 1)]
        assert following.changes[-1] == (second.version, None) and two.engines.held == second.version
    for sample in await asyncio.gather(*samples):
        assert [version for version, _ in cuts_of(sample)][-1] == second.version


async def test_one_dead_server_of_two_takes_nothing_with_it(two: Rig) -> None:
    held = two.engines.held
    samples = sample_all(two, 6)
    dead, other = two.engines.engines
    for engine in two.engines.engines:
        await generating(engine)
    os.kill(pid_of(dead), signal.SIGKILL)
    assert held is not None
    for sample in await asyncio.gather(*samples):
        assert cuts_of(sample) == [(held, LONG)]
    await restarted(dead, held)
    assert other.num_restarts == 0 and two.engines.capacity == 16


async def test_a_lease_of_a_newer_version_waits_for_the_first_server_that_holds_it(two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two.engines.engines
    released, update = asyncio.Event(), second.client.update_weights if second.client else None
    assert update is not None and second.client is not None

    async def late(*arguments: Any, **options: Any) -> None:
        await released.wait()
        await update(*arguments, **options)

    monkeypatch.setattr(second.client, "update_weights", late)
    newer, held = two.publish(1), two.engines.held
    async with Following(two) as following:
        sampling = asyncio.create_task(two.sampler.sample(lease(version=newer.version), "0000", prompt_of(9), SHORT, 0))
        following.holder.announce(newer)
        assert cuts_of(await sampling) == [(newer.version, 20)]
        assert (first.held, second.held) == (newer.version, held) and two.engines.held == held, "the older one counts"
        released.set()
        await following.load(newer)


async def test_a_server_that_dies_while_the_other_one_loads_has_the_newest_weights_when_it_works_again(two: Rig) -> None:
    newer = two.publish(1)
    first, _ = two.engines.engines
    async with Following(two) as following:
        os.kill(pid_of(first), signal.SIGKILL)
        following.holder.announce(newer)
        await restarted(first, newer.version)
        sample = await two.sampler.sample(lease(version=newer.version), "0000", prompt_of(9), SHORT, 0)
        assert cuts_of(sample) == [(newer.version, 20)]
        await following.load(newer)
