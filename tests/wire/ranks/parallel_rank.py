"""One rank of a gang that trains in several layouts: python -m tests.wire.ranks.parallel_rank FOLDER RANK WORLD PORT LAYOUT...

A layout is a name of LAYOUTS, with "=KIND,KIND" behind it if it is not to train all its models. What rank 0 has found goes to FOLDER/LAYOUT.KIND.npz.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.megatron_case import config, make_groups, train, with_routing
from tests.wire.gangs import in_turn
from workers.config import Advantage, AlgorithmConfig, Config, LoraConfig, LoraTarget, Recompute, RouterReplay, RoutingShape
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.megatron.parallel.stop_gate import StepAbandoned, StopGate

NUM_STEPS = 3
DENSE = ("qwen3-tied", "qwen2", "llama")
MIXTURE = "qwen3moe"
DEEP = "qwen3-tied-deep"
SIGMOID = ("glm4moe", "deepseek")
MIXTURES = (MIXTURE, *SIGMOID)
KINDS = (*DENSE, *MIXTURES, DEEP)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence": False},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2": {},
    "ep2": {"ep": 2},
    "ep2-recompute": {"ep": 2},
    "tp2-recompute": {"tp": 2},
    "cp2-selective": {"cp": 2},
    "tp2-critic": {"tp": 2},
    "tp2-whole-critic": {"tp": 2, "sequence": False},
    "pp2-critic": {"pp": 2},
    "cp2-critic": {"cp": 2},
    "dp2-critic": {},
    "tp2-lora": {"tp": 2},
    "tp2-whole-lora": {"tp": 2, "sequence": False},
    "pp2-recompute-lora": {"pp": 2},
    "cp2-lora": {"cp": 2},
    "dp2-lora": {},
    "ep2-lora": {"ep": 2},
    "tp2-lora-critic": {"tp": 2},
    "pp2-lora-critic": {"pp": 2},
    "tp2pp2-lora": {"tp": 2, "pp": 2},
    "tp2ep2-lora": {"tp": 2, "ep": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp2dp2": {"tp": 2},
    "tp2cp2": {"tp": 2, "cp": 2},
    "pp2cp2": {"pp": 2, "cp": 2},
    "tp2ep2": {"tp": 2, "ep": 2},
    "pp4": {"pp": 4},
    "pp2vpp2": {"pp": 2, "vpp": 2},
    "pp2vpp2-critic": {"pp": 2, "vpp": 2},
    "tp2pp2vpp2": {"tp": 2, "pp": 2, "vpp": 2},
    "pp2vpp2dp2": {"pp": 2, "vpp": 2},
    "pp2dp2": {"pp": 2},
    "ep2dp2": {"ep": 2},
    "pp2ep2": {"pp": 2, "ep": 2},
    "tp2-replay": {"tp": 2},
    "pp2-recompute-replay": {"pp": 2},
    "cp2-selective-replay": {"cp": 2},
    "dp2-replay": {},
    "ep2-recompute-replay": {"ep": 2},
    "tp2ep2-recompute-replay": {"tp": 2, "ep": 2},
    "tp2pp2-replay": {"tp": 2, "pp": 2},
    "pp2cp2-replay": {"pp": 2, "cp": 2},
    "pp2vpp2-recompute-replay": {"pp": 2, "vpp": 2},
}


def kinds(layout: str) -> tuple[str, ...]:
    """The models that a layout trains."""
    if layout.endswith("replay"):
        return ("deepseek",) if "vpp" in layout else MIXTURES
    if "vpp" in layout or layout == "pp4":
        return (DEEP, "deepseek") if layout == "pp2vpp2" else (DEEP,)
    if layout.endswith("critic"):
        return ("qwen3-tied",)
    if layout.endswith("lora"):
        return (MIXTURE,) if "ep2" in layout else ("qwen3-tied", "qwen2", MIXTURE, "glm4moe") if layout == "tp2-lora" else ("qwen3-tied",)
    if layout == "cp2-selective":
        return ("qwen3-tied", *MIXTURES)
    return MIXTURES if "ep2" in layout else (*DENSE, *MIXTURES) if layout in ("pp2", "tp2-recompute", "tp2dp2") else DENSE


def lora(kind: str) -> LoraConfig:
    """Adapters of a model: in one of some matrices that Megatron-core joins with others, in a mixture of attention's."""
    targets = {**{mixture: ["q_proj", "k_proj", "v_proj", "o_proj"] for mixture in MIXTURES}, "qwen2": ["q_proj", "v_proj", "up_proj", "down_proj"]}
    return LoraConfig(rank=4, alpha=12.0, targets=[target for target in LoraTarget if target.value in targets.get(kind, list(LoraTarget))])


def setup(layout: str = "", kind: str = "") -> Config:
    """The config of a layout; one process has none, but may be "lora", "lora-critic" or "replay"."""
    result = config(clip_grad=0.05, weight_decay=0.1, adam_eps=1e-5, lr=1e-3)
    for name, value in LAYOUTS.get(layout, {}).items():
        setattr(result.trainer.parallel, name, value)
    if "lora" in layout:
        result.trainer.lora, result.trainer.lr = lora(kind), 1e-2
    if "recompute" in layout:
        result.trainer.recompute = Recompute.full
    if layout.endswith("replay"):
        result.algorithm.router_replay = RouterReplay.rollout
    if "selective" in layout:
        result.trainer.recompute = Recompute.selective
    if layout.endswith("critic"):
        result.trainer.num_minibatches = 2
        result.algorithm = AlgorithmConfig(advantage=Advantage.gae, gamma=0.97, gae_lambda=0.9, critic_lr=2e-3, kl_weight=0.1)
    return result


def batch(step: int, routing: RoutingShape | None = None) -> tuple[list[TrainGroup], list[list[np.ndarray]]]:
    """Groups and proximal log-probs of a step, which need no model; one group has no advantage. `routing`: they have a choice of experts."""
    groups, rng = make_groups(5, seed=step), np.random.default_rng(step)
    if routing is not None:
        with_routing(groups, routing, step)
    groups[1].rewards = np.zeros(5, np.float32)
    return groups, [[rng.normal(-4, 0.3, len(response)).astype(np.float32) for response in group.responses] for group in groups]


def adapters(engine: MegatronEngine, when: str) -> dict[str, np.ndarray]:
    """Those that there are."""
    has = engine._config.trainer.lora.rank > 0
    return {f"{when}:{name}": tensor.numpy().copy() for name, tensor in engine.iter_adapter_tensors()} if has else {}


def found(folder: Path, gang: Gang | None, layout: str, kind: str) -> dict[str, Any]:
    """What comes of some steps, on rank 0, or alone."""
    engine = MegatronEngine(setup(layout, kind), folder / kind, gang)
    result: dict[str, Any] = adapters(engine, "first")
    routing = engine.architecture.routing if layout.endswith("replay") else None
    groups, _ = batch(0, routing)
    logprobs, entropies = engine.logprobs_and_entropy(groups)
    result["logprobs"], result["entropies"] = (np.concatenate([row for rows in values for row in rows]) for values in (logprobs, entropies))
    for step in range(NUM_STEPS):
        groups, proximal = batch(step, routing)
        if step == 1:  # the first step in which gradients are added up while others are made
            asked = iter([False, *[True] * 99])
            with contextlib.suppress(StepAbandoned):
                train(engine, groups, proximal, stop_requested=asked.__next__)
                raise AssertionError("every rank was asked to stop, after the step's beginning")
        metrics = train(engine, groups, proximal)
        result |= {f"{step}:{name}": np.array(value) for name, value in metrics.items()}
    if engine._critic is not None:
        values = engine._critic.estimate(batch(NUM_STEPS)[0], StopGate(lambda: False)).values
        result["values"] = np.concatenate([row for rows in values for row in rows])
    return result | adapters(engine, "last") | {f"weight:{name}": tensor.float().numpy().copy() for name, tensor in engine.iter_hf_tensors()}


def main() -> None:
    folder, rank, world, port, *layouts = sys.argv[1:]
    for asked, gang in in_turn(layouts, int(rank), int(world), int(port)):
        layout, _, some = asked.partition("=")
        for kind in some.split(",") if some else kinds(layout):
            result = found(Path(folder), gang, layout, kind)
            if gang.rank == 0:
                np.savez(Path(folder) / f"{layout}.{kind}.npz", **result)


if __name__ == "__main__":
    main()
