"""What is one kernel on GPUs computes the same as the plain operators."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import config, make_groups, write_model
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.model import layers, lm_head
from workers.trainer.megatron.model.packed_attention import choose_flash_attention, rotated
from workers.trainer.megatron.objective import PolicyTargets, per_token
from workers.trainer.megatron.parallel.stop_gate import StopGate

pytestmark = pytest.mark.usefixtures("megatron_groups")


def gradients(folder: Path) -> dict[str, torch.Tensor]:
    engine, groups = MegatronEngine(config(), folder), make_groups(4)
    targets = PolicyTargets(per_token([group.rewards for group in groups], groups))
    engine._policy.accumulate(groups, list(range(len(groups))), targets, 100.0, StopGate(lambda: False))
    return {name: parameter.main_grad.clone() for name, parameter in engine._policy.trained.model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
def test_megatrons_swiglu_gives_the_gradients_of_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = write_model(kind, tmp_path / kind)
    expected = gradients(folder)
    plain, fused = layers.TransformerConfig, []

    def with_fusion(**keywords: Any) -> Any:
        fused.append(keywords["bias_activation_fusion"])
        return plain(**keywords | {"bias_activation_fusion": True})

    monkeypatch.setattr(layers, "TransformerConfig", with_fusion)
    # On CPUs, where training does without, what torch's compiler makes of it was seen to give NaN with AVX2 settings.
    with torch.compiler.set_stance("default" if torch.cuda.is_available() else "force_eager"):
        found = gradients(folder)
    assert fused == [torch.cuda.is_available()], "on CPUs it is several operators all the same"
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


def test_the_rotary_embedding_is_one_graph_for_any_number_of_tokens_and_heads() -> None:
    compiled = torch.compile(rotated, dynamic=True, fullgraph=True, backend="aot_eager")
    for tokens, heads in ((5, 4), (7, 2), (130, 4)):
        values = torch.randn(tokens, heads, 8, requires_grad=True)
        cos, sin = torch.randn(2, tokens, 1, 8)
        results = [(output := function(values, cos, sin), *torch.autograd.grad(output.square().sum(), values)) for function in (rotated, compiled)]
        for expected, found in zip(*results, strict=True):
            assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunks_sums_and_softmax_are_one_graph_each(dtype: torch.dtype) -> None:
    sums, softmax = ((each, torch.compile(each, dynamic=True, fullgraph=True, backend="aot_eager"))
                     for each in (lm_head._sums_of_rows, lm_head._softmax_of_rows))
    for rows, columns in ((5, 100), (9, 100), (33, 7)):
        logits, factors = torch.randn(rows, columns, dtype=dtype), torch.randn(rows)
        exact = logits.double()
        probabilities = exact.softmax(-1)
        for function in sums:
            highest, total, weighted = function(logits)
            lse = highest + total.log()
            assert torch.allclose(lse.double(), exact.logsumexp(-1), atol=1e-5)
            assert torch.allclose((weighted / total).double(), (probabilities * (exact - highest[:, None])).sum(-1), atol=1e-5)
        for function in softmax:
            assert torch.allclose(function(logits.clone(), lse, factors).double(), probabilities * factors[:, None], atol=1e-5)


@pytest.mark.parametrize(("capability", "installed", "chosen"), [((9, 0), True, "FA3"), ((9, 0), False, ""), ((8, 0), True, ""), ((10, 0), True, "")])
def test_flash_attention_3_is_for_hopper_where_it_is_installed(
        monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: bool, chosen: str) -> None:
    active: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed and name == "flash_attn_interface" else None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    assert choose_flash_attention() == chosen == choose_flash_attention()
    assert active == ([chosen] if chosen else []), "once"
