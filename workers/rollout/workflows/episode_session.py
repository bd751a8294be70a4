"""One episode at work: what its conversations ask of the engines, what is recorded of it, and what it waited for.

    Conversation.generate --turn--> record: was it sampled before? --no, or not to its end--> sampler --> engines
    reward(response), tools.python(code) -----------------------------------------------> reward pool
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from workers.config import EvaluationConfig, WorkflowConfig
from workers.messages.parts import Lease, Purpose
from workers.reward.mixed import score_parts
from workers.reward.pool.pool import VerifierError
from workers.reward.rewards import Rewards
from workers.rollout.engines.client import EngineError, SamplingParams
from workers.rollout.engines.sampler import Samples
from workers.rollout.workflows.episode import Episode, Halted, Reply, Tools
from workers.rollout.workflows.rendering import TextFormat, question
from workers.rollout.workflows.transcript import Dialogue, EpisodeRecord
from workers.run.texts import well_formed


class Session:
    """The model, the reward and the tools of episode `index` of `lease`. `failure`: what must end the episode, whatever its function made of it.
    `num_under_way`: turns being sampled. `generation_s`, `reward_s`: seconds of all calls. `judged`: the verifier, and what was judged last;
    `part_scores`: of the verifiers of that sum."""

    def __init__(self, lease: Lease, index: int, record: EpisodeRecord, sampler: Samples, rewards: Rewards, config: WorkflowConfig,
                 text: TextFormat, context_length: int, heldout: EvaluationConfig) -> None:
        self.lease, self.index, self.record, self.config = lease, index, record, config
        self.text, self.context_length = text, context_length
        self.failure: EngineError | VerifierError | Halted | None = None
        self.generation_s = self.reward_s = 0.0
        self.first_text = ""
        self.judged = ("", "")
        self.part_scores: dict[str, float] = {}
        self._sampler, self._rewards, self._heldout = sampler, rewards, heldout
        self._num_turns = self.num_under_way = 0
        self._at_rest = asyncio.Event()

    @property
    def episode(self) -> Episode:
        """What the function is told."""
        lease = self.lease
        return Episode(lease.prompt, lease.reference, lease.verifier, lease.purpose, self.index, self._seed(0), self.config, Tools(self._python))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._sampler.encode(well_formed(text))

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether all are in the vocabulary."""
        return self._sampler.knows(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, without special tokens."""
        return self._sampler.text(list(tokens), ())

    async def turn(self, dialogue: Dialogue, before: list[int], outside: list[int], max_new_tokens: int, stop: tuple[str, ...]) -> Reply:
        """See `episode.Model`."""
        number, self._num_turns = self._num_turns, self._num_turns + 1
        sample = self.record.begin(dialogue, before, outside, max_new_tokens)
        lease, params = self.lease, self._params(max_new_tokens, stop)
        # Of one length, because servers abort by prefix.
        rid = f"{lease.group_id:>16}.{lease.attempt:06d}.{self.index:06d}.{number:06d}"
        with self._watched("generation_s"):
            async with self._under_way():
                await self._sampler.sample(lease, rid, list(before), params, self._seed(number), sample)
            if not sample.finished:
                # Whoever runs several turns at once may cancel the others now: first they get their tokens back.
                await self._at_rest.wait()
                await asyncio.sleep(0)  # a function that asks again and again can be cancelled here
                raise Halted
        text = self._sampler.text(sample.tokens, stop)
        self.first_text = self.first_text or text
        return Reply(text, tuple(sample.tokens), tuple(sample.logprobs), "length" if sample.cut else "stop")

    async def reward(self, response: Reply | str, *, reference: str | None = None, verifier: str | None = None, prompt: str | None = None) -> float:
        """See `episode.Reward`."""
        lease, completion = self.lease, well_formed(response.text if isinstance(response, Reply) else response)
        self.judged = (lease.verifier if verifier is None else verifier, completion)
        with self._watched("reward_s"):
            score, self.part_scores = await score_parts(
                self._rewards, lease.prompt if prompt is None else prompt, completion, lease.reference if reference is None else reference,
                self.judged[0], lease.purpose is Purpose.evaluation, partial(question, lease.prompt, self.text) if prompt is None else None)
            return score

    async def _python(self, code: str) -> str:
        with self._watched("reward_s"):
            return await self._rewards.execute(code)

    def _params(self, max_new_tokens: int, stop: tuple[str, ...]) -> SamplingParams:
        if self.lease.purpose is Purpose.evaluation:
            return SamplingParams(max_new_tokens, self._heldout.temperature, self._heldout.top_p, self._heldout.top_k, stop)
        return SamplingParams(max_new_tokens, self.config.temperature, self.config.top_p, self.config.top_k, stop)

    def _seed(self, number: int) -> int:
        """The seed of turn `number`: no two turns of a run should share random numbers."""
        first = (self.lease.seed * 1009 + self.index) % 2**31
        return first if number == 0 else int.from_bytes(hashlib.blake2b(f"{first} {number}".encode(), digest_size=4).digest()) % 2**31

    @asynccontextmanager
    async def _under_way(self) -> AsyncIterator[None]:
        """Count a turn that is being sampled."""
        self.num_under_way += 1
        self._at_rest.clear()
        try:
            yield
        finally:
            self.num_under_way -= 1
            if not self.num_under_way:
                self._at_rest.set()

    @contextmanager
    def _watched(self, counter: str) -> Iterator[None]:
        """Count the seconds of a call, and remember what it failed with."""
        started = time.monotonic()
        try:
            yield
        except (EngineError, VerifierError, Halted) as error:
            self.failure = self.failure or error
            raise
        finally:
            setattr(self, counter, getattr(self, counter) + time.monotonic() - started)
