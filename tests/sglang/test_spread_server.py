"""One SGLang server over two nodes, on the CPU over gloo: the rollout worker's part here, the other node's in its task. `make test-sglang`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.conformance.engines import CPU, sglang_here
from tests.conformance.models import prompt_of
from tests.sglang.test_server_process import LENGTH, ON_CPU, PARAMS, SHORT, TOLERANCE, generating, group, main_of
from tests.wire.fleet import make_run
from tests.wire.workers.rollout.engines import test_sampler
from tests.wire.workers.rollout.engines.test_engine import restarted
from tests.wire.workers.rollout.engines.test_sampler import Following, Rig, cuts_of, running, write_endless_model
from workers.config import Config, EngineConfig, EngineParallelConfig, ModelConfig, Transport
from workers.rollout.engines.servers.spread_server import SpreadServer
from workers.rollout.nodes.node import EngineNode
from workers.rollout.nodes.other_nodes import OtherNodes
from workers.slurm.job import Place

pytestmark = [sglang_here, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True, params=["pp", "tp"])
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """How the server is split; the environment of a CPU machine, where the only rank of each node has a core of its own."""
    with pytest.MonkeyPatch.context() as patch:
        variables = {**CPU, "TMPDIR": str(tmp_path_factory.mktemp("t")), "SGLANG_HEALTH_CHECK_TIMEOUT": "3", "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(test_sampler, "DEADLINE_S", 400.0)
        yield request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory, split: str) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("rig")
    models = [write_endless_model(folder / str(seed), seed) for seed in range(2)]
    changes = {**ON_CPU, "parallel": EngineParallelConfig(**{split: 2}), "health_timeout_s": 30.0}
    run = make_run(folder / "run")
    config = Config(model=ModelConfig(path=str(models[0])), engine=test_sampler.engine_config(**changes))
    config.allocation.replica_size, config.weights.transport = 2, Transport.disk
    places = [Place("17", "17_0", "17", 0, rank, 2, 0) for rank in range(2)]
    serving = asyncio.create_task(EngineNode(run, config, places[1]).work())
    nodes = OtherNodes(run, config, places[0], lambda reason: None)
    try:
        async with running(folder, models, 2, spread_over(nodes), **changes) as rig:
            yield rig
    finally:
        await nodes.close()
        await serving


def spread_over(nodes: OtherNodes):
    def spawn(config: EngineConfig, model: Path, log: Path) -> SpreadServer:
        return SpreadServer(nodes, config, model, log, None)

    return spawn


def part_elsewhere() -> int:
    """SGLang's main process on the other node."""
    (attendant,) = (child for child in psutil.Process().children() if child.cmdline()[-3:-2] == ["1"] and "--node-rank" in child.cmdline())
    return main_of(attendant.pid)


async def test_running_samples_go_on_under_new_weights_on_both_nodes(rig: Rig) -> None:
    first, second = rig.publish(0), rig.publish(1)
    async with Following(rig) as following:
        await following.load(first)
        sampling = asyncio.create_task(rig.sample("across", prompt_of(12), PARAMS, seed=1))
        await generating(rig, sampling)
        await following.load(second)
        sample = await sampling
    (before, cut), (after, end) = cuts_of(sample)
    assert (before, after, end, sample.num_interruptions) == (first.version, second.version, LENGTH, 1) and 0 < cut < LENGTH
    assert rig.error(first.version, prompt_of(12), sample.tokens, sample.logprobs, end=cut) <= TOLERANCE
    assert rig.error(second.version, prompt_of(12), sample.tokens, sample.logprobs, start=cut) <= TOLERANCE


async def test_a_scheduler_that_dies_on_the_other_node_starts_both_again(rig: Rig) -> None:
    assert rig.newest is not None
    version, earlier, elsewhere = rig.newest.version, rig.engine.num_restarts, part_elsewhere()
    sampling = asyncio.create_task(rig.sample("lost", prompt_of(9), PARAMS, seed=2))
    await generating(rig, sampling)
    victim = next(process for process in group(elsewhere) if "sglang::scheduler" in " ".join(process.cmdline()))
    os.kill(victim.pid, signal.SIGKILL)
    sample = await sampling
    await restarted(rig.engine, version, earlier + 1)
    assert cuts_of(sample) == [(version, LENGTH)] and not group(elsewhere)
    assert rig.error(version, prompt_of(9), sample.tokens, sample.logprobs) <= TOLERANCE
    assert len((await rig.sample("after", prompt_of(9), SHORT, seed=3)).tokens) == 20
