"""Examples for supervised training: prompts with the answers that their source knows, as token ids.

    source (arithmetic, jsonl, ...; chat template) --tokenizer--> prompt ids | response ids + end of turn

The prompt is tokenized alone, as it is the engine's input, and the response as what follows it: some tokenizers (SentencePiece's) put a space
before whatever they are given. The last token is the one at which engines stop. Every process that opens the examples of a run has the same
ones in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from workers.config import Config
from workers.data.chat import read_tokenizer_config
from workers.data.prompt import Prompt, PromptSource
from workers.data.prompts import open_prompts
from workers.model.architecture import ModelError, read_architecture
from workers.model.end_tokens import eos_ids, token_text
from workers.model.tokenizer import open_tokenizer


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt, and of the response to learn with its end; `id` is the prompt's. No response: the source knows none."""

    id: str
    prompt: list[int]
    response: list[int]

    def problem(self, context_length: int) -> str:
        """Why it cannot be trained on, '' if it can."""
        total = len(self.prompt) + len(self.response)
        if not self.prompt or not self.response:
            return f"example {self.id}: it has no {'response' if self.prompt else 'prompt'}. Leave it out, or choose data that has one"
        if total > context_length:
            return (f"example {self.id}: prompt and response have {total} tokens, more than engine.context_length={context_length}. Raise "
                    "engine.context_length, or leave such examples out")
        return ""


class Examples:
    """Endless training examples by index, and the held-out ones; a response ends with `end_token`."""

    def __init__(self, source: PromptSource, tokenizer: Tokenizer, end_token: int) -> None:
        self._source, self._tokenizer, self._end_token = source, tokenizer, end_token

    def train(self, index: int) -> Example:
        """Training example number `index`."""
        return self.of(self._source.train(index))

    def heldout(self) -> list[Example]:
        """The held-out examples, always the same in the same order."""
        return [self.of(prompt) for prompt in self._source.heldout()]

    def of(self, prompt: Prompt) -> Example:
        """What is learnt of `prompt`."""
        before = self._ids(prompt.text)
        return Example(prompt.id, before, [*self._following(before, prompt), self._end_token] if prompt.response else [])

    def _following(self, before: list[int], prompt: Prompt) -> list[int]:
        """The response's ids behind those of the prompt; alone where both together are tokenized otherwise at the seam."""
        whole = self._ids(prompt.text + prompt.response)
        return whole[len(before):] if whole[:len(before)] == before else self._ids(prompt.response)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def open_examples(config: Config) -> Examples:
    """The examples of a supervised run, whose `model.path` is the starting model's folder. Raises `ConfigError`, `ModelError`."""
    folder = Path(config.model.path)
    tokenizer = open_tokenizer(folder)
    source = open_prompts(config.data, config.reward, config.run.seed, folder, responses=True)
    return Examples(source, tokenizer, end_token(folder, tokenizer))


def end_token(folder: Path, tokenizer: Tokenizer) -> int:
    """The token that ends a turn: the tokenizer's eos_token, else the first at which engines stop.

    Raises `ModelError` where the model's folder names none.
    """
    stops = eos_ids(folder, read_architecture(folder))
    named = read_tokenizer_config(folder).get("eos_token")
    own = None if named is None else tokenizer.token_to_id(token_text(named))
    if own is not None and (own in stops or not stops):
        return own
    if not stops:
        raise ModelError(f"{folder}: names no token that ends a turn, with which a response to learn must end. "
                         "Give eos_token in tokenizer_config.json, and eos_token_id in config.json")
    return stops[0]
