"""GLM-4.5 and DeepSeek-V3: what is read of their config.json, their tensors, and what of them cannot be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from tests.support.model_folders import FAMILIES, YARN, write_hf_model, write_random_model  # noqa: E402
from workers.config import ConfigError, EngineParallelConfig, LoraConfig, LoraTarget, ParallelConfig, TrainerConfig  # noqa: E402
from workers.model.architecture import ModelError, read_architecture  # noqa: E402
from workers.model.experts import MixtureOfExperts  # noqa: E402
from workers.model.families import FAMILIES as ROWS  # noqa: E402
from workers.model.frozen import read_frozen  # noqa: E402
from workers.model.latent_attention import LatentAttention  # noqa: E402
from workers.model.parallel_limits import check_engine, check_training  # noqa: E402
from workers.model.rope import inverse_frequencies  # noqa: E402
from workers.model.tensors import check_tensors  # noqa: E402

SIGMOID = ["glm4_moe", "deepseek_v3"]


def changed(folder: Path, family: str, **changes: Any) -> Path:
    """A folder whose config.json has `changes`, None: without it."""
    write_random_model(folder, family)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in changes or value is not None}))
    return folder


def test_every_family_is_tested() -> None:
    assert {row.name for row in ROWS.values()} == set(FAMILIES)


@pytest.mark.parametrize(("family", "changes"), [
    ("glm4_moe", {}), ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 0}),
    ("deepseek_v3", {}), ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 1})])
def test_the_tensors_are_those_of_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    write_hf_model(tmp_path, family, **changes)
    architecture = read_architecture(tmp_path)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert architecture.tensor_shapes() | architecture.frozen_shapes() == stored
    assert not architecture.tensor_shapes().keys() & architecture.frozen_shapes().keys()


def test_what_is_read(tmp_path: Path) -> None:
    glm = read_architecture(changed(tmp_path / "glm", "glm4_moe"))
    assert glm.mixture == MixtureOfExperts(8, 4, 24, True, sigmoid=True, num_dense=1, shared_size=48, num_groups=4, groups_per_token=2, scale=1.7)
    assert (glm.qkv_bias, glm.qk_norm, glm.head_dim, glm.rotary_dim, glm.cache_width) == (True, True, 12, 6, 2 * 2 * 12)
    deepseek = read_architecture(changed(tmp_path / "deepseek", "deepseek_v3", rope_parameters=YARN))
    assert deepseek.latent == LatentAttention(query_rank=16, kv_rank=12, nope_dim=10, rope_dim=6, value_dim=8, interleaved=True)
    assert (deepseek.head_dim, deepseek.num_kv_heads, deepseek.rotary_dim, deepseek.cache_width) == (16, 4, 6, 18)
    assert [deepseek.has_experts(layer) for layer in range(2)] == [False, True]


def test_positions_are_stretched_as_transformers_does(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    write_hf_model(tmp_path, "deepseek_v3", rope_parameters=YARN)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](transformers.AutoConfig.from_pretrained(tmp_path))
    assert torch.allclose(inverse_frequencies(read_architecture(tmp_path)), expected, rtol=1e-6, atol=0) and factor == 1.0


@pytest.mark.parametrize(("family", "changes", "words"), [
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ("glm4_moe", {"head_dim": 10}, "head_dim=10 must be even, and so must the 5 of it that are rotated"),
    ("glm4_moe", {"first_k_dense_replace": 2}, "first_k_dense_replace=2 must be less than num_hidden_layers=2"),
    ("glm4_moe", {"n_group": 3}, "n_group=3 must divide n_routed_experts=8"),
    ("glm4_moe", {"n_routed_experts": None}, "config.json: value 'num_experts' is missing"),
    ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok=4 must be twice topk_group=1: Megatron-core chooses"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias=True is not supported"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.* is not supported"),
    ("deepseek_v3", {"v_head_dim": 17}, "v_head_dim=17 must be at most qk_nope_head_dim [+] qk_rope_head_dim=16"),
    ("deepseek_v3", {"kv_lora_rank": 13}, "kv_lora_rank=13 must be even"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank=0, .* must be at least 1"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale_all_dim": 0.5}}, "rope type 'yarn' is not supported.*an mscale that is mscale_all_dim"),
    ("glm4_moe", {"rope_parameters": YARN}, "rope type 'yarn' is not supported")])
def test_what_cannot_be_done_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_architecture(changed(tmp_path, family, **changes))


@pytest.mark.parametrize("family", SIGMOID)
def test_what_is_frozen_must_be_there_at_the_start_only(tmp_path: Path, family: str) -> None:
    architecture, file = write_random_model(tmp_path, family), tmp_path / "model-0.safetensors"
    frozen = read_frozen(tmp_path, architecture)
    tensors = load_file(file)
    assert frozen.keys() == architecture.frozen_shapes().keys() and all(torch.equal(tensors[name], bias) for name, bias in frozen.items())
    save_file({name: tensor for name, tensor in tensors.items() if name not in frozen}, file)
    assert check_tensors(tmp_path, architecture, frozen=False) == [file]
    with pytest.raises(ModelError, match=r"e_score_correction_bias is missing. Copy the model again"):
        check_tensors(tmp_path, architecture)
    with pytest.raises(ModelError, match=r"e_score_correction_bias of shape \(8,\) is missing. Copy the model again"):
        read_frozen(tmp_path, architecture)


@pytest.mark.parametrize(("family", "trainer", "words"), [
    ("deepseek_v3", TrainerConfig(lora=LoraConfig(rank=2)), "lora.rank=2: must be 0 for a deepseek_v3 model: latent attention"),
    ("glm4_moe", TrainerConfig(lora=LoraConfig(rank=2, targets=[LoraTarget.up_proj])), "must not name up_proj in a mixture of experts"),
    ("deepseek_v3", TrainerConfig(parallel=ParallelConfig(tp=4)), r"tp=4: must divide the model's kv_lora_rank \+ qk_rope_head_dim=18"),
    ("glm4_moe", TrainerConfig(parallel=ParallelConfig(tp=2, sequence=False)), "must be true for a mixture of experts"),
    ("glm4_moe", TrainerConfig(parallel=ParallelConfig(ep=3)), "ep=3: must divide the model's num_experts=8")])
def test_how_they_cannot_be_trained(tmp_path: Path, family: str, trainer: TrainerConfig, words: str) -> None:
    architecture = write_random_model(tmp_path, family)
    with pytest.raises(ConfigError, match=words):
        check_training(architecture, trainer)
    check_training(architecture, TrainerConfig(parallel=ParallelConfig(tp=2, pp=2, cp=2, ep=2)))
    check_engine(architecture, EngineParallelConfig(tp=2))
