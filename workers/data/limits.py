"""What a prompt may be like: so many tokens as the model gets it, and so large a reference for its verifier.

Files leave prompts over a limit out when they are read (prompt_files.py). Sources that never end put another prompt in its place: `SPARE`
indices further on, which no run reaches by itself, so that index and seed alone decide still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workers.config import ConfigError, DataConfig
from workers.config.choices import DataFilter
from workers.data.prompt import begun

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from workers.data.chat import ChatTemplate
    from workers.data.prompt import Prompt, PromptSource

SPARE = 500 * 2**31
"""Training prompt `index + k * SPARE` stands in for prompt `index`."""
MAX_TRIES = 64
MAX_CHARACTERS = 1_000_000
"""Of a prompt, before it is rendered: what a lease carries is bounded, too."""
LONG = 1 << 16
"""Texts of fewer characters are looked at whole."""
CHARACTERS_A_TOKEN, CUT = 16, 16
"""More characters than a token has, but in runs of white space; and more tokens than there are of what the end of a cut text was."""


def stop_window(stops: Sequence[str]) -> int:
    """So many tokens back one of `stops` may begin that the last token completed: a character is at most 4 tokens, namely its bytes in UTF-8."""
    return 4 * max(map(len, stops)) + 8


def tokens_within(tokenizer: Tokenizer, text: str, limit: int) -> tuple[list[int], str]:
    """The token ids of `text`, and how many these are, in words. The tokens of a text that is far longer than `limit` tokens take minutes and
    gigabytes: where its beginning has more, only that is looked at."""
    beginning = text[:max(LONG, CHARACTERS_A_TOKEN * (limit + 1))]
    if len(beginning) < len(text):
        tokens = tokenizer.encode(beginning, add_special_tokens=False).ids
        if len(tokens) > limit + CUT:
            return tokens, f"far more than {limit} tokens"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return tokens, f"{len(tokens)} tokens"


class Limits:
    """`data.max_prompt_tokens` and `data.max_reference_kb`. Raises `ConfigError` where tokens are limited and the model has no tokenizer."""

    def __init__(self, config: DataConfig, model_folder: Path | None, template: ChatTemplate | None) -> None:
        self.drop = config.filter is DataFilter.drop
        self._max_tokens, self._max_reference_kb, self._template = config.max_prompt_tokens, config.max_reference_kb, template
        self._bos = config.text_before
        self._tokenizer = None
        if config.max_prompt_tokens:
            if model_folder is None:
                raise ConfigError(f"data.max_prompt_tokens={config.max_prompt_tokens}: needs the model's tokenizer, which is not known here. "
                                  "Set model.path")
            self._tokenizer = _tokenizer(model_folder)

    def problem(self, prompt: Prompt) -> str:
        """Which limit `prompt` is over, '' if none. Raises `ConfigError` if its chat cannot be rendered."""
        length = max(len(prompt.text), sum(len(content) for _, content in prompt.messages))
        if length > MAX_CHARACTERS:
            return f"it has {length} characters, and no prompt may have more than {MAX_CHARACTERS}"
        if len(prompt.reference) > self._max_reference_kb << 10:
            return (f"its reference for the verifier has {len(prompt.reference) >> 10} KiB, more than data.max_reference_kb="
                    f"{self._max_reference_kb}")
        if self._tokenizer is not None:
            text = begun(prompt.text, self._bos) if self._template is None else self._template.render_prompt(prompt)
            tokens, number = tokens_within(self._tokenizer, text, self._max_tokens)
            if len(tokens) > self._max_tokens:
                return f"it has {number}, more than data.max_prompt_tokens={self._max_tokens}"
        return ""

    def admits(self, prompt: Prompt, place: str) -> bool:
        """Whether `prompt` is used. Raises `ConfigError`, naming `place`, for one over a limit with data.filter=refuse."""
        problem = self.problem(prompt)
        if problem and not self.drop:
            raise ConfigError(f"{place}: {problem}. Leave such prompts out with data.filter=drop, or raise the limit where it is a key")
        return not problem


class Replaced:
    """A source that never ends, without the prompts over the limits: others stand in for them. With data.filter=refuse one among those that
    are held out, or that `preview` gives, is an error."""

    def __init__(self, source: PromptSource, limits: Limits) -> None:
        self._source, self._limits = source, limits
        heldout = source.heldout()
        self._heldout = [prompt for prompt in heldout if limits.admits(prompt, f"data: held-out {prompt.where}")]
        self._num_dropped = len(heldout) - len(self._heldout)
        if not self._heldout:
            raise ConfigError(f"data.filter=drop: none of the {len(heldout)} held-out prompts is within the limits. "
                              "Raise data.max_prompt_tokens or data.max_reference_kb")

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`, or the first that stands in for it. Raises `ConfigError` if none does."""
        for attempt in range(MAX_TRIES):
            prompt = self._source.train(index + attempt * SPARE)
            if not self._limits.problem(prompt):  # data.filter=refuse has looked at the first ones (preview): no run ends by a later one
                return prompt
        raise ConfigError(f"data: {MAX_TRIES} prompts in a row are over the limits, the last because {self._limits.problem(prompt)}. "
                          "Raise the limit")

    def heldout(self) -> list[Prompt]:
        """The held-out prompts that are within the limits."""
        return list(self._heldout)

    def preview(self, count: int) -> Iterator[Prompt]:
        """Those of the source's that are within the limits."""
        return (prompt for prompt in self._source.preview(count) if self._limits.admits(prompt, f"data: {prompt.where}"))

    def notes(self) -> list[str]:
        """How many held-out prompts were left out."""
        dropped = f"{self._num_dropped} of {self._num_dropped + len(self._heldout)} held-out prompts left out, since they are over the limits"
        return [*self._source.notes(), *([dropped] if self._num_dropped else [])]


def _tokenizer(folder: Path) -> Tokenizer:
    from workers.model.architecture import ModelError
    from workers.model.tokenizer import open_tokenizer  # only where tokens are counted

    try:
        return open_tokenizer(folder)
    except ModelError as error:
        raise ConfigError(f"data.max_prompt_tokens needs the model's tokenizer. {error}") from error
