"""Adapters as a PEFT folder: what PEFT makes of it, or, where it is not installed, its layout computed with by hand; and what nodes make of it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.hf_reference import load_reference, merged, saved_tensors, with_adapters
from tests.support.megatron_case import VOCAB, config, make_groups, train, write_model
from workers.config import Dtype, LoraConfig, LoraTarget
from workers.trainer.megatron.engine import MegatronEngine
from workers.weights.manifest import WeightsError
from workers.weights.peft_folder import PREFIX, iter_merged, write_peft_folder

pytestmark = pytest.mark.usefixtures("megatron_groups")


@pytest.fixture(scope="module", params=["qwen2", "qwen3-tied", "qwen3moe"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """The starting model, the PEFT folder after some steps, and the merged weights."""
    root = tmp_path_factory.mktemp("peft")
    base = write_model(request.param, root / "base")
    targets = list(LoraTarget)[:4] if request.param == "qwen3moe" else list(LoraTarget)
    setup = config(lora=LoraConfig(rank=4, alpha=12.0, targets=targets))
    engine = MegatronEngine(setup, base)
    for step in range(3):
        train(engine, make_groups(seed=step))
    write_peft_folder(root / "adapter", engine.iter_adapter_tensors(), setup.trainer.lora, base)
    return base, root / "adapter", {name: tensor.clone() for name, tensor in engine.iter_hf_tensors()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None] % VOCAB).logits


def merged_logits(base: Path, weights: dict[str, torch.Tensor], folder: Path) -> torch.Tensor:
    folder.mkdir()
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return logits(load_reference(folder))


def test_the_layout_gives_the_merged_weights(trained: tuple[Path, Path, dict[str, torch.Tensor]]) -> None:
    base, folder, weights = trained
    said = json.loads((folder / "adapter_config.json").read_text())
    pairs = load_file(folder / "adapter_model.safetensors")
    assert said["peft_type"] == "LORA" and said["r"] == 4 and Path(said["base_model_name_or_path"]) == base
    assert {name.split(".")[-3] for name in pairs} == set(said["target_modules"]) and all(name.startswith(PREFIX) for name in pairs)
    adapters = {name.removeprefix(PREFIX): tensor for name, tensor in pairs.items()}
    expected = saved_tensors(merged(with_adapters(load_reference(base), adapters, said["lora_alpha"] / said["r"])))
    assert expected.keys() == weights.keys()
    assert all(torch.allclose(weights[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_peft_loads_it_and_computes_what_the_merged_model_does(trained: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    import peft

    base, folder, weights = trained
    starting = logits(load_reference(base))
    model = peft.PeftModel.from_pretrained(load_reference(base), str(folder)).eval()
    found, expected = logits(model), merged_logits(base, weights, tmp_path / "merged")
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max() and (found - starting).abs().max() > 0.1
    together = logits(model.merge_and_unload())
    assert (together - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "qwen3moe", "glm4moe"])
def test_whoever_merges_them_gets_the_bits_of_training(tmp_path: Path, kind: str, dtype: Dtype) -> None:
    """At the start, too. In some matrices of those that Megatron-core joins, or in all; other adapters than those of the config are refused."""
    base, attention = write_model(kind, tmp_path / "base"), list(LoraTarget)[:4]
    targets = {"qwen2-tied": [LoraTarget.k_proj, LoraTarget.up_proj], "llama": list(LoraTarget)}.get(kind, attention)
    setup = config(dtype=dtype, lora=LoraConfig(rank=4, alpha=12.0, targets=targets))
    engine, number = MegatronEngine(setup, base), 0
    for step in range(3):
        write_peft_folder(tmp_path / str(step), engine.iter_adapter_tensors(), setup.trainer.lora, base)
        found = dict(iter_merged(tmp_path / str(step), setup.trainer.lora, base, getattr(torch, dtype.value)))
        weights = dict(engine.iter_hf_tensors())
        assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
        number += sum(not torch.equal(found[name], tensor) for name, tensor in load_file(base / "model.safetensors").items() if name in found)
        train(engine, make_groups(seed=step))
    assert number > len(targets)
    with pytest.raises(WeightsError, match=r"not the adapters of trainer\.lora\.rank=8 and its targets, of the model in .*base"):
        next(iter_merged(tmp_path / "0", LoraConfig(rank=8, targets=targets), base, torch.float32))
