"""A tokenizer encodes all of a text and nothing else, whatever its file holds of somebody's last batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from workers.model.architecture import ModelError
from workers.model.initialize import make_tiny
from workers.model.tokenizer import open_tokenizer


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


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("nonsense")
    with pytest.raises(ModelError, match=r"tokenizer.json: not a readable tokenizer .* Give the folder of a Hugging Face model"):
        open_tokenizer(tmp_path)
