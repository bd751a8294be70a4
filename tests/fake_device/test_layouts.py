"""A step of all ranks of a layout would come to its end: every rank of a group makes the same collectives in the same order, with the same shapes,
and what one stage sends, the next receives. On a cluster a mismatch is a hang."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

from tests.fake_device.cases import Case
from tests.fake_device.conftest import FiguresOf

WORLD = 8
DENSE: list[dict[str, Any]] = [
    {}, {"tp": 2}, {"tp": 2, "sequence": False}, {"tp": 8}, {"pp": 4}, {"cp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2, "cp": 2}]
MIXTURE: list[dict[str, Any]] = [
    {"ep": 8}, {"ep": 2}, {"tp": 2, "ep": 4}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 4}, {"cp": 2, "ep": 4}, {"tp": 2, "pp": 2, "ep": 2},
    {"tp": 4, "ep": 8}, {"pp": 2, "vpp": 2, "ep": 4}]
INTERLEAVED: list[dict[str, Any]] = [{"tp": 2, "pp": 2, "vpp": 2}, {"pp": 4, "vpp": 2}]
RECOMPUTE = ["none", "full", "selective"]


def cases(model: str, layouts: list[dict[str, Any]], changes: dict[str, Any], **more: Any) -> list[Case]:
    """All ranks of each layout, few layers, each way of recomputing in turn."""
    return [Case(model, WORLD, layout, tuple(range(WORLD)), tokens=2048, length=640, recompute=RECOMPUTE[number % 3],
                 changes={"num_hidden_layers": max(2, layout.get("pp", 1) * layout.get("vpp", 1)), **changes}, **more)
            for number, layout in enumerate(layouts)]


# In the second minibatch gradients are added up while others are made.
SHARED: dict[str, Any] = {"group": 4, "num_minibatches": 2}
# Fewer experts: each costs the same, and every rank has more than one.
SOME_EXPERTS = {"num_experts": 16}


@pytest.mark.parametrize("tried", [
    pytest.param(cases("Qwen3-8B", [*DENSE[:3], DENSE[5], INTERLEAVED[1]], {}), id="8B"),
    pytest.param(cases("Qwen3-8B", [*DENSE[3:5], *DENSE[6:], INTERLEAVED[0]], {}), id="8B in other layouts", marks=pytest.mark.long),
    pytest.param(cases("Qwen3-0.6B", [DENSE[-1], INTERLEAVED[0]], {}, **SHARED), id="0.6B, shared prompts, two minibatches"),
    pytest.param(cases("Qwen3-0.6B", [*DENSE[:-1:2], INTERLEAVED[1]], {}, **SHARED), id="0.6B in other layouts", marks=pytest.mark.long),
    pytest.param(cases("Qwen3-8B", [DENSE[2], DENSE[-1]], {}, lora=8), id="8B with adapters"),
    pytest.param(cases("Qwen3-8B", [DENSE[0], *DENSE[4:-1:2]], {}, lora=8), id="8B with adapters in other layouts", marks=pytest.mark.long),
    pytest.param(cases("Qwen3-30B-A3B", MIXTURE[-3:], SOME_EXPERTS, num_minibatches=2), id="30B-A3B"),
    pytest.param(cases("Qwen3-30B-A3B", MIXTURE[:-3], SOME_EXPERTS, num_minibatches=2), id="30B-A3B in other layouts", marks=pytest.mark.long)])
def test_the_exchanges_of_all_ranks_match(tried: list[Case], figures_of: FiguresOf) -> None:
    for case, found in zip(tried, figures_of(tried), strict=True):
        assert found["mismatches"] == [], case
        assert len(found["ranks"]) == WORLD and min(figures["calls"] for figures in found["ranks"]) > 0
