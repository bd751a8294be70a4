"""What a step of real models may take, on one rank of real layouts. A change that brings a wait of the host, a gigabyte or an exchange more is
noticed here. The figures are those of the day they were written, rounded up; where one gets better, lower it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from launcher.memory.activations import GIB, layout
from launcher.memory.estimate import RankMemory, stage_memory
from launcher.memory.parameters import count_weights
from tests.fake_device.cases import Case
from tests.fake_device.conftest import FiguresOf
from workers.model.architecture import read_architecture

NORM = "megatron/core/optimizer/clip_grads.py"
"""Megatron-core's norm of the gradients brings one number to the host; ours are the other waits."""


def estimate(case: Case, rank: int, folder: Path) -> RankMemory:
    """What the launcher says of the pipeline stage of that rank."""
    architecture, config = read_architecture(case.write_model(folder)), case.config()
    spread = layout(config, case.world_size, gpu=True)
    return stage_memory(config, architecture, count_weights(architecture), spread, rank // (case.world_size // spread.pp))


FEWER = {"num_hidden_layers": 12}
"""All layers are alike: what is left out of a model here is more of the same."""
DENSE = Case("Qwen3-8B", 8, {"tp": 2}, (0,), num_minibatches=2)
STAGES = Case("Qwen3-8B", 64, {"tp": 2, "pp": 2}, (0, 63))
PIECES = Case("Qwen3-8B", 64, {"tp": 2, "pp": 2, "vpp": 3}, (0, 63), recompute="selective")
ADAPTED = Case("Qwen3-8B", 8, {"tp": 2}, (0,), num_minibatches=2, lora=16)
LAYOUTS = [
    [DENSE,
     Case("Qwen3-8B", 8, {"tp": 2}, (0,), length=2240, group=4, changes=FEWER),
     Case("Qwen3-8B", 8, {"tp": 2}, (0,), recompute="selective", changes=FEWER),
     Case("Qwen3-8B", 8, {"tp": 2, "cp": 2}, (0,), tokens=32768, length=16384, recompute="full", changes=FEWER),
     STAGES,
     PIECES],
    [ADAPTED],
    [Case("Qwen3-32B", 8, {"tp": 8}, (0,), recompute="full", changes=FEWER),
     Case("Qwen3-0.6B", 1, {}, (0,), tokens=32768),
     Case("Qwen3-0.6B", 2, {"cp": 2}, (0,), tokens=32768, length=2240, group=4)],
    [Case("Qwen3-30B-A3B", 8, {"ep": 8}, (0,), recompute="full", changes={"num_hidden_layers": 12}),
     Case("Qwen3-30B-A3B", 32, {"ep": 8}, (0,), recompute="full", tokens=16384, changes={"num_hidden_layers": 12}),
     Case("Qwen3-30B-A3B", 8, {"ep": 4, "tp": 2}, (0,), changes={"num_hidden_layers": 12}),
     Case("Qwen3-30B-A3B", 8, {"ep": 8}, (0,), recompute="selective", changes={"num_hidden_layers": 6})],
    [Case("GLM-4.5-Air", 8, {"ep": 8}, (0,), recompute="full", changes={"num_hidden_layers": 6}),
     Case("Moonlight-16B-A3B", 8, {"ep": 4, "tp": 2}, (0,), changes={"num_hidden_layers": 6}),
     Case("Moonlight-16B-A3B", 16, {"ep": 8, "pp": 2}, (0, 15), recompute="selective", length=2240, group=4, changes={"num_hidden_layers": 8})],
]
OTHERS = [
    Case("Qwen3-8B", 8, {"tp": 2}, (0,), recompute="selective"), Case("Qwen3-32B", 8, {"tp": 8}, (0,), recompute="full"),
    Case("Qwen3-8B", 1, {}, (0,), recompute="full", lora=16), Case("Qwen3-8B", 64, {"tp": 2, "pp": 2}, (0, 63), lora=64),
    Case("Qwen3-32B", 64, {"tp": 8, "pp": 2}, (0, 63), tokens=16384, length=8192, recompute="full")]


@pytest.mark.parametrize("cases", [*LAYOUTS, pytest.param(OTHERS, marks=pytest.mark.long)],
                         ids=["8B", "8B with adapters", "32B and 0.6B", "30B-A3B", "sigmoid", "others"])
def test_the_peak_is_what_the_launcher_says(cases: list[Case], figures_of: FiguresOf, tmp_path: Path) -> None:
    """Within 5%, without the reserve for what is no tensor."""
    for case, found in zip(cases, figures_of(cases), strict=True):
        for rank, figures in zip(case.ranks, found["ranks"], strict=True):
            told = estimate(case, rank, tmp_path)
            assert figures["held"] == pytest.approx(told.parameters + told.gradients + told.optimizer, rel=0.02), "nothing stays from step to step"
            assert figures["peak"] == pytest.approx(told.total - told.reserve, rel=0.05), (case, rank, told.parts())


def own_waits(counts: dict[str, Any]) -> int:
    """Waits of the host, but for the norm's."""
    return sum(number for place, number in counts["waits"].items() if not place.startswith(NORM))


def test_an_8b_model_at_8k_without_recomputing(figures_of: FiguresOf) -> None:
    (found,) = figures_of([DENSE])
    (figures,) = found["ranks"]
    passes, step, layers = figures["passes"], figures["step"], 36
    assert figures["num_microbatches"] == 2 and figures["num_minibatches"] == 2
    assert figures["peak"] <= 55 * GIB
    assert passes["operators"] <= 4350 * figures["num_microbatches"]
    assert sum(passes["waits"].values()) == 0, passes["waits"]
    # Of each minibatch its statistics, and its norm; once a step the log-probs of the second one before the first has moved the weights.
    assert own_waits(step) <= 2 + 2 and sum(step["waits"].values()) <= 2 * figures["num_minibatches"] + 2, step["waits"]
    # Activations are gathered and reduced twice a layer in each direction, gradients and weights once a minibatch.
    bytes_of = {kind.split(" ")[0]: size for kind, size in step["exchanged"].items() if "coalesced" in kind}
    parameters = 4_095_521_792  # of a rank, in whole buckets
    assert bytes_of == {"reduce_scatter_tensor_coalesced_": 2 * 4 * parameters, "allgather_into_tensor_coalesced_": 2 * 2 * parameters}
    gathered = passes["exchanges"]["_allgather_base_ x2"] / figures["num_microbatches"]
    reduced = passes["exchanges"]["_reduce_scatter_base_ x2"] / figures["num_microbatches"]
    assert gathered <= 6 * layers + 2 and reduced <= 4 * layers + 2


def test_most_is_exchanged_while_something_is_computed(figures_of: FiguresOf) -> None:
    """Of a minibatch's gradients all but the last bucket are added up before the last operator of its backward pass, and most of all that is
    exchanged comes before; with the experts of a mixture, and on the first stage, whose last backward pass is the last of all."""
    cases = [DENSE, STAGES, Case("Qwen3-30B-A3B", 16, {"ep": 8}, (0,), changes={"num_hidden_layers": 12})]
    for case, found in zip(cases, figures_of(cases), strict=True):
        step = found["ranks"][0]["step"]
        exposed, exchanged = ({kind: size for kind, size in step[of].items() if kind.startswith("reduce_scatter_tensor_coalesced_")}
                              for of in ("exposed", "exchanged"))
        assert sum(step["exposed"].values()) <= 0.25 * sum(step["exchanged"].values()), case
        assert sum(exposed.values()) <= 0.2 * sum(exchanged.values()), (case, exposed, exchanged)
        assert exposed.get("reduce_scatter_tensor_coalesced_ x2", 0) <= 0.05 * exchanged.get("reduce_scatter_tensor_coalesced_ x2", 0), case


def test_adapters_take_half_the_memory(figures_of: FiguresOf) -> None:
    """Against 55 GiB and 4300 operators: no gradients and no state of the weights, and the same waits."""
    (found,) = figures_of([ADAPTED])
    (figures,) = found["ranks"]
    assert figures["held"] <= 8 * GIB and figures["peak"] <= 28 * GIB
    assert figures["passes"]["operators"] <= 9850 * figures["num_microbatches"] and sum(figures["passes"]["waits"].values()) == 0
    assert own_waits(figures["step"]) <= 2 + 2


@pytest.mark.parametrize("num_layers", [12, pytest.param(48, marks=pytest.mark.long)])  # 48: 11,834 operators, and 8906
def test_a_mixture_at_8k(num_layers: int, figures_of: FiguresOf) -> None:
    """The host waits once a layer, for the numbers of tokens that all-to-all sends; the other operators of a layer are most of them attention's."""
    full, none = figures_of([Case("Qwen3-30B-A3B", 8, {"ep": 8}, (0,), recompute=recompute, changes={"num_hidden_layers": num_layers})
                             for recompute in ("full", "none")])
    for found, of_layer in ((full, 238), (none, 177)):
        (figures,) = found["ranks"]
        assert figures["passes"]["operators"] <= (460 + of_layer * num_layers) * figures["num_microbatches"]
        assert sum(figures["passes"]["waits"].values()) == num_layers * figures["num_microbatches"], figures["passes"]["waits"]
        assert own_waits(figures["step"]) <= num_layers * figures["num_microbatches"] + 1


def test_stages_wait_for_nothing(figures_of: FiguresOf) -> None:
    """Each knows the shape of what comes: the host of a stage runs ahead of its device."""
    for figures in [figures for found in figures_of([STAGES, PIECES]) for figures in found["ranks"]]:
        assert own_waits(figures["passes"]) == 0, figures["passes"]["waits"]
