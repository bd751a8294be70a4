"""Weights by broadcast into an SGLang server of two ranks, on the CPU: each takes whole tensors and keeps its part, to the bit what files bring."""

from __future__ import annotations

import pytest

from tests.conformance.engines import CPU, sglang_here
from tests.sglang.test_server_process import ON_CPU
from tests.wire.workers.rollout.weights import test_broadcast
from tests.wire.workers.rollout.weights.test_broadcast import running
from workers.config import EngineParallelConfig

pytestmark = [sglang_here, pytest.mark.asyncio, pytest.mark.timeout(900)]
A_CORE_EACH = "0|1"
"""SGLang asks for that where a machine has fewer NUMA nodes than ranks."""


async def test_both_ranks_of_a_server_take_their_part(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**CPU, "TMPDIR": str(tmp_path_factory.mktemp("t")), "SGLANG_CPU_OMP_THREADS_BIND": A_CORE_EACH}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(test_broadcast, "DEADLINE_S", 400.0)
    options = {**ON_CPU, "mem_fraction": 0.5, "parallel": EngineParallelConfig(tp=2), "health_timeout_s": 60.0}
    async with running(tmp_path_factory.mktemp("weight_group"), **options) as rig:
        await rig.add("one", 2)
        await rig.stand()
        assert len(rig.servers) == 1 and rig.group.members.num_ranks == 3
        for _ in range(2):
            await rig.deliver()
