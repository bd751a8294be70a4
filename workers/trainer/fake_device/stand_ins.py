"""What stands in for a GPU and for the other ranks, in this process, for good: the process does nothing else afterwards.

    CUDA                     the meta device, by way of parallel/cpu_backend.py; capability 9.0
    torch.distributed        torch's fake process groups: every collective returns at once, and what arrives is whatever was there
    fused kernels            RMSNorm, which keeps its input and a number for each row as CUDA's, and what torch compiles: one operator each
    numbers on the device    how many tokens each expert gets (as many as every other)
    a model's weights        are not read

The rest, from packing to the optimizer's step, is the trainer's own code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # operators of torch.distributed for the meta device
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from workers.trainer.fake_device.operators import DEVICE, Recorder
from workers.trainer.megatron.model import layers, lm_head, mla, moe, self_attention, weight_gradient
from workers.trainer.megatron.model import model as model_module
from workers.trainer.megatron.model.token_dispatcher import TokenDispatcher
from workers.trainer.megatron.parallel import cpu_backend, process_group

CAPABILITY = (9, 0)


def install(recorder: Recorder) -> None:
    """Put all of that in place, once in a process, before an engine is made."""
    cpu_backend.STAND_IN = DEVICE
    cpu_backend.on_synchronize = recorder.wait
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY  # type: ignore[assignment]
    model_module.load_hf = moe.load_biases = lambda *arguments: None  # type: ignore[assignment]
    _stand_in_for_kernels(recorder)
    _stand_in_for_groups()
    _stand_in_for_stages(recorder)
    _stand_in_for_experts()


def join(rank: int, world_size: int) -> None:
    """Become a rank; `process_group.close()` ends it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def _stand_in_for_groups() -> None:
    new_group = dist.new_group

    def fake(ranks: Any = None, timeout: Any = None, backend: Any = None, **keywords: Any) -> Any:
        return new_group(ranks, backend="fake")

    dist.new_group = fake  # type: ignore[assignment]
    process_group._backend = lambda: "fake"  # type: ignore[assignment]


def _stand_in_for_kernels(recorder: Recorder) -> None:
    class FusedRMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            with recorder.as_one():
                ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
                return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            with recorder.as_one():
                return torch.empty_like(ctx.saved_tensors[0]), torch.empty_like(ctx.saved_tensors[1])

    class Rotated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            ctx.save_for_backward(cos, sin)
            return torch.empty_like(values)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
            return torch.empty_like(grad), None, None

    def sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with recorder.as_one():
            return logits.new_empty(len(logits), dtype=torch.float32), *logits.new_empty((2, len(logits)), dtype=torch.float32)

    def softmax(logits: Tensor, lse: Tensor, factors: Tensor) -> Tensor:
        with recorder.as_one():
            return torch.empty_like(logits, dtype=torch.float32)

    def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
        with recorder.as_one():
            total.add_(0)

    def compiled(function: Any) -> Any:
        def one(*arguments: Any) -> Any:
            with recorder.as_one():
                return function(*arguments)

        return one

    layers.RMSNorm.forward = lambda norm, x: FusedRMSNorm.apply(x.contiguous(), norm.weight)  # type: ignore[method-assign,assignment]
    mla.rotate = self_attention.rotate = Rotated.apply  # type: ignore[assignment]
    lm_head.add_product = weight_gradient.add_product = add_product  # type: ignore[assignment]
    kernels = {lm_head._sums_of_rows: sums, lm_head._softmax_of_rows: softmax}
    lm_head.compiled = kernels.__getitem__  # type: ignore[assignment]
    for name in ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back"):
        setattr(fused_bias_swiglu, name, compiled(getattr(fused_bias_swiglu, name)))


def _stand_in_for_stages(recorder: Recorder) -> None:
    """Nothing is sent."""
    def exchange(*, tensor_send_prev: Any, tensor_recv_prev: Any, tensor_send_next: Any, tensor_recv_next: Any, group: Any,
                 prev_pipeline_rank: int, next_pipeline_rank: int, **rest: Any) -> list:
        for kind, tensor, peer in (("send", tensor_send_prev, prev_pipeline_rank), ("receive", tensor_recv_prev, prev_pipeline_rank),
                                   ("send", tensor_send_next, next_pipeline_rank), ("receive", tensor_recv_next, next_pipeline_rank)):
            if tensor is not None:
                recorder.exchange(kind, (dist.get_rank(), peer), [(tuple(tensor.shape), str(tensor.dtype))], tensor.nbytes)
        return []

    p2p_communication._batched_p2p_ops = exchange


def _stand_in_for_experts() -> None:
    """Every expert gets as many tokens as every other."""
    real = TokenDispatcher.count_rows

    def count_rows(self: TokenDispatcher, experts: Tensor) -> tuple[Tensor, Tensor]:
        rows, of_all = len(experts), real(self, experts)[0]
        shares = [rows // self.num_experts + (number < rows % self.num_experts) for number in range(self.num_experts)]
        return of_all, torch.tensor(shares).expand(of_all.shape)

    TokenDispatcher.count_rows = count_rows  # type: ignore[method-assign]
