"""Model folders: what is read from config.json and safetensors headers, and how each thing that is wrong is refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from workers.model.architecture import Architecture, ModelError, read_architecture
from workers.model.experts import MixtureOfExperts
from workers.model.rope import inverse_frequencies
from workers.model.tensors import MAX_HEADER_BYTES, check_tensors, safetensors_header

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "hidden_act": "silu", "eos_token_id": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM"}
MIXTURE: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
                           "norm_topk_prob": True}


def write_config(folder: Path, *without: str, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, **changes: Any) -> Architecture:
    architecture = read_architecture(write_config(folder, **changes))
    save_file({name: np.zeros(shape, np.float32) for name, shape in architecture.tensor_shapes().items()}, folder / "model.safetensors")
    return architecture


# -- config.json ---------------------------------------------------------------------------------------------------------

def test_what_is_read(tmp_path: Path) -> None:
    assert read_architecture(write_config(tmp_path)) == Architecture(
        family="llama", vocab_size=20, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
        max_positions=64, rms_norm_eps=1e-5, tied=False, rope_theta=10000.0, rope_scaling=None, eos_token_ids=(1,))


def test_defaults_of_older_configs(tmp_path: Path) -> None:
    architecture = read_architecture(write_config(
        tmp_path, "num_key_value_heads", "rope_parameters", "hidden_act", "eos_token_id", "tie_word_embeddings", head_dim=None))
    assert (architecture.num_kv_heads, architecture.head_dim, architecture.rope_theta) == (4, 4, 10000.0)
    assert (architecture.tied, architecture.eos_token_ids, architecture.rope_scaling) == (False, (), None)
    assert read_architecture(write_config(tmp_path, head_dim=10)).head_dim == 10


def test_what_is_read_of_a_mixture(tmp_path: Path) -> None:
    found = read_architecture(write_config(tmp_path, **MIXTURE))
    assert (found.family, found.qk_norm, found.qkv_bias) == ("qwen3_moe", True, False)
    assert found.mixture == MixtureOfExperts(num_experts=4, experts_per_token=2, intermediate_size=6, normalized=True)
    newer = {**MIXTURE, "num_local_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}
    assert read_architecture(write_config(tmp_path, "num_experts", **newer)) == found
    unnormalized = read_architecture(write_config(tmp_path, "norm_topk_prob", **MIXTURE)).mixture
    assert unnormalized is not None and not unnormalized.normalized, "as transformers reads it"


@pytest.mark.parametrize(("window", "longest"), [(None, 64), (64, 64), (65, 64), (63, 63), (8, 8), ("absent", 64)])
def test_a_sliding_window_bounds_the_positions_of_mistral(tmp_path: Path, window: Any, longest: int) -> None:
    values = {} if window == "absent" else {"sliding_window": window}
    assert read_architecture(write_config(tmp_path, architectures=["MistralForCausalLM"], **values)).max_positions == longest
    assert read_architecture(write_config(tmp_path, **values)).max_positions == 64, "others do not slide unless use_sliding_window says so"


def test_a_window_that_is_not_written_is_the_one_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    found = read_architecture(write_config(tmp_path, architectures=["MistralForCausalLM"], max_position_embeddings=32768))
    assert found.max_positions == transformers.MistralConfig().sliding_window


@pytest.mark.parametrize(("eos", "expected"), [(1, (1,)), ([1], (1,)), ([3, 1, 2], (3, 1, 2)), ([], ()), (None, ()), (0, (0,))])
def test_ends_of_sequences(tmp_path: Path, eos: Any, expected: tuple[int, ...]) -> None:
    assert read_architecture(write_config(tmp_path, eos_token_id=eos)).eos_token_ids == expected


@pytest.mark.parametrize("eos", [["<eos>"], [1, None], [[1]], "<eos>", {"id": 1}])
def test_an_end_that_is_no_token_is_refused(tmp_path: Path, eos: Any) -> None:
    with pytest.raises(ModelError, match=r"config\.json.*Take the config\.json that came with the model"):
        read_architecture(write_config(tmp_path, eos_token_id=eos))


def test_rope_as_older_and_newer_configs_write_it(tmp_path: Path) -> None:
    newer = read_architecture(write_config(tmp_path, rope_parameters={**LLAMA3, "rope_theta": 500.0}))
    older = read_architecture(write_config(tmp_path, "rope_parameters", rope_theta=500.0, rope_scaling=LLAMA3))
    oldest = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}
    assert newer == older == read_architecture(write_config(tmp_path, "rope_parameters", rope_theta=500.0, rope_scaling=oldest))
    assert newer.rope_theta == 500.0
    assert newer.rope_scaling == {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    plain = read_architecture(write_config(tmp_path, "rope_parameters", rope_theta=1e6, rope_scaling=None))
    assert (plain.rope_theta, plain.rope_scaling) == (1e6, None)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "proportional"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_ropes_are_refused(tmp_path: Path, kind: str, key: str) -> None:
    with pytest.raises(ModelError, match=f"rope type '{kind}' is not supported. Supported are 'default' and 'llama3'"):
        read_architecture(write_config(tmp_path, "rope_parameters", rope_scaling={key: kind, "factor": 2.0}))


def test_the_refusal_of_a_rope_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_architecture(write_config(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 2.0}))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_a_llama3_rope_with_a_value_missing_is_refused(tmp_path: Path, missing: str) -> None:
    rope = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(ModelError, match=missing):
        inverse_frequencies(read_architecture(write_config(tmp_path, rope_parameters=rope)))


@pytest.mark.parametrize("content", ["", "{", "null", "[]", '"text"', "7", "\x00", '{"a": 1} x'])
def test_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"no readable config\.json .*Give the folder of a Hugging Face model") as caught:
        read_architecture(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_config_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x01" * 100)
    with pytest.raises(ModelError, match=r"no readable config\.json"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "empty", "a file"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    if kind == "empty":
        folder.mkdir()
    elif kind == "a file":
        folder.touch()
    with pytest.raises(ModelError, match=r"/model: no readable config\.json .*Give the folder of a Hugging Face model"):
        read_architecture(folder)


@pytest.mark.parametrize(("names", "shown"), [(["GPT2LMHeadModel"], "GPT2LMHeadModel"), (["LlamaModel", "LlamaForCausalLM"], "LlamaModel"),
                                              ([], "none"), (None, "none")])
def test_another_architecture_is_refused(tmp_path: Path, names: Any, shown: str) -> None:
    text = f"architecture '{shown}' is not supported. Supported are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    with pytest.raises(ModelError, match=text) as caught:
        read_architecture(write_config(tmp_path, architectures=names))
    assert str(tmp_path) in str(caught.value)


REQUIRED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rms_norm_eps"]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("change", ["missing", "null", "a list", "words"])
def test_a_missing_or_wrong_value_is_refused(tmp_path: Path, key: str, change: str) -> None:
    values = {"null": None, "a list": [1], "words": "many"}
    folder = write_config(tmp_path, key) if change == "missing" else write_config(tmp_path, **{key: values[change]})
    with pytest.raises(ModelError, match=r"config\.json: .*Take the config\.json that came with the model"):
        read_architecture(folder)


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", 0), ("num_attention_heads", -4), ("vocab_size", 0), ("num_hidden_layers", 0),
                                            ("hidden_size", -16)])
def test_a_size_that_is_none_is_refused(tmp_path: Path, key: str, value: int) -> None:
    with pytest.raises(ModelError, match=key):
        read_architecture(write_config(tmp_path, "head_dim", **{key: value}))


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
@pytest.mark.parametrize("change", ["missing", "null", "words", "zero"])
def test_a_mixture_without_its_sizes_is_refused(tmp_path: Path, key: str, change: str) -> None:
    changes = MIXTURE if change == "missing" else {**MIXTURE, key: {"null": None, "words": "many", "zero": 0}[change]}
    with pytest.raises(ModelError, match=f"(config.json: value .*|{key}=0 must be at least 1. )Take the config"):
        read_architecture(write_config(tmp_path, *([key] if change == "missing" else []), **changes))


@pytest.mark.parametrize(("number", "normalized", "accepted"), [
    (1, False, True), (1, True, False), (2, True, True), (4, True, True), (5, False, False)])
def test_how_many_experts_a_token_may_have(tmp_path: Path, number: int, normalized: bool, accepted: bool) -> None:
    folder = write_config(tmp_path, **{**MIXTURE, "num_experts_per_tok": number, "norm_topk_prob": normalized})
    if accepted:
        read_architecture(folder)
    else:
        with pytest.raises(ModelError, match=f"num_experts_per_tok={number} must be from 1 .* to num_experts=4. Take another model"):
            read_architecture(folder)


def test_a_head_that_is_no_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="head_dim=7 must be even"):
        read_architecture(write_config(tmp_path, head_dim=7))


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("use_sliding_window", True),
                                            ("quantization_config", {"bits": 4}), ("decoder_sparse_step", 2), ("mlp_only_layers", [0]),
                                            ("layer_types", ["full_attention", "sliding_attention"])])
def test_what_is_not_built_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"{key}=.* is not supported. Use a model without it") as caught:
        read_architecture(write_config(tmp_path, **{key: value}))
    assert str(tmp_path) in str(caught.value)
    for off in (False, None):
        if key != "hidden_act" and not (key == "decoder_sparse_step" and off is False):
            read_architecture(write_config(tmp_path, **{key: off}))


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_attention_heads=4 must be a multiple of num_key_value_heads=3"):
        read_architecture(write_config(tmp_path, num_key_value_heads=3))


# -- tensors -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_tensors_are_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    kinds = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig, "qwen2": transformers.Qwen2Config,
             "qwen3": transformers.Qwen3Config, "qwen3_moe": transformers.Qwen3MoeConfig}
    values = {**CONFIG, **(MIXTURE if family == "qwen3_moe" else {}), "tie_word_embeddings": tied}
    del values["architectures"]
    model = transformers.AutoModelForCausalLM.from_config(kinds[family](**values, head_dim=6))
    model.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    assert (architecture.family, architecture.tied, architecture.head_dim) == (family, tied, getattr(model.config, "head_dim", 4))
    stored = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert architecture.tensor_shapes() == stored
    assert check_tensors(tmp_path, architecture) == [tmp_path / "model.safetensors"]


def test_several_files_are_one_model(tmp_path: Path) -> None:
    architecture = write_model(tmp_path)
    tensors = list(load_file(tmp_path / "model.safetensors").items())
    (tmp_path / "model.safetensors").unlink()
    for number, part in enumerate((tensors[::2], tensors[1::2])):
        save_file(dict(part), tmp_path / f"model-{number}.safetensors")
    assert check_tensors(tmp_path, architecture) == [tmp_path / "model-0.safetensors", tmp_path / "model-1.safetensors"]
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=f"tensor {tensors[1][0]} is missing. Copy the model again"):
        check_tensors(tmp_path, architecture)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_missing_tensor_is_noticed(tmp_path: Path, family: str) -> None:
    architecture = write_model(tmp_path, **MIXTURE | {"architectures": [FAMILIES[family]]})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert len(tensors) == 3 + 2 * {"llama": 9, "mistral": 9, "qwen2": 12, "qwen3": 11, "qwen3_moe": 9 + 4 * 3}[family]
    for name in tensors:
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, file)
        with pytest.raises(ModelError, match=f"tensor {name} is missing. Copy the model again"):
            check_tensors(tmp_path, architecture)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_wrong_shape_is_noticed(tmp_path: Path, family: str) -> None:
    architecture = write_model(tmp_path, **MIXTURE | {"architectures": [FAMILIES[family]]})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        for wrong in ([*tensor.shape, 1], [tensor.shape[0] + 1, *tensor.shape[1:]], [tensor.size] if tensor.ndim > 1 else [1, tensor.size]):
            save_file(tensors | {name: np.zeros(wrong, np.float32)}, file)
            with pytest.raises(ModelError, match=f"tensor {name} has shape .*, config.json asks for .*Take both from the same model"):
                check_tensors(tmp_path, architecture)


def test_a_config_of_another_size_is_noticed(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.2\.\S+ is missing"):
        check_tensors(tmp_path, read_architecture(write_config(tmp_path, num_hidden_layers=3)))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has shape \(20, 16\), config\.json asks for \(21, 16\)"):
        check_tensors(tmp_path, read_architecture(write_config(tmp_path, vocab_size=21)))


def test_a_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    architecture = read_architecture(write_config(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file\. Give the folder of a Hugging Face model in safetensors format"):
        check_tensors(tmp_path, architecture)


def with_header(header: Any, size: int = 0) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + bytes(size)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "seven bytes": lambda content: content[:7],
    "only a length": lambda content: content[:8],
    "half a header": lambda content: content[:100],
    "header only": lambda content: content[: 8 + struct.unpack("<Q", content[:8])[0]],
    "half of it": lambda content: content[: len(content) // 2],
    "a byte short": lambda content: content[:-1],
    "a byte more": lambda content: content + b"\0",
    "huge header": lambda content: struct.pack("<Q", MAX_HEADER_BYTES + 1) + content[8:],
    "astronomic header": lambda content: b"\xff" * 8 + content[8:],
    "no JSON": lambda content: with_header(b"not json"),
    "no text": lambda content: with_header(b"\xff\xfe"),
    "a list": lambda content: with_header([]),
    "a number": lambda content: with_header(7),
    "entries are no objects": lambda content: with_header({"w": 1}),
    "no offsets": lambda content: with_header({"w": {"dtype": "F32", "shape": [2]}}, 8),
    "offsets of one": lambda content: with_header({"w": {**ENTRY, "data_offsets": [0]}}, 8),
    "no shape": lambda content: with_header({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, 8),
    "offsets of words": lambda content: with_header({"w": {**ENTRY, "data_offsets": ["0", "8"]}}, 8),
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_a_broken_safetensors_file_is_refused(tmp_path: Path, kind: str) -> None:
    architecture = write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(BROKEN[kind](file.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors: broken safetensors file \(.+\)\. Copy the model again"):
        check_tensors(tmp_path, architecture)


def test_a_well_formed_header_is_read(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    file.write_bytes(with_header({"__metadata__": {"format": "pt"}, "w": ENTRY}, 8))
    assert safetensors_header(file) == {"w": ENTRY}


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="broken safetensors file"):
        safetensors_header(tmp_path / "none.safetensors")
    os.symlink(tmp_path / "nowhere", tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="broken safetensors file"):
        check_tensors(tmp_path, read_architecture(write_config(tmp_path)))


# -- rope ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", [None, LLAMA3, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}])
def test_frequencies_are_those_of_transformers(tmp_path: Path, head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
    torch, rope_utils = pytest.importorskip("torch"), pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    reference = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=65536, rope_parameters=rope)
    expected = rope_utils.LlamaRotaryEmbedding(reference).inv_freq
    found = inverse_frequencies(read_architecture(write_config(tmp_path, head_dim=head_dim, rope_parameters=rope)))
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    plain = inverse_frequencies(read_architecture(write_config(tmp_path, head_dim=head_dim, rope_parameters={"rope_theta": theta})))
    assert torch.equal(found, plain) == (scaling is None)


def test_copies_of_a_model_are_read_alike(tmp_path: Path) -> None:
    architecture = write_model(tmp_path / "a", rope_parameters={**LLAMA3, "rope_theta": 500.0})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert read_architecture(tmp_path / "b") == architecture and hash(architecture.eos_token_ids) == hash((1,))
