"""Hugging Face tensors to Megatron parameters and back: names, shares of ranks, and single-rank models of every family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from safetensors.torch import load_file

from tests.support.model_folders import FAMILIES, write_hf_model, write_random_model
from workers.config import TrainerConfig
from workers.model.architecture import Architecture, read_architecture
from workers.model.experts import MixtureOfExperts
from workers.model.latent_attention import LatentAttention
from workers.trainer.megatron.hf_conversion import ExportError, iter_hf_tensors, load_hf
from workers.trainer.megatron.hf_conversion.export import assembled
from workers.trainer.megatron.hf_conversion.load import fill
from workers.trainer.megatron.hf_conversion.names import Split, all_hf_tensors, hf_tensors, share_of
from workers.trainer.megatron.hf_conversion.shards import shard_shape
from workers.trainer.megatron.model.model import build_model
from workers.trainer.megatron.parallel import cpu_backend, process_group


@pytest.fixture(scope="module", autouse=True)
def groups_of_this_process() -> Iterator[None]:
    torch.set_num_threads(1)
    process_group.initialize()
    yield
    process_group.close()


# -- names ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "expected"), [
    ("embedding.word_embeddings.weight", ["model.embed_tokens.weight"]),
    ("output_layer.weight", ["lm_head.weight"]),
    ("decoder.final_layernorm.weight", ["model.norm.weight"]),
    ("decoder.layers.1.input_layernorm.weight", ["model.layers.5.input_layernorm.weight"]),
    ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", ["model.layers.5.input_layernorm.weight"]),
    ("decoder.layers.1.self_attention.linear_qkv.bias", [f"model.layers.5.self_attn.{part}_proj.bias" for part in "qkv"]),
    ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", ["model.layers.5.post_attention_layernorm.weight"]),
    ("decoder.layers.1.mlp.linear_fc1.weight", [f"model.layers.5.mlp.{part}_proj.weight" for part in ("gate", "up")]),
    ("decoder.layers.1.mlp.router.weight", ["model.layers.5.mlp.gate.weight"]),
    ("decoder.layers.1.mlp.shared_experts.linear_fc2.weight", ["model.layers.5.mlp.shared_experts.down_proj.weight"]),
    ("decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight", ["model.layers.5.mlp.experts.10.down_proj.weight"]),
    ("decoder.layers.1.mlp.experts.linear_fc1.weight2", [f"model.layers.5.mlp.experts.10.{part}_proj.weight" for part in ("gate", "up")]),
])
def test_names_of_both_layer_specs(name: str, expected: list[str]) -> None:
    assert list(hf_tensors(name, first_layer=4, first_expert=8).names) == expected


@pytest.mark.parametrize("name", ["decoder.layers.0.self_attention.linear_proj.bias", "decoder.layers.0.mlp.experts.linear_fc3.weight0",
                                  "decoder.layers.0.mlp.shared_experts.gate_weight", "value_head.weight", ""])
def test_a_parameter_without_counterpart_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"has no counterpart in Hugging Face names. Supported are"):
        hf_tensors(name)


# -- shares of ranks -----------------------------------------------------------------------------------------------------

@st.composite
def splits(draw: Any) -> tuple[Architecture, int]:
    """An architecture of odd sizes, and over how many ranks to split it."""
    size, family = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(list(FAMILIES)))
    small = st.integers(1, 3)
    kv_heads, inner = size * draw(small), size * draw(small)
    mixture = latent = None
    if family == "qwen3_moe":
        mixture = MixtureOfExperts(draw(small), 1, size * draw(small), False)
    elif family in ("glm4_moe", "deepseek_v3"):
        mixture = MixtureOfExperts(draw(small), 2, size * draw(small), True, sigmoid=True, num_dense=draw(small) - 1, shared_size=size * draw(small))
    if family == "deepseek_v3":
        latent = LatentAttention(size * (draw(small) - 1), size * draw(small), draw(small), size * draw(small), draw(small), True)
    return Architecture(
        family=family, vocab_size=draw(st.integers(1, 13)), hidden_size=draw(st.integers(1, 5)), intermediate_size=inner, num_layers=draw(small),
        num_heads=kv_heads * draw(small), num_kv_heads=kv_heads, head_dim=2 * draw(small), max_positions=8, rms_norm_eps=1e-6,
        tied=draw(st.booleans()), rope_theta=1e4, rope_scaling=None, eos_token_ids=(), mixture=mixture,
        qkv_bias=draw(st.booleans()), qk_norm=draw(st.booleans()), latent=latent), size


def numbered(architecture: Architecture) -> dict[str, torch.Tensor]:
    """All tensors of a model, no two numbers alike."""
    tensors, start = {}, 0
    for name, shape in architecture.tensor_shapes().items():
        length = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + length, dtype=torch.float64).reshape(shape)
        start += length
    return tensors


@settings(max_examples=150, deadline=None)
@given(case=splits())
def test_every_number_is_in_one_share_and_comes_back(case: tuple[Architecture, int]) -> None:
    architecture, size = case
    shapes, whole, read, found = architecture.tensor_shapes(), numbered(architecture), Counter[str](), {}
    for tensors in all_hf_tensors(architecture):
        copies = 1 if tensors.split is Split.none else size
        shards = torch.full((copies, *shard_shape(tensors, shapes, size)), torch.nan, dtype=torch.float64)
        for rank in range(copies):
            def get(name: str, where: tuple[slice, ...]) -> torch.Tensor:
                read[name] += whole[name][where].numel()
                return whole[name][where]

            fill(shards[rank], tensors, shapes, architecture.num_kv_heads, rank, size, get)
        vocabulary = tensors.names[0] in ("model.embed_tokens.weight", "lm_head.weight")
        assert shards.numel() == (architecture.padded_vocab_size(size) * architecture.hidden_size if vocabulary
                                  else sum(whole[name].numel() for name in tensors.names))
        assert shards.flatten(0, 1)[architecture.vocab_size:].eq(0).all() or not vocabulary
        found |= dict(assembled(tensors, shards, architecture, shapes))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert read == {name: tensor.numel() for name, tensor in whole.items()}, "nothing is read twice"


@given(length=st.integers(0, 40), size=st.integers(1, 9), dimension=st.sampled_from([Split.rows, Split.columns]))
def test_shares_follow_each_other(length: int, size: int, dimension: Split) -> None:
    shape = (length, 3) if dimension is Split.rows else (3, length)
    shares = [share_of(shape, dimension, rank, size) for rank in range(size)]
    assert [number for share in shares for number in range(share[dimension.value].start, share[dimension.value].stop)] == list(range(length))
    assert all(share[1 - dimension.value] == slice(0, 3) for share in shares)
    assert share_of(shape, Split.none, 1, size) == tuple(slice(0, extent) for extent in shape)


def test_query_heads_stay_with_their_key_and_value_head() -> None:
    """8 query heads, 4 key/value heads, head size 2, on 2 ranks: what Megatron's attention expects in the second rank's matrix."""
    architecture = Architecture(family="llama", vocab_size=1, hidden_size=1, intermediate_size=2, num_layers=1, num_heads=8, num_kv_heads=4,
                                head_dim=2, max_positions=8, rms_norm_eps=1e-6, tied=True, rope_theta=1e4, rope_scaling=None, eos_token_ids=())
    qkv = next(tensors for tensors in all_hf_tensors(architecture) if len(tensors.names) == 3)
    rows = {"q": torch.arange(16.0), "k": torch.arange(100.0, 108), "v": torch.arange(200.0, 208)}
    parameter = torch.empty(16, 1)
    fill(parameter, qkv, architecture.tensor_shapes(), 4, 1, 2, lambda name, where: rows[name.split(".")[4][0]][where[0], None])
    assert parameter[:, 0].tolist() == [8, 9, 10, 11, 104, 105, 204, 205, 12, 13, 14, 15, 106, 107, 206, 207]


# -- models of one rank --------------------------------------------------------------------------------------------------

def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Architecture, Any]:
    architecture = read_architecture(folder)
    with cpu_backend.redirected():
        return architecture, build_model(architecture, folder, dtype, 1.0, TrainerConfig())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_gives_back_what_transformers_wrote(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype) -> None:
    reference = write_hf_model(tmp_path, family, tie_word_embeddings=tied).to(dtype)
    reference.save_pretrained(tmp_path)
    architecture, model = loaded(tmp_path, dtype)
    exported = list(iter_hf_tensors(model, architecture))
    stored = load_file(tmp_path / "model.safetensors")
    assert sorted(name for name, _ in exported) == sorted(architecture.tensor_shapes())
    assert sorted(stored) == sorted(architecture.tensor_shapes() | architecture.frozen_shapes())
    for name, tensor in exported:
        assert tensor.dtype == dtype and tensor.is_contiguous() and torch.equal(tensor.cpu(), stored[name]), name


@settings(max_examples=12, deadline=None)
@given(family=st.sampled_from(list(FAMILIES)), kv_heads=st.integers(1, 3), group=st.integers(1, 3), half=st.integers(1, 7),
       sizes=st.tuples(*[st.integers(1, 37)] * 3), files=st.integers(1, 3), tied=st.booleans())
def test_odd_models_make_the_round_trip(tmp_path_factory: pytest.TempPathFactory, family: str, kv_heads: int, group: int, half: int,
                                        sizes: tuple[int, int, int], files: int, tied: bool) -> None:
    folder = tmp_path_factory.mktemp("odd")
    heads = {"num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * group, "head_dim": 2 * half, "tie_word_embeddings": tied}
    if family == "glm4_moe":
        heads["head_dim"] = 4 * half  # half of it is rotated
    if family == "deepseek_v3":
        heads["num_key_value_heads"], heads["qk_rope_head_dim"] = kv_heads * group, 2 * half
    sizes_by_name = {"vocab_size": sizes[0], "hidden_size": kv_heads * group * sizes[1], "intermediate_size": sizes[2]}
    written = write_random_model(folder, family, files=files, **heads, **sizes_by_name)
    architecture, model = loaded(folder)
    assert architecture == written
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    exported = dict(iter_hf_tensors(model, architecture))
    assert exported.keys() == stored.keys() - architecture.frozen_shapes().keys()
    assert all(torch.equal(stored[name], tensor.cpu()) for name, tensor in exported.items())


def test_a_single_rank_exports_views(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen3_moe")
    architecture, model = loaded(tmp_path)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copied = [name for name, tensor in iter_hf_tensors(model, architecture) if tensor.untyped_storage().data_ptr() not in own]
    assert copied and all(name.rsplit(".", 2)[1] in ("q_proj", "k_proj", "v_proj") for name in copied), "their rows lie apart"


def test_a_model_of_another_architecture_is_not_exported(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen3")
    architecture, model = loaded(tmp_path)
    with pytest.raises(ExportError, match=r"rank 0 holds model.layers.2.input_layernorm.weight not at all"):
        list(iter_hf_tensors(model, replace(architecture, num_layers=3)))
    with pytest.raises(ExportError, match=r"rank 0 holds model.layers.1.\S+ .*which the architecture does not have"):
        list(iter_hf_tensors(model, replace(architecture, num_layers=1)))
    with pytest.raises(ExportError, match=r"rank 0 holds model.embed_tokens.weight in shape \(53, 24\) instead of \(54, 24\)"):
        list(iter_hf_tensors(model, replace(architecture, vocab_size=54)))


def test_a_model_of_other_sizes_is_not_loaded(tmp_path: Path) -> None:
    write_random_model(tmp_path / "small", "llama")
    _, model = loaded(tmp_path / "small")
    architecture = write_random_model(tmp_path / "large", "llama", vocab_size=54)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight: .* has shape \(53, 24\) instead of \(54, 24\)\. Build the model with"):
        load_hf(model, tmp_path / "large", architecture)
