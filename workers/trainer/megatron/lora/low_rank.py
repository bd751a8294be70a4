"""Low-rank adapters of a model's matrices: y = W x + s B A x with s = alpha / rank (LoRA, arXiv 2106.09685, Equation 3 and Section 4.1).

W is the starting model's and has no gradient; A [rank, in] begins as PEFT has it, uniform within 1 / sqrt(in), and B [out, rank] as zero, so
that the model begins as it was. Each Hugging Face matrix has its own pair, also where Megatron-core joins several in one linear layer:

    q_proj: A, B --.   A: one below the other                          [3 rank, in]
    k_proj: A, B --+-> B: each in its rows and columns, zero elsewhere [out, 3 rank], rows in the order of the joined weight
    v_proj: A, B --'   s B A is what is added to the weight, s B (A x) to its output

Tensor parallelism divides a pair as it divides the weight:

    split by rows      qkv, fc1     A whole, B by rows      A x --gathered (sequence), or its gradient added up--> B (A x)
    split by columns   proj, fc2    A by columns, B whole   A x --added up over the ranks--> B (A x)

so that what travels between ranks has `rank` numbers a token, and what a rank's part of W takes is made of what the rank has (`merged`).
Ranks that share tokens (sequence) have a part of the gradient of what is whole each; Megatron-core adds these up, as it does those of norms.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from blake3 import blake3
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from workers.config import LoraConfig
from workers.model.adapter_shapes import A, B, adapter_shapes, check_adapters, pair_shapes
from workers.model.architecture import Architecture
from workers.trainer.megatron.hf_conversion import iter_other_tensors
from workers.trainer.megatron.hf_conversion.names import HFTensors, Split, all_hf_tensors, share_of
from workers.trainer.megatron.hf_conversion.shards import join, own_parameters, separate
from workers.weights.peft_folder import merged


def adapter_tensors(module: str, of_weight: HFTensors) -> tuple[HFTensors, HFTensors]:
    """A and B of the Hugging Face `module`, one of those whose weights are joined in `of_weight`."""
    split_a, split_b = (Split.none, Split.rows) if of_weight.split is Split.rows else (Split.columns, Split.none)
    return HFTensors((f"{module}.{A}",), split_a, of_weight.layer), HFTensors((f"{module}.{B}",), split_b, of_weight.layer)


class LinearAdapters(torch.nn.Module):
    """The adapters of one of Megatron-core's linear layers, this rank's part of them."""

    def __init__(self, weight: torch.nn.Parameter, tensors: HFTensors, shapes: dict[str, tuple[int, int]], architecture: Architecture,
                 lora: LoraConfig, seed: int, sequence: bool) -> None:
        """`weight` is this rank's part of what `tensors` says; `shapes`: (out, in) of the whole modules that have adapters."""
        super().__init__()
        self.weight_of, self._rank, self._scale, self._sequence = id(weight), lora.rank, lora.alpha / lora.rank, sequence
        self._by_rows, tp = tensors.split is Split.rows, parallel_state.get_tensor_model_parallel_world_size()
        self._kv_heads, self._head_dim = architecture.num_kv_heads // tp, architecture.head_dim
        self._modules_joined = [name.removesuffix(".weight") for name in tensors.names]
        whole = architecture.tensor_shapes()
        self._rows = [whole[name][0] // (tp if self._by_rows else 1) for name in tensors.names]
        self.places: dict[str, tuple[HFTensors, HFTensors]] = {}
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for module in self._modules_joined:
            if module in shapes:
                (outputs, inputs), leaf = shapes[module], module.rpartition(".")[2]
                of_a, of_b = self.places[leaf] = adapter_tensors(module, tensors)
                self.a[leaf] = _parameter(_uniform(module, seed, lora.rank, inputs), of_a, weight, sequence)
                self.b[leaf] = _parameter(torch.zeros(outputs, lora.rank), of_b, weight, sequence)

    def factors(self) -> tuple[Tensor, Tensor]:
        """A [n rank, in] and B [out, n rank] of the linear layer's n adapters, as this rank's part of its weight is laid out."""
        a, b = list(self.a.values()), []
        width, at = len(a) * self._rank, 0
        for module, rows in zip(self._modules_joined, self._rows, strict=True):
            leaf = module.rpartition(".")[2]
            if leaf in self.b:
                b.append(functional.pad(self.b[leaf], (at, width - at - self._rank)))
                at += self._rank
            else:
                b.append(a[0].new_zeros(rows, width))
        return (a[0], self.b[leaf]) if len(self._modules_joined) == 1 else (torch.cat(a), join(b, self._kv_heads))

    def added(self, x: Tensor, output: Tensor) -> Tensor:
        """`output` [t, 1, out] of the linear layer for its input `x` [.., 1, in], and what the adapters make of `x`."""
        a, b = self.factors()
        low = functional.linear(x, a)
        if self._by_rows:
            low = gather_from_sequence_parallel_region(low) if self._sequence else copy_to_tensor_model_parallel_region(low)
        else:
            low = reduce_scatter_to_sequence_parallel_region(low) if self._sequence else reduce_from_tensor_model_parallel_region(low)
        return torch.addmm(output.flatten(0, -2), low.flatten(0, -2), b.t(), alpha=self._scale).view_as(output)

    def merged(self, weight: Tensor) -> Tensor:
        """This rank's part of W + s B A: matrix by matrix, as it is merged by whoever has Hugging Face's (`merged` of weights/peft_folder.py)."""
        leaves = [module.rpartition(".")[2] for module in self._modules_joined]
        parts = zip(leaves, separate(weight, len(leaves), self._kv_heads, self._head_dim), strict=True)
        return join([merged(part, self.a[leaf], self.b[leaf], self._scale) if leaf in self.a else part for leaf, part in parts], self._kv_heads)


class Adapters(torch.nn.Module):
    """All adapters of this rank's part of a model, which holds them as its `adapters`."""

    def __init__(self, linears: list[LinearAdapters]) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(linears)
        self._by_weight = {adapters.weight_of: adapters for adapters in linears}
        self.enabled = True

    def own(self) -> Iterator[tuple[HFTensors, torch.nn.Parameter]]:
        """This rank's parameters, each with what it is a share of."""
        for adapters in self._by_weight.values():
            for leaf, (of_a, of_b) in adapters.places.items():
                yield of_a, adapters.a[leaf]
                yield of_b, adapters.b[leaf]

    def merged(self, parameter: Tensor) -> Tensor:
        """The model's `parameter` as it is with the adapters: itself where it has none."""
        adapters = self._by_weight.get(id(parameter))
        return parameter if adapters is None else adapters.merged(parameter)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside the block, the model is the one that it began as."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Any]:
        """Where each parameter belongs in the whole, for checkpoints: by Hugging Face's names, whatever the layout."""
        found = {}
        for tensors, parameter in self.own():
            key, split = prefix + tensors.names[0], tensors.split
            found[key] = (make_sharded_tensor_for_checkpoint(parameter, key) if split is Split.none else
                          make_tp_sharded_tensor_for_checkpoint(parameter, key, split.value))
        return found


def iter_adapter_tensors(model: Any, architecture: Architecture, lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all adapters on rank 0, nothing on the others, as `iter_hf_tensors` does; names as PEFT has them below the model,
    'model.layers.0.self_attn.q_proj.lora_A.weight'."""
    shapes: dict[str, tuple[int, ...]] = {**pair_shapes(architecture, lora)}
    pairs = (adapter_tensors(name.removesuffix(".weight"), of_weight) for of_weight in all_hf_tensors(architecture) for name in of_weight.names)
    whole = [tensors for pair in pairs for tensors in pair if pair[0].names[0] in shapes]
    own = {tensors.names: parameter for tensors, parameter in model.adapters.own()}
    return iter_other_tensors(model, architecture, own, shapes, whole)


def attach(model: Any, architecture: Architecture, lora: LoraConfig, seed: int) -> Adapters | None:
    """Freeze this rank's `model` (a GPTModel, its weights loaded) and give it adapters, as `model.adapters`; None with rank 0, which leaves it as
    it is. Call within `cpu_backend.redirected()`. All layouts begin with the same adapters. Raises
    `ConfigError`."""
    if not lora.rank:
        return None
    check_adapters(architecture, lora)
    model.requires_grad_(False)
    shapes = adapter_shapes(architecture, lora.targets)
    linears = {id(module.weight): module for module in model.modules() if isinstance(getattr(module, "weight", None), torch.nn.Parameter)}
    found = []
    for tensors, weight in own_parameters(model, architecture):
        if any(name.removesuffix(".weight") in shapes for name in tensors.names):
            found.append(LinearAdapters(weight, tensors, shapes, architecture, lora, seed, model.config.sequence_parallel))
    model.adapters = Adapters(found)
    for adapters in found:
        linears[adapters.weight_of].register_forward_hook(_hook(model.adapters, adapters))
    return model.adapters


def _hook(all_of_them: Adapters, own: LinearAdapters) -> Any:
    def hook(linear: torch.nn.Module, inputs: tuple[Tensor, ...], result: tuple[Tensor, Tensor | None]) -> Any:
        return (own.added(inputs[0], result[0]), result[1]) if all_of_them.enabled else result

    return hook


def _uniform(module: str, seed: int, rank: int, inputs: int) -> Tensor:
    """The first A of `module`, float32 [rank, inputs]: the same on all ranks."""
    generator = torch.Generator().manual_seed(int.from_bytes(blake3(f"{seed} {module}".encode()).digest(8)) >> 1)
    return torch.empty(rank, inputs).uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)


def _parameter(whole: Tensor, tensors: HFTensors, weight: Tensor, sequence: bool) -> torch.nn.Parameter:
    """This rank's share of `whole`, as the weight lies."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    share = whole[share_of(tuple(whole.shape), tensors.split, rank, size)]
    parameter = torch.nn.Parameter(share.to(weight.device, weight.dtype).contiguous())
    if tensors.split is Split.none:
        parameter.sequence_parallel = sequence  # type: ignore[attr-defined]
    else:
        set_tensor_model_parallel_attributes(parameter, True, tensors.split.value, 1)
    return parameter
