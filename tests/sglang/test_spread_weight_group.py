"""Weights by broadcast into one SGLang server over two nodes, on the CPU: its rank on the other node takes its part from the trainer itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.engines import CPU, sglang_here
from tests.sglang.test_server_process import ON_CPU, group
from tests.sglang.test_spread_server import part_elsewhere
from tests.wire.fleet import make_run
from tests.wire.workers.rollout.weights import test_broadcast
from tests.wire.workers.rollout.weights.test_broadcast import Rig, running
from workers.config import EngineConfig, EngineParallelConfig
from workers.rollout.engines.servers.spread_server import SpreadServer
from workers.rollout.nodes.node import EngineNode
from workers.rollout.nodes.other_nodes import OtherNodes
from workers.slurm.job import Place

pytestmark = [sglang_here, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("weight_group")
    variables = {**CPU, "TMPDIR": str(tmp_path_factory.mktemp("t")), "SGLANG_HEALTH_CHECK_TIMEOUT": "3", "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    options = {**ON_CPU, "mem_fraction": 0.5, "parallel": EngineParallelConfig(tp=2), "health_timeout_s": 60.0}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(test_broadcast, "DEADLINE_S", 400.0)
        async with running(folder, **options) as rig:
            run, places = make_run(folder / "run"), [Place("17", "17_0", "17", 0, rank, 2, 0) for rank in range(2)]
            serving = asyncio.create_task(EngineNode(run, rig.config, places[1]).work())
            nodes = OtherNodes(run, rig.config, places[0], lambda reason: None)

            def spawn(config: EngineConfig, model: Path, log: Path) -> SpreadServer:
                return SpreadServer(nodes, config, model, log, None)

            rig.spawn = spawn
            try:
                await rig.add("one", 2)
                yield rig
            finally:
                await rig.end()
                await nodes.close()
                await serving


async def test_the_rank_on_the_other_node_takes_its_part_to_the_bit(rig: Rig) -> None:
    await rig.stand()
    assert len(rig.servers) == 1 and rig.group.members.num_ranks == 3
    for _ in range(2):
        await rig.deliver()


async def test_a_rank_that_is_killed_there_in_the_middle_keeps_nobody_and_comes_back(rig: Rig) -> None:
    await rig.stand()
    rig.publish()
    (server,), elsewhere = rig.servers, part_elsewhere()
    victim = next(process for process in group(elsewhere) if "sglang::scheduler" in " ".join(process.cmdline()))
    rig.before = lambda number: os.kill(victim.pid, signal.SIGKILL) if number == 5 else None
    await rig.broadcast()
    rig.before = lambda number: None
    rig.announce()
    await rig.check()
    assert server.num_restarts == 1 and not group(elsewhere)
    await rig.stand()
    rig.publish()
    assert await rig.broadcast()
    await rig.check()
