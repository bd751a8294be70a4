"""A tokenizer encodes all of a text and nothing else, whatever its file holds of somebody's last batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from workers.model.architecture import ModelError
from workers.model.initialize import EOS, PAD, make_tiny
from workers.model.tokenizer import open_tokenizer, text_before


def test_how_the_last_batch_was_cut_and_padded_is_left_out(tmp_path: Path) -> None:
    make_tiny(tmp_path, 1)
    path, text = tmp_path / "tokenizer.json", "12 + 34 = 46, and 56 + 78 ="
    plain = open_tokenizer(tmp_path).encode(text).ids
    for change in ({"max_length": 8}, None):
        tokenizer = Tokenizer.from_file(str(path))
        if change:
            tokenizer.enable_truncation(**change)
        tokenizer.enable_padding(length=40)
        tokenizer.save(str(path))
        assert Tokenizer.from_file(str(path)).encode(text).ids != plain
        assert open_tokenizer(tmp_path).encode(text).ids == plain


@pytest.mark.parametrize(("template", "before"), [
    ("$A", ""), (f"{EOS} $A", EOS), (f"{EOS} {PAD} $A {PAD}", EOS + PAD), (f"$A {EOS}", "")])
def test_what_it_puts_before_a_text(tmp_path: Path, template: str, before: str) -> None:
    make_tiny(tmp_path, 1)
    tokenizer = open_tokenizer(tmp_path)
    tokens = [(token, tokenizer.token_to_id(token)) for token in (EOS, PAD)]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=tokens)
    assert text_before(tokenizer) == before
    assert tokenizer.encode(before + "1 + 1", add_special_tokens=False).ids == tokenizer.encode("1 + 1").ids[:before.count("<") + 5]


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("nonsense")
    with pytest.raises(ModelError, match=r"tokenizer.json: not a readable tokenizer .* Give the folder of a Hugging Face model"):
        open_tokenizer(tmp_path)
