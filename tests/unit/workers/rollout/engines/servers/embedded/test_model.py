"""The decoder's parts that the HTTP tests do not reach: bfloat16, torch without packed layers, resizing, stop strings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.model_folders import YARN, write_hf_model
from workers.model import dtypes
from workers.model.architecture import read_architecture
from workers.rollout.engines.servers.embedded.model import Model
from workers.rollout.engines.servers.embedded.requests import Copy, Segment
from workers.rollout.engines.servers.embedded.text import Text


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small Qwen3 on disk, and the same as a module."""
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(Qwen3Config(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                          num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True)).eval()
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.mul_(4) if tensor.dim() > 1 else tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
    folder = tmp_path_factory.mktemp("qwen3")
    module.save_pretrained(folder)
    return folder, module


@torch.no_grad()
def reference(module: Any, ids: list[int]) -> torch.Tensor:
    """Log-probs after `ids`, float32 [vocabulary]."""
    return torch.log_softmax(module(torch.tensor([ids])).logits[0, -1].float(), -1)


def last_logprobs(model: Model, sequences: list[list[int]], chunk: int) -> torch.Tensor:
    """Prefill `sequences` into rows in chunks, then decode their last tokens."""
    model.apply([], 64)
    for start in range(0, max(map(len, sequences)), chunk):
        segments = [Segment(row, start, ids[:-1][start : start + chunk]) for row, ids in enumerate(sequences) if start < len(ids) - 1]
        if segments:
            model.prefill(segments)
    logits = model.decode([ids[-1] for ids in sequences], [len(ids) - 1 for ids in sequences])
    return torch.log_softmax(logits, -1)


SEQUENCES = [[(7 * row + index * index) % 97 for index in range(length)] for row, length in enumerate((1, 5, 33, 60))]


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("use_packed", [True, False])
def test_chunks_and_weight_layout_do_not_matter(
        saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, chunk: int, use_packed: bool) -> None:
    folder, module = saved
    if not use_packed:
        monkeypatch.setattr(dtypes, "packs", lambda dtype: False)
    model = Model(folder, read_architecture(folder), torch.float32, 4, 256)
    logprobs = last_logprobs(model, SEQUENCES, chunk)
    for row, ids in enumerate(SEQUENCES):
        assert (logprobs[row] - reference(module, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {}), ("mistral", {}), ("mistral", {"sliding_window": 64}), ("qwen2", {}), ("qwen3", {}), ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 7, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 5, "num_attention_heads": 6, "num_key_value_heads": 1}),
    ("glm4_moe", {}), ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 0}),
    ("deepseek_v3", {}), ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 0}),
    ("deepseek_v3", {"rope_parameters": YARN, "rms_norm_eps": 1e-5})])
def test_logprobs_are_those_of_hugging_face(tmp_path: Path, family: str, changes: dict[str, Any], tied: bool) -> None:
    module = write_hf_model(tmp_path, family, vocab_size=97, tie_word_embeddings=tied, **changes)
    architecture = read_architecture(tmp_path)
    logprobs = last_logprobs(Model(tmp_path, architecture, torch.float32, 4, architecture.max_positions), SEQUENCES, 16)
    for row, ids in enumerate(SEQUENCES):
        assert (logprobs[row] - reference(module, ids)).abs().max() < 1e-4


def test_a_mixture_in_bfloat16_follows_float32(tmp_path: Path) -> None:
    module = write_hf_model(tmp_path, "qwen3_moe", vocab_size=97)
    logprobs = last_logprobs(Model(tmp_path, read_architecture(tmp_path), torch.bfloat16, 4, 256), SEQUENCES, 16)
    errors = torch.cat([logprobs[row] - reference(module, ids) for row, ids in enumerate(SEQUENCES)])
    assert errors.square().mean().sqrt() < 0.1


def test_bfloat16_is_as_near_to_the_exact_result_as_the_usual_code(saved: tuple[Path, Any]) -> None:
    folder, module = saved
    half = copy.deepcopy(module).to(torch.bfloat16)
    logprobs = last_logprobs(Model(folder, read_architecture(folder), torch.bfloat16, 4, 256), SEQUENCES, 16)
    exact = [reference(module, ids) for ids in SEQUENCES]
    ours = sum(float((logprobs[row] - exact[row]).square().sum()) for row in range(len(SEQUENCES)))
    usual = sum(float((reference(half, ids) - exact[row]).square().sum()) for row, ids in enumerate(SEQUENCES))
    assert ours < 1.5 * usual


def test_copies_and_resizes_keep_what_rows_hold(saved: tuple[Path, Any]) -> None:
    folder, module = saved
    model = Model(folder, read_architecture(folder), torch.float32, 4, 256)
    last_logprobs(model, SEQUENCES[:3], 64)
    model.apply([Copy(2, 4, 32), Copy(4, 0, 32)], 160)
    model.apply([], 64)
    logits = model.decode([SEQUENCES[2][-1], 3], [32, 2])
    assert (torch.log_softmax(logits[0], -1) - reference(module, SEQUENCES[2])).abs().max() < 1e-4
    assert (torch.log_softmax(logits[1], -1) - reference(module, [*SEQUENCES[1][:2], 3])).abs().max() < 1e-4


def test_stop_strings_are_found_when_their_last_byte_comes(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text(tmp_path)
    ids = text.encode("x" * 50 + "a€\n\nb", 100)
    hits = [length for length in range(1, len(ids) + 1) if text.find_stop(ids[:length], ["€\n\n", "never"])]
    assert hits[0] == len(ids) - 1
    assert text.find_stop(ids[:-2], ["€\n\n"]) is None
    assert text.decode(ids) == "x" * 50 + "a€\n\nb"


def test_a_stop_string_may_be_a_special_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text(tmp_path)
    assert text.find_stop([0, 1, 2], ["<end>"]) == "<end>" and text.find_stop([0, 1], ["<end>"]) is None and text.decode([0, 1, 2]) == "a b"
