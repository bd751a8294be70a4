"""The conversations of one episode, as its agent has them by requests that each bring the whole history.

    request.messages = all that was said in a conversation, the model's replies as they were returned, and something new
        --> that conversation goes on: only what is new is encoded, behind the tokens that were sampled
    any other request --> a new conversation, another sequence of the same episode: its history is text from outside
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from workers.config import WorkflowConfig
from workers.data.limits import CHARACTERS_A_TOKEN, LONG
from workers.rollout.workflows.agents.chat_messages import ChatMessage, as_messages, reply
from workers.rollout.workflows.agents.chat_requests import ApiError, ChatRequest
from workers.rollout.workflows.agents.chat_responses import Answer
from workers.rollout.workflows.agents.completions import Completion, what_is_new
from workers.rollout.workflows.agents.tool_formats import format_of
from workers.rollout.workflows.episode import LLM, Conversation, Reply

MAX_AT_ONCE = 128
MAX_TURNS = 1000
"""Turns of one episode at the same time, and altogether."""


@dataclass(eq=False)
class _Thread:
    """A conversation, and all that was said in it: messages, or the text of a completion. `busy`: its next turn is being sampled."""

    conversation: Conversation
    tools: tuple[dict, ...]
    said: tuple[ChatMessage, ...] = ()
    text: str = ""
    busy: bool = False

    def begins(self, request: ChatRequest) -> bool:
        """Whether the messages of `request` go on from here; its reasoning may be left out of them."""
        pairs = list(zip(self.said, request.messages, strict=False))
        return (not self.busy and len(self.said) < len(request.messages) and all(ours == theirs for ours, theirs in pairs)
                and all(theirs.reasoning in ("", ours.reasoning) for ours, theirs in pairs) and request.tools == self.tools and bool(self.said))


@dataclass(eq=False)
class _Asked:
    """A request under way, or answered while nobody listened any more."""

    body: bytes
    gone: Callable[[], bool]
    task: asyncio.Task[Answer]


@dataclass(eq=False)
class Chat:
    """An episode open to its agent: turns are sampled by `tasks`. `score`: the reward that it was closed with; `last`: the newest reply; `full`:
    a request did not fit in engine.context_length."""

    llm: LLM
    config: WorkflowConfig
    tasks: asyncio.TaskGroup
    score: float | None = None
    last: Reply | None = None
    full: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    _threads: list[_Thread] = field(default_factory=list)
    _asked: list[_Asked] = field(default_factory=list)
    _num_turns: int = 0

    def __post_init__(self) -> None:
        self.text = self.llm._model.text
        self.form = format_of(self.config.tool_format, self.text)

    async def ask(self, body: bytes, request: ChatRequest, gone: Callable[[], bool]) -> Answer:
        """The answer to a request, whose text is `body`; `gone` says whether its sender still listens.

        A request that is sent again because the first sender gave up waiting gets the first one's answer: nothing is sampled for nobody. Raises
        `ApiError`.
        """
        self._check_open()
        asked = self._abandoned(body)
        if asked is None:
            asked = _Asked(body, gone, self._begin(request))
            self._asked.append(asked)
        asked.gone = gone
        await asyncio.wait([asked.task])
        if asked.task.cancelled() or asked.task.exception() is not None:
            raise ApiError(503, "the episode has ended: the model cannot go on", "episode_ended")
        if not gone() and asked in self._asked:
            self._asked.remove(asked)
        return asked.task.result()

    def reward(self, score: float) -> None:
        """Close the episode with `score`. Raises `ApiError` where it is closed, or a turn is still being sampled that somebody waits for."""
        self._check_open()
        if any(not asked.task.done() and not asked.gone() for asked in self._asked):
            raise ApiError(409, "a turn of the model is still being sampled: wait for it, then send the reward", "turn_under_way")
        self.score = score
        self.close()

    def close(self) -> None:
        """From now on every request is refused."""
        self.closed.set()

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise ApiError(410, "this episode is closed: it has its reward, or its agent has ended", "episode_closed")

    def _abandoned(self, body: bytes) -> _Asked | None:
        return next((asked for asked in self._asked if asked.body == body and asked.gone()), None)

    def _begin(self, request: ChatRequest) -> asyncio.Task[Answer]:
        """Everything that may be wrong with a request is found here: what fails in the task ends the episode."""
        if sum(thread.busy for thread in self._threads) >= MAX_AT_ONCE:
            raise ApiError(429, f"an episode may have {MAX_AT_ONCE} turns at once: wait for some", "too_many_turns_at_once")
        if self._num_turns >= MAX_TURNS:
            raise ApiError(400, f"an episode may have {MAX_TURNS} turns", "too_many_turns")
        num_characters = request.num_characters
        if num_characters > max(LONG, CHARACTERS_A_TOKEN * self.llm.context_length):  # to count its tokens would take long
            self.full = True
            raise ApiError(400, f"the messages have {num_characters} characters: far more than engine.context_length has room for",
                           "context_length_exceeded", "messages")
        thread = self._going_on(request) or self._opened(request)
        if thread.conversation.room < 1:
            self.full = True
            raise ApiError(400, f"the conversation has {len(thread.conversation.tokens)} tokens: engine.context_length leaves no room for an answer",
                           "context_length_exceeded", "messages")
        thread.said, thread.busy = request.messages, True
        self._threads.append(thread)
        self._num_turns += 1
        return self.tasks.create_task(self._turn(thread, request, self._num_turns))

    def _going_on(self, request: ChatRequest) -> _Thread | None:
        """The longest conversation that `request` goes on from, with what is new in it."""
        if request.prompt is not None:
            return self._completed_on(request.prompt)
        found = max((thread for thread in self._threads if thread.begins(request)), key=lambda thread: len(thread.said), default=None)
        if found is not None:
            with _template_errors():
                found.conversation.add(as_messages(request.messages[len(found.said):], shows_tools=self.text.shows_tools))
            self._threads.remove(found)  # and back once it is known to fit
        return found

    def _completed_on(self, prompt: str | tuple[int, ...]) -> _Thread | None:
        threads = (thread for thread in self._threads if thread.text and not thread.busy)
        for thread in sorted(threads, key=lambda thread: len(thread.conversation.tokens), reverse=True):
            new = what_is_new(self.llm._model, thread.conversation, thread.text, prompt)
            if new is not None:
                self._check_known(new)
                thread.conversation.append(new)
                self._threads.remove(thread)
                return thread
        return None

    def _check_known(self, tokens: Sequence[int]) -> None:
        if not self.llm._model.knows(tokens):
            raise ApiError(400, "prompt: it holds a token that is not in the tokenizer's vocabulary", "invalid_value", "prompt")

    def _opened(self, request: ChatRequest) -> _Thread:
        if request.prompt is not None:
            if not isinstance(request.prompt, str):
                self._check_known(request.prompt)
            return _Thread(self.llm.completion(request.prompt), ())
        with _template_errors():
            messages = as_messages(request.messages, request.tools, self.text.shows_tools)
            return _Thread(self.llm.conversation(messages, request.tools if self.text.shows_tools else None), request.tools)

    async def _turn(self, thread: _Thread, request: ChatRequest, number: int) -> Answer:
        num_before = len(thread.conversation.tokens)
        sampled = await thread.conversation.generate(max_new_tokens=request.max_new_tokens, stop=(*request.stop, *self.config.stop))
        self.last, self.full, thread.busy = sampled, False, False
        if request.prompt is not None:
            said = request.prompt if isinstance(request.prompt, str) else self.llm._model.decode(request.prompt)
            thread.text = said + self.llm._model.decode(sampled.tokens)
            return Completion(request, number, ChatMessage("assistant", sampled.text), sampled, num_before)
        said_now = reply(sampled.text, request.tools if request.calls_tools else (), self.form, self.text.opens_thinking)
        thread.said = (*request.messages, said_now)
        return Answer(request, number, said_now, sampled, num_before)


@contextmanager
def _template_errors() -> Iterator[None]:
    """What the chat template cannot render is the request's fault."""
    try:
        yield
    except ValueError as error:  # ConfigError is one
        raise ApiError(400, f"messages: {error}", "invalid_value", "messages") from error
