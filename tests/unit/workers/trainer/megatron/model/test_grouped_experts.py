"""All experts' products at once compute what one expert after the other does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import config, write_model
from workers.config import Dtype
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.model import grouped_experts
from workers.trainer.megatron.parallel import cpu_backend

pytestmark = pytest.mark.usefixtures("megatron_groups")


@pytest.mark.parametrize("numbers", [(5, 0, 3, 2), (0, 0, 0, 7), (1, 9, 0, 0), (3, 3, 3, 3), (0, 0, 0, 0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(Dtype.float32, 1e-5), (Dtype.bfloat16, 2e-2)])
def test_any_number_of_tokens_for_each_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...], dtype: Dtype,
                                              tolerance: float) -> None:
    engine = MegatronEngine(config(dtype=dtype), write_model("qwen3moe", tmp_path))
    experts = engine._policy.trained.model.decoder.layers[0].mlp.experts
    torch.manual_seed(0)
    device, dtype_of = cpu_backend.device(), next(experts.parameters()).dtype
    rows, gradient = (torch.randn(sum(numbers), 32, dtype=dtype_of, device=device) for _ in range(2))
    weights, results = torch.rand(len(rows), requires_grad=True, device=device), []
    rows.requires_grad_()
    plain: list[int] = []
    one_by_one = grouped_experts._one_by_one
    monkeypatch.setattr(grouped_experts, "_one_by_one", lambda *arguments: plain.append(0) or one_by_one(*arguments))
    for alignment in (grouped_experts.ALIGNMENT, 2**20):  # as if their rows were not of a length that the kernel takes
        monkeypatch.setattr(grouped_experts, "ALIGNMENT", alignment)
        engine._policy.trained.zero_gradients()
        rows.grad = weights.grad = None
        with cpu_backend.redirected():
            output, bias = experts(rows, torch.tensor(numbers, device=device), weights)
            output.backward(gradient)
        assert bias is None and rows.grad is not None and weights.grad is not None
        results.append([output.detach(), rows.grad, weights.grad, *(parameter.main_grad.clone() for parameter in experts.parameters())])
    assert len(plain) == 1
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()
