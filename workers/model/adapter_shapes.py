"""Which matrices of a model have low-rank adapters (`trainer.lora`), of which shapes: checked before anything is submitted, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from workers.config import LoraConfig, LoraTarget, require
from workers.model.architecture import Architecture

OF_MLP = (LoraTarget.gate_proj, LoraTarget.up_proj, LoraTarget.down_proj)
INPUT_SPLIT = (LoraTarget.o_proj, LoraTarget.down_proj)
"""What tensor parallelism divides by its inputs; the others by their outputs."""
A, B = "lora_A.weight", "lora_B.weight"
"""How PEFT ends the names of a pair."""


def adapter_shapes(architecture: Architecture, targets: Sequence[LoraTarget]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each matrix that `targets` name, by the name of its Hugging Face module, layer by layer."""
    leaves = {target.value for target in targets}
    found = {}
    for name, shape in architecture.tensor_shapes().items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module.rpartition(".")[2] in leaves and ".experts." not in module:
            found[module] = (shape[0], shape[1])
    return found


def layer_shapes(architecture: Architecture, targets: Sequence[LoraTarget]) -> dict[str, tuple[int, int]]:
    """Those of the first layer, which are those of every other: where layers differ, in their experts, there are no adapters."""
    return adapter_shapes(dataclasses.replace(architecture, num_layers=1), targets)


def pair_shapes(architecture: Architecture, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Shapes of A [rank, in] and B [out, rank] of each matrix that has adapters, by the names that PEFT gives them below the model."""
    return {f"{module}.{end}": shape for module, (outputs, inputs) in adapter_shapes(architecture, lora.targets).items()
            for end, shape in ((A, (lora.rank, inputs)), (B, (outputs, lora.rank)))}


def check_adapters(architecture: Architecture, lora: LoraConfig) -> None:
    """Check that a model of `architecture` can have the adapters. Raises `ConfigError`."""
    if not lora.rank:
        return
    require(architecture.latent is None, "trainer.lora.rank", lora.rank, f"must be 0 for a {architecture.family} model: latent attention takes no "
            "adapters", "Train the whole model")
    of_experts = [target.value for target in lora.targets if target in OF_MLP]
    left = [target.value for target in lora.targets if target not in OF_MLP] or [target.value for target in LoraTarget if target not in OF_MLP]
    require(architecture.mixture is None or not of_experts, "trainer.lora.targets", [target.value for target in lora.targets],
            f"must not name {', '.join(of_experts)} in a mixture of experts, whose experts take no adapters", f"Use [{','.join(left)}]")
    smallest = min(min(shape) for shape in layer_shapes(architecture, lora.targets).values())
    require(lora.rank <= smallest, "trainer.lora.rank", lora.rank, f"must be at most {smallest}, the rank of the smallest matrix that has an adapter",
            "16 is usual; 0 trains the whole model")
