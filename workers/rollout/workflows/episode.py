"""What a workflow's function is given: an episode, the model, and the reward. One call of the function is one episode.

    async def run(episode, llm, reward):                      --> the episode's score, in [0, 1]
        reply = await llm.generate()                          the model goes on from the prompt
        reply = await llm.generate("Are you sure?")           ... and from all that was said so far, token for token
        return await reward(reply)                            judged by the episode's verifier, in a process of its own

What the model samples is trained on as it was sampled; what comes from outside (text given to `generate`, `add` or `append`) is not. Nothing
is tokenized again. A turn for which there is no room in engine.context_length is empty and ends by "length"; so are all that follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.config import WorkflowConfig
from workers.messages.parts import Purpose
from workers.rollout.workflows.rendering import Messages, TextFormat
from workers.rollout.workflows.transcript import Dialogue, Turn

MAX_EMPTY_TURNS = 100
"""So many turns without room are taken for a function that does not look at `finish`."""


class WorkflowError(RuntimeError):
    """A workflow's function did what it may not, or raised; the text names it, and file and line."""


@dataclass(frozen=True)
class Tools:
    """What a function can use besides the model. `python`: run a program in the sandbox, get what it printed."""

    python: Callable[[str], Awaitable[str]]


@dataclass(frozen=True)
class Episode:
    """One run of a workflow. `prompt` is the text that the model is given, in its chat template where there is one; `reference` is what
    `verifier` compares with; `index`: the episode's number within its group; `seed`: another for each episode, the same when it is run
    again. `config.options` are yours."""

    prompt: str
    reference: str
    verifier: str
    purpose: Purpose
    index: int
    seed: int
    config: WorkflowConfig
    tools: Tools


@dataclass(frozen=True)
class Reply:
    """One turn of the model. `text`: up to the first stop string, without special tokens; `tokens` and `logprobs`: all that was sampled.
    `finish`: "stop", or "length" where it was cut."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str


class Halted(Exception):
    """Generation was halted before the episode was finished; what there is of it stands in its record."""


class Model(Protocol):
    """What conversations of an episode are made with (episode_session.py)."""

    text: TextFormat
    context_length: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether all are in the vocabulary."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, without special tokens."""
        ...

    async def turn(self, dialogue: Dialogue, before: list[int], outside: list[int], max_new_tokens: int, stop: tuple[str, ...]) -> Reply:
        """Sample the next turn of `dialogue`, after the tokens `before`, of which the last are `outside`. Raises `EngineError` or `Halted`."""
        ...


class Conversation:
    """A sequence of tokens in turns of the model and of others; `tokens` are all so far. It is trained on unless `trained` is set to False."""

    def __init__(self, model: Model, config: WorkflowConfig, beginning: Sequence[int]) -> None:
        self._model, self._config = model, config
        self.tokens = list(beginning)
        self._outside = list(beginning)
        self._dialogue = Dialogue()
        self._after_turn = self._busy = False
        self._num_empty = 0

    @property
    def trained(self) -> bool:
        """Whether the model's turns here are trained on."""
        return self._dialogue.trained

    @trained.setter
    def trained(self, value: bool) -> None:
        self._dialogue.trained = value

    @property
    def turns(self) -> list[Turn]:
        """The model's turns so far, each with the tokens from outside before it."""
        return self._dialogue.turns

    @property
    def context_length(self) -> int:
        """engine.context_length: how many tokens a conversation may have."""
        return self._model.context_length

    @property
    def room(self) -> int:
        """How many more tokens engine.context_length leaves."""
        return max(0, self._model.context_length - len(self.tokens))

    def add(self, added: str | Messages) -> None:
        """Append what others say: a user's message, or messages {"role", "content"}; in the chat template where there is one, which then opens the
        model's next turn, else as it is."""
        tokens = self._model.encode(self._model.text.following(added))
        # Where a turn ended by itself, the token that ends it was sampled: the template's is the same one.
        if self._after_turn and self._model.text.marks_turns and self.tokens[-1:] == tokens[:1]:
            tokens = tokens[1:]
        self._append(tokens)

    def append(self, text: str | Sequence[int]) -> None:
        """Append text, or tokens, as it is, without a template: the model goes on as if it had written that."""
        self._append(self._model.encode(text) if isinstance(text, str) else list(text))

    async def generate(self, added: str | Messages = "", *, max_new_tokens: int | None = None, stop: Sequence[str] | None = None) -> Reply:
        """The model's next turn, after `added` (as `add`).

        `max_new_tokens`: at most, workflow.max_new_tokens being the most there is; `stop`, of one or several: instead of workflow.stop. Raises
        `EngineError`, `Halted` (the worker leaves, another one goes on), and `WorkflowError` where a call of this conversation is still under way.
        """
        if self._busy:
            raise WorkflowError("generate was called while the conversation's last turn is still being sampled. Await it first, or use fork()")
        if added:
            self.add(added)
        stops = self._config.stop if stop is None else [stop] if isinstance(stop, str) else stop
        limit = min(self._config.max_new_tokens, self._config.max_new_tokens if max_new_tokens is None else max_new_tokens, self.room)
        if limit < 1:
            return await self._no_room()
        self._busy = True
        try:
            reply = await self._model.turn(self._dialogue, self.tokens, self._outside, limit, tuple(stops))
        finally:
            self._busy = False
        self.tokens += reply.tokens
        self._outside, self._after_turn = [], True
        return reply

    def fork(self) -> Conversation:
        """Another conversation that begins with all that was said here; that part is not trained on a second time."""
        other = Conversation(self._model, self._config, self.tokens)
        other._after_turn = self._after_turn
        return other

    def _append(self, tokens: list[int]) -> None:
        if self._busy:
            raise WorkflowError("a conversation was added to while its last turn is still being sampled. Await it first, or use fork()")
        self.tokens += tokens
        self._outside += tokens
        self._after_turn = False

    async def _no_room(self) -> Reply:
        self._num_empty += 1
        if self._num_empty > MAX_EMPTY_TURNS:
            raise WorkflowError(f"generate was called {self._num_empty} times without room for a token (engine.context_length="
                                f"{self._model.context_length}). Return once finish is \"length\"")
        await asyncio.sleep(0)
        return Reply("", (), (), "length")


class LLM(Conversation):
    """The model, in a conversation that begins with the episode's prompt."""

    def conversation(self, prompt: str | Messages, tools: Sequence[dict] | None = None) -> Conversation:
        """Another conversation, independent of this one: `prompt` is a user's message, or messages, with `tools` as the chat template wants them."""
        return Conversation(self._model, self._config, self._model.encode(self._model.text.opening(prompt, tools)))

    def completion(self, prompt: str | Sequence[int]) -> Conversation:
        """The same, of text or tokens as they are."""
        return Conversation(self._model, self._config, self._model.encode(prompt) if isinstance(prompt, str) else prompt)


class Reward(Protocol):
    """`await reward(response)`: the score in [0, 1] that a verifier gives. Verifier, reference, prompt: the episode's unless others are given."""

    async def __call__(self, response: Reply | str, *, reference: str | None = None, verifier: str | None = None, prompt: str | None = None) -> float:
        """Raises `VerifierError` where there is no score, `ConfigError` where there is no such verifier."""
        ...


Run = Callable[[Episode, LLM, Reward], Awaitable[float]]
"""A workflow's function."""
