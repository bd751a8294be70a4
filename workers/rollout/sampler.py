"""One sample from the engine, across interruptions: what was generated is kept, and generation goes on from there.

With `retract` the server does this itself and says by spans which version sampled which token. With `abort` the request
comes back early, and is sent again with the tokens so far as part of its prompt. `halt` ends all generation in the same
way, and what came back stays unfinished: another worker can go on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from workers.messages.types import Version
from workers.rollout.engine_client import EngineClient, EngineError, Generation, SamplingParams

PAUSE_AGAIN_S = 0.5


@dataclass
class Sample:
    """A sample: tokens, behaviour log-probs, and the version that sampled each token. `finished`: it has come to its end."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    num_interruptions: int = 0
    tokens_interrupted: int = 0
    finished: bool = False

    def add(self, generation: Generation) -> None:
        """Append a segment. Raises `EngineError` where its parts do not fit together."""
        versions = [version for version, start, end in generation.spans for _ in range(end - start)]
        if not len(generation.tokens) == len(generation.logprobs) == len(versions):
            raise EngineError(f"engine: {len(generation.tokens)} tokens, {len(generation.logprobs)} log-probs and {len(versions)} versions; "
                              "must be equally many")
        cuts = [end for _, _, end in generation.spans[:-1]]
        self.num_interruptions += len(cuts)
        self.tokens_interrupted += max(cuts, default=0)
        self.tokens += generation.tokens
        self.logprobs += generation.logprobs
        self.versions += versions


class Sampler:
    """Samples by token ids; text is made of tokens here, so that every server gives the same."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, num_pauses: Callable[[], int]) -> None:
        """`num_pauses`: how many pauses have begun and ended, odd while one is on; it tells our own aborts from an engine's."""
        self._engine, self._tokenizer, self._num_pauses = engine, tokenizer, num_pauses
        self.halted = False
        self._num_requests = 0
        self._at_rest = asyncio.Event()

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt, without special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, tokens: list[int], stop: tuple[str, ...]) -> str:
        """The text of a response, up to the first stop string."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        cuts = [place for place in (text.find(string) for string in stop) if place >= 0]
        return text[: min(cuts)] if cuts else text

    async def sample(self, rid: str, prompt: list[int], params: SamplingParams, seed: int, sample: Sample | None = None) -> Sample:
        """Generate one response, or go on with `sample`, which is added to as tokens come; returns it, unfinished after `halt`.

        Raises `EngineError`; `BadRequest` where trying again cannot help.
        """
        sample = Sample() if sample is None else sample
        while not sample.finished and not self.halted:
            rest = SamplingParams(params.max_new_tokens - len(sample.tokens), params.temperature, params.top_p, params.top_k, params.stop)
            pauses = self._num_pauses()
            # Another seed for each segment, far from those of other samples: a seed's random numbers must not be used twice.
            generation = await self._add_segment(sample, rid, prompt, rest, (seed + 1_000_003 * len(sample.tokens)) % 2**31)
            aborted_by_us = self.halted or self._num_pauses() != pauses or pauses % 2 == 1
            if generation.finish == "abort" and not aborted_by_us:
                raise EngineError(f"engine: gave up a request: {generation.message}")
            sample.finished = generation.finish != "abort" or len(sample.tokens) >= params.max_new_tokens or self._stopped(sample, params)
            if not sample.finished:
                sample.num_interruptions += 1
                sample.tokens_interrupted += len(generation.tokens)
        if sample.finished and not sample.tokens:
            raise EngineError("engine: a response without a token")
        return sample

    async def halt(self, limit_s: float) -> bool:
        """End all generation for good: every running request comes back with its tokens so far, and no other one is sent.

        True once nothing is under way any more; false if the engine did not give everything back within `limit_s` seconds.
        """
        self.halted = True
        deadline = time.monotonic() + limit_s
        while self._num_requests and time.monotonic() < deadline:
            # Again and again: a request may still have been on its way to the engine when it was paused, or a weight update may
            # have let it go on.
            with contextlib.suppress(TimeoutError):
                self._at_rest.clear()
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._engine.pause("abort")
                async with asyncio.timeout(min(PAUSE_AGAIN_S, max(0.0, deadline - time.monotonic()))):
                    await self._at_rest.wait()
        return not self._num_requests

    async def _add_segment(self, sample: Sample, rid: str, prompt: list[int], params: SamplingParams, seed: int) -> Generation:
        self._num_requests += 1
        try:
            generation = await self._engine.generate(rid, prompt + sample.tokens, params, seed)
            sample.add(generation)
            return generation
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._at_rest.set()

    def _stopped(self, sample: Sample, params: SamplingParams) -> bool:
        text = self._tokenizer.decode(sample.tokens, skip_special_tokens=True)
        return any(string in text for string in params.stop)
