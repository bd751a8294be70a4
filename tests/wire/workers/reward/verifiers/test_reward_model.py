"""A sequence classifier in real reward processes, against transformers here; what becomes of one that cannot be used."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from workers.config import ConfigError, RewardConfig
from workers.config.reward import RewardModelConfig
from workers.model.initialize import make_tiny
from workers.reward.mixed import score_parts
from workers.reward.pool.pool import RewardPool, VerifierError

QUESTION, ANSWER = "1+2=", "3 or so"
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def write_classifier(folder: Path, outputs: int, template: str = "") -> Path:
    """A random classifier with the tokenizer of the tiny model."""
    make_tiny(folder, 1)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(7)
    vocab = AutoTokenizer.from_pretrained(folder).vocab_size
    model = LlamaForSequenceClassification(LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=outputs, pad_token_id=0,
        initializer_range=0.5))
    model.save_pretrained(folder)
    if template:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


def outputs_here(folder: Path, text: str) -> torch.Tensor:
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    return model(input_ids=tokens["input_ids"]).logits[0].detach().double()


def scored(config: RewardConfig, verifier: str = "reward_model") -> tuple[float, dict[str, float]]:
    async def ask() -> tuple[float, dict[str, float]]:
        async with asyncio.timeout(300), RewardPool(config) as pool:
            return await score_parts(pool, QUESTION, ANSWER, "3", verifier, False)

    return asyncio.run(ask())


def config(path: Path, **model: float | int) -> RewardConfig:
    return RewardConfig(verifier="reward_model", max_retries=0, memory_mb=4096, timeout_s=60,
                        model=RewardModelConfig(str(path), **model))  # type: ignore[arg-type]


def test_one_output_is_a_sigmoid_and_a_part_of_a_sum(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", 1)
    output = float(outputs_here(folder, QUESTION + ANSWER)[0])
    expected = 1 / (1 + math.exp(-(output - 0.3) / 2))
    total, each = scored(config(folder, center=0.3, scale=2.0), "0.25*numeric+0.75*reward_model")
    assert each == {"numeric": 1.0, "reward_model": pytest.approx(expected, abs=1e-5)}
    assert total == pytest.approx(0.25 + 0.75 * expected, abs=1e-5)


def test_several_outputs_are_a_softmax_over_the_templates_text(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", 3, TEMPLATE)
    expected = outputs_here(folder, f"[user]{QUESTION}[assistant]{ANSWER}").softmax(0)
    assert [scored(config(folder, label=label))[0] for label in (0, 2)] == pytest.approx([float(expected[0]), float(expected[2])], abs=1e-5)


def test_the_end_of_a_long_text_is_scored(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", 1)
    assert scored(config(folder, max_tokens=len(ANSWER)))[0] == pytest.approx(float(outputs_here(folder, ANSWER)[0].sigmoid()), abs=1e-5)


@pytest.mark.parametrize(("outputs", "label", "changed", "said"), [
    (3, 3, {}, "must be below the 3 outputs"),
    (1, 0, {"architectures": ["LlamaForCausalLM"]}, "must be a sequence classifier, not LlamaForCausalLM")])
def test_a_folder_that_is_none_is_refused_before_anything_starts(tmp_path: Path, outputs: int, label: int, changed: dict, said: str) -> None:
    path = write_classifier(tmp_path / "model", outputs) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ConfigError, match=said):
        config(tmp_path / "model", label=label).settle()
    if outputs == 3:
        with pytest.raises(ConfigError, match="must be left at 0, and reward.model.scale at 1, with 3 outputs"):
            config(tmp_path / "model", center=0.5).settle()
    with pytest.raises(ConfigError, match="holds no readable config.json"):
        config(tmp_path / "none").settle()
    with pytest.raises(ConfigError, match="must name a sequence classifier with verifier 'reward_model'"):
        RewardConfig().check_named("0.5*numeric+0.5*reward_model")


def test_a_model_that_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", 1)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(VerifierError, match="reward_model") as raised:
        scored(config(folder))
    assert "SafetensorError" in str(raised.value)
