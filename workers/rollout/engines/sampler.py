"""One sample from the engines, across interruptions: what was generated is kept, and generation goes on from there.

With `retract` the server does this itself and says by spans which version sampled which token. With `abort` the request
comes back early, and is sent again with the tokens so far as part of its prompt. A server that ends takes with it what it had not given back:
the sample goes on from the tokens before that, on another server or on the same one when it runs again. `halt` ends all generation,
and what came back stays unfinished: another worker can go on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from workers.config import RoutingShape
from workers.data.limits import stop_window
from workers.messages.parts import Lease, Purpose, Version
from workers.model.architecture import read_architecture
from workers.model.end_tokens import eos_ids
from workers.model.tokenizer import open_tokenizer
from workers.rollout.engines.client import BadRequest, EngineError, Generation, SamplingParams
from workers.rollout.engines.engine import Engine
from workers.rollout.engines.engine_pool import Engines

PAUSE_AGAIN_S = 0.5
QUIET = 6
"""So many answered pauses in a row without a reply mean that there will be none."""


@dataclass
class Sample:
    """A sample: tokens, behaviour log-probs, and the version that sampled each token. `finished`: it has come to its end; `cut`: because it
    was as long as it might be, not by itself. `routing`: the experts chosen for all tokens before it and its own but the last (chosen_experts.py)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    num_interruptions: int = 0
    tokens_interrupted: int = 0
    finished: bool = False
    cut: bool = False
    routing: bytes = b""

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
        self.routing = generation.routing or self.routing  # which is of all tokens so far

    def shorten(self, length: int, token_bytes: int) -> None:
        """Take away all tokens but the first `length`; `token_bytes`: of routing, each."""
        self.routing = self.routing[:len(self.routing) - token_bytes * (len(self.tokens) - length)]
        for parts in (self.tokens, self.logprobs, self.versions):
            del parts[length:]


class Samples(Protocol):
    """What a `Sampler` does for workflows; see there."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        ...

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether all are in the vocabulary."""
        ...

    def text(self, tokens: list[int], stop: tuple[str, ...]) -> str:
        """The text of a response."""
        ...

    async def sample(self, lease: Lease, rid: str, prompt: list[int], params: SamplingParams, seed: int, sample: Sample | None = None) -> Sample:
        """Generate one response."""
        ...


def open_sampler(engines: Engines, model: Path, routing: RoutingShape | None = None) -> Sampler:
    """The sampler of the model in this folder. Raises `ModelError`."""
    return Sampler(engines, open_tokenizer(model), routing, frozenset(eos_ids(model, read_architecture(model))))


class Sampler:
    """Samples by token ids; text is made of tokens here, so that every server gives the same. `routing`: the experts that are chosen for what is
    trained on are asked for. `ends`: tokens that end a turn."""

    def __init__(self, engines: Engines, tokenizer: Tokenizer, routing: RoutingShape | None = None, ends: Collection[int] = ()) -> None:
        self._engines, self._tokenizer, self._routing, self._ends = engines, tokenizer, routing, ends
        self.halted = False
        self._num_requests = 0
        self._at_rest = asyncio.Event()

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt, without special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether all are in the tokenizer's vocabulary."""
        return all(self._tokenizer.id_to_token(token) is not None for token in tokens)

    def text(self, tokens: list[int], stop: tuple[str, ...]) -> str:
        """The text of a response, up to the first stop string."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        cuts = [place for place in (text.find(string) for string in stop) if place >= 0]
        return text[: min(cuts)] if cuts else text

    async def sample(self, lease: Lease, rid: str, prompt: list[int], params: SamplingParams, seed: int, sample: Sample | None = None) -> Sample:
        """Generate one response of `lease`, or go on with `sample`, which is added to as tokens come; returns it, unfinished after `halt`.

        Raises `EngineError`; `BadRequest` where trying again cannot help.
        """
        sample = Sample() if sample is None else sample
        routing, begun = self._routing if lease.purpose is Purpose.training else None, not sample.finished
        while not sample.finished and not self.halted:
            rest = SamplingParams(params.max_new_tokens - len(sample.tokens), params.temperature, params.top_p, params.top_k, params.stop)
            async with self._engines.seat(lease, len(prompt), len(sample.tokens)) as engine:
                if engine is None:
                    break
                # Another seed for each segment, far from those of other samples: a seed's random numbers must not be used twice.
                segment_seed = (seed + 1_000_003 * len(sample.tokens)) % 2**31
                generation = await self._segment(engine, rid, prompt + sample.tokens, rest, segment_seed, routing)
            if generation is not None:
                self._append(sample, generation, params, 0 if routing is None else routing.token_bytes)
        if sample.finished and not sample.tokens:
            raise EngineError("engine: a response without a token")
        wanted = 0 if routing is None else routing.token_bytes * (len(prompt) + len(sample.tokens) - 1)
        if begun and sample.finished and len(sample.routing) != wanted:
            raise EngineError(f"engine: {len(sample.routing)} bytes of routing, must be {wanted} (algorithm.router_replay=off does without)")
        if sample.finished:
            self._engines.finished(len(sample.tokens))
        return sample

    async def halt(self, limit_s: float) -> bool:
        """End all generation for good: every running request comes back with its tokens so far, and no other one is sent.

        True once no token is under way any more; false if the engines did not give everything back within `limit_s` seconds.
        """
        self.halted = True
        self._engines.close()
        deadline, quiet = time.monotonic() + limit_s, 0
        while self._num_requests and time.monotonic() < deadline:
            # Again and again: a weight update may have let requests go on.
            before = self._num_requests
            self._at_rest.clear()
            answered = await self._engines.abort(deadline - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(PAUSE_AGAIN_S, max(0.0, deadline - time.monotonic()))):
                    await self._at_rest.wait()
            quiet = quiet + 1 if answered and self._num_requests == before else 0
            if quiet == QUIET:
                return True  # these came after the pause, and wait without a token
        return not self._num_requests

    async def _segment(self, engine: Engine, rid: str, prompt: list[int], params: SamplingParams, seed: int,
                       routing: RoutingShape | None) -> Generation | None:
        """One request; None where its server has ended with it. Raises as `sample`."""
        client, pauses = engine.client, engine.interruption.num_changes
        assert client is not None, "only servers that run are given out"
        self._num_requests += 1
        engine.num_requests += 1
        try:
            generation = await client.generate(rid, prompt, params, seed, routing)
        except BadRequest:
            raise
        except EngineError:
            if await engine.is_lost(client):
                return None
            raise
        finally:
            self._num_requests -= 1
            engine.num_requests -= 1
            if not self._num_requests:
                self._at_rest.set()
        ours = self.halted or engine.interruption.num_changes != pauses or pauses % 2 == 1
        if generation.finish == "abort" and not ours and not await engine.is_lost(client):
            raise EngineError(f"engine: gave up a request: {generation.message}")
        return generation

    def _append(self, sample: Sample, generation: Generation, params: SamplingParams, token_bytes: int) -> None:
        """Add a segment to the sample, and see whether it has ended. Raises as `Sample.add`."""
        seam = len(sample.tokens)
        sample.add(generation)
        end = self._stopped(sample.tokens, seam, params.stop)
        if end is not None:
            sample.shorten(end, token_bytes)
        aborted = generation.finish == "abort"
        if end is None and sample.tokens and sample.tokens[-1] in self._ends:  # SGLang says that it was aborted, or as long as it may be, first
            end = len(sample.tokens)
        sample.cut = end is None and len(sample.tokens) >= params.max_new_tokens and (aborted or generation.finish == "length")
        sample.finished = end is not None or not aborted or sample.cut
        if not sample.finished:
            sample.num_interruptions += 1
            sample.tokens_interrupted += len(generation.tokens)

    def _stopped(self, tokens: list[int], seam: int, stops: tuple[str, ...]) -> int | None:
        """With how many tokens a stop string is whole that the server may not have seen; None: there is none.

        It looks in its own segment alone, which begins after `seam` tokens: of a string that began before, it has got the beginning as prompt. And
        it may be told to abort as the last token comes.
        """
        if not stops:
            return None
        window = stop_window(stops)

        def within(begin: int, end: int) -> bool:
            text = self._tokenizer.decode(tokens[max(0, begin):end], skip_special_tokens=False)
            return any(string in text for string in stops)

        across = seam and within(seam - window, seam + window)
        ends = (*(range(seam + 1, min(len(tokens), seam + window)) if across else ()), len(tokens))
        return next((end for end in ends if within(end - window, end)), None)
