"""The tokenizer of a model's folder, as everything here reads it: prompts, engines, examples, what is kept to be read."""

from __future__ import annotations

import itertools
from pathlib import Path

from tokenizers import Tokenizer

from workers.model.architecture import ModelError


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of `folder`/tokenizer.json, which encodes all of a text and nothing else: the file may hold, too, how the last batch was cut
    and padded (`save_pretrained` after a call with truncation=True), which transformers sets anew at each call and `tokenizers` would obey.

    Raises `ModelError`.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: not a readable tokenizer ({error}). Give the folder of a Hugging Face model with its tokenizer.json") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def text_before(tokenizer: Tokenizer) -> str:
    """The special tokens that `tokenizer` puts before a text (<|begin_of_text|>), as text; '' without any, and where that text is not just these."""
    encoded = tokenizer.encode("a", add_special_tokens=True)
    ids = [token for token, _ in itertools.takewhile(lambda one: one[1], zip(encoded.ids, encoded.special_tokens_mask, strict=True))]
    text = "".join(tokenizer.id_to_token(token) or "" for token in ids)
    return text if tokenizer.encode(text, add_special_tokens=False).ids == ids else ""
