"""Gradients of matrices are added up in float32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from workers.trainer.megatron.model.weight_gradient import Accumulation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_to_the_sum_that_is_there(dtype: torch.dtype) -> None:
    """Whole numbers, whose products and sums float32 has exactly; on CPUs a product of bfloat16 is rounded to it before it is added."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, grad, total = (torch.randint(-8, 9, size, device=device) for size in ((64, 24), (64, 16), (16, 24)))
    expected = total + (grad.double().t() @ x.double()).long()
    found = total.float()
    Accumulation.wgrad_gemm_accum_fp32(x.to(dtype), grad.to(dtype), found)
    rounded = 2 ** -8 if dtype is torch.bfloat16 and device == "cpu" else 0.0
    assert torch.allclose(found.double(), expected.double(), rtol=0, atol=rounded * float((expected - total).abs().max()))
