"""How turns become text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.config import Config, ConfigError, DataConfig, DataKind, ModelConfig
from workers.config.data import PartConfig
from workers.rollout.workflows.rendering import ChatText, PlainText, TextFormat, text_of, texts_of_parts

CHATML = ("{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
          "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
HIDES_TURNS = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
ALTERNATES = "{% if messages[-1].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}{{ messages[-1].content }}"


def chat(folder: Path, template: str) -> TextFormat:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return text_of(Config(model=ModelConfig(path=str(folder)), data=DataConfig(chat_template=True)))


def test_text_is_taken_as_it_is_without_a_template() -> None:
    plain = text_of(Config())
    assert isinstance(plain, PlainText) and plain.opening("12 + 30 =") == "12 + 30 =" and plain.following(" no") == " no"
    said = [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "4"}]
    assert plain.opening(said) == plain.following(said) == "\nuser: Hi\ntool: 4\nassistant:"


def test_a_template_opens_a_conversation_and_goes_on_behind_a_turn(tmp_path: Path) -> None:
    text = chat(tmp_path, CHATML)
    assert isinstance(text, ChatText) and text.opening("Hi") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.opening([{"role": "system", "content": "S"}]) == "<|im_start|>system\nS<|im_end|>\n<|im_start|>assistant\n"
    assert text.following("No.") == "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    assert text.following([{"role": "tool", "content": "4"}, {"role": "user", "content": "So?"}]) == (
        "<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n")


def test_each_part_of_a_mixture_has_its_own_form(tmp_path: Path) -> None:
    chat(tmp_path, CHATML)
    parts = {"a": PartConfig(chat_template=True), "b": PartConfig()}
    config = Config(model=ModelConfig(path=str(tmp_path)), data=DataConfig(kind=DataKind.mixture, parts=parts))
    texts = texts_of_parts(config)
    assert texts["a"].following("No.").startswith("<|im_end|>") and texts["b"].following("No.") == "No." and isinstance(text_of(config), PlainText)
    config.data.chat_template, config.data.parts["b"].chat_template = True, False
    assert [type(text) for text in texts_of_parts(config).values()] == [ChatText, PlainText] and texts_of_parts(Config()) == {}


def test_templates_that_cannot_go_on_say_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves out the assistant's turns"):
        chat(tmp_path, HIDES_TURNS).following("No.")
    with pytest.raises(ConfigError, match="roles must alternate"):
        chat(tmp_path, ALTERNATES).following([{"role": "tool", "content": "4"}])
    with pytest.raises(ConfigError, match="has no chat template"):
        text_of(Config(model=ModelConfig(path=str(tmp_path / "none")), data=DataConfig(chat_template=True)))
