"""Weights by broadcast into SGLang itself, on the CPU: what tests/wire/workers/rollout/weights/test_broadcast.py shows of the embedded engine."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
import pytest_asyncio

from tests.conformance.engines import CPU, sglang_here
from tests.sglang.test_server_process import ON_CPU
from tests.wire.workers.rollout.weights import test_broadcast
from tests.wire.workers.rollout.weights.test_broadcast import Rig, running, server_pid
from workers.rollout.engines.engine import Engine

pytestmark = [sglang_here, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CPU, "TMPDIR": str(tmp_path_factory.mktemp("t")), "SGLANG_HEALTH_CHECK_TIMEOUT": "3"}.items():
            patch.setenv(name, value)
        patch.setattr(test_broadcast, "DEADLINE_S", 400.0)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running(tmp_path_factory.mktemp("weight_group"), **{**ON_CPU, "mem_fraction": 0.5}, health_timeout_s=60.0) as rig:
        await rig.add("one")
        await rig.add("two")
        yield rig


def scheduler(engine: Engine) -> int:
    children = psutil.Process(server_pid(engine)).children(recursive=True)
    return next(child.pid for child in children if "sglang::scheduler" in " ".join(child.cmdline()))


async def test_every_server_gets_the_weights_to_the_bit(rig: Rig) -> None:
    await rig.stand()
    for _ in range(2):
        await rig.deliver()


async def test_a_server_that_is_killed_in_the_middle_keeps_neither_trainer_nor_the_other(rig: Rig) -> None:
    await rig.stand()
    rig.publish()
    victim = rig.servers[-1]
    pid, lives = scheduler(victim), victim.num_restarts
    rig.before = lambda number: os.kill(pid, signal.SIGKILL) if number == 5 else None
    await rig.broadcast()
    rig.before = lambda number: None
    rig.announce()
    await rig.check()
    assert victim.num_restarts > lives and rig.servers[0].num_restarts == 0
    await rig.stand()
    rig.publish()
    assert await rig.broadcast()
    await rig.check()
