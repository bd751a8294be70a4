"""The parameters of a model, layer by layer, by how ranks divide them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from workers.model.architecture import Architecture


@dataclass(frozen=True)
class LayerWeights:
    """Numbers of parameters of layers: `split` are divided over the tensor-parallel ranks, `whole` are on each of them, `experts` are divided over
    expert-parallel ranks too."""

    split: int = 0
    whole: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.split + self.whole + self.experts

    def __add__(self, other: LayerWeights) -> LayerWeights:
        return LayerWeights(self.split + other.split, self.whole + other.whole, self.experts + other.experts)


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters of a model, layer by layer. `largest`: of one of Megatron-core's parameters."""

    embedding: int
    tied: bool
    layers: tuple[LayerWeights, ...]
    largest: int

    def of(self, layers: Iterable[int]) -> LayerWeights:
        """Of these layers together."""
        return sum((self.layers[layer] for layer in layers), LayerWeights())

    @cached_property
    def total(self) -> int:
        """All of the model."""
        return self.embedding * (1 if self.tied else 2) + self.of(range(len(self.layers))).total


def count_weights(architecture: Architecture) -> Weights:
    """The parameters of a model by how they are divided."""
    layers, largest = [LayerWeights()] * architecture.num_layers, 0
    for name, shape in architecture.tensor_shapes().items():
        number = math.prod(shape)
        largest = max(largest, number * (2 if "gate_proj" in name else 1))  # Megatron-core has it in one with up_proj
        if ".layers." not in name:
            continue
        layer = int(name.split(".")[2])
        if ".experts." in name:
            layers[layer] += LayerWeights(experts=number)
        elif (len(shape) > 1 and not name.endswith(".gate.weight")) or name.endswith(".bias"):
            layers[layer] += LayerWeights(split=number)
        else:  # norms, and the router of a mixture
            layers[layer] += LayerWeights(whole=number)
    return Weights(architecture.vocab_size * architecture.hidden_size, architecture.tied, tuple(layers), largest)


def layers_of(architecture: Architecture, num_stages: int, stage: int, num_pieces: int = 1) -> list[int]:
    """The layers of a pipeline stage, counted from 0, which has so many pieces of the model."""
    layers, number = architecture.num_layers, num_stages * num_pieces
    return [layer for piece in range(stage, number, num_stages) for layer in range(piece * layers // number, (piece + 1) * layers // number)]
