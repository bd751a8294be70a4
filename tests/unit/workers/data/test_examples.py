"""What a supervised run learns of a prompt, token by token."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from workers.data.examples import Examples
from workers.data.prompt import Prompt

WORDS = ["▁1", "▁+", "▁=", "▁2", "▁", "2", "=", "a", "b", "ab"]


def tokenizer(prepends: bool) -> Tokenizer:
    """One of characters, with merges into WORDS; where it `prepends`, as SentencePiece does."""
    vocabulary = {word: number for number, word in enumerate([*dict.fromkeys("▁12+=ab"), *WORDS[:4], "ab"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "1"), ("▁", "+"), ("▁", "="), ("▁", "2"), ("a", "b")]))
    made.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if prepends else []), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    return made


@pytest.mark.parametrize("prepends", [True, False])
@pytest.mark.parametrize(("text", "response", "tokens"), [
    ("1 + 1 =", " 2", ["▁2"]), ("1 + 1 =", "2", ["2"]), ("1 + 1 =", " 2 = 2", ["▁2", "▁=", "▁2"]), ("1 a", "a", ["a"])])
def test_a_response_is_learned_as_it_follows_the_prompt(prepends: bool, text: str, response: str, tokens: list[str]) -> None:
    made = tokenizer(prepends)
    example = Examples(None, made, 99).of(Prompt("1", text, "numeric", "2", response))  # type: ignore[arg-type]
    assert [made.id_to_token(token) for token in example.response[:-1]] == tokens and example.response[-1] == 99
    assert example.prompt == made.encode(text).ids


def test_a_seam_that_both_together_would_move_stays() -> None:
    """As in generation: the model is given the prompt's own tokens."""
    made = tokenizer(prepends=False)
    example = Examples(None, made, 99).of(Prompt("1", "1 a", "numeric", "2", "b"))  # type: ignore[arg-type]
    assert [made.id_to_token(token) for token in (*example.prompt, *example.response[:-1])] == ["1", "▁", "a", "b"]
