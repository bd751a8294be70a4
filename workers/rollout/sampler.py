"""One sample from the engine, across interruptions: what was generated is kept, and generation goes on from there.

With `retract` the server does this itself and says by spans which version sampled which token. With `abort` the request
comes back early, and is sent again with the tokens so far as part of its prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from workers.messages.types import Version
from workers.rollout.engine_client import EngineClient, EngineError, Generation, SamplingParams


@dataclass
class Sample:
    """A finished sample: tokens, behaviour log-probs, and the version that sampled each token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    num_interruptions: int = 0
    tokens_interrupted: int = 0

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

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt, without special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, tokens: list[int], stop: tuple[str, ...]) -> str:
        """The text of a response, up to the first stop string."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        cuts = [place for place in (text.find(string) for string in stop) if place >= 0]
        return text[: min(cuts)] if cuts else text

    async def sample(self, rid: str, prompt: list[int], params: SamplingParams, seed: int) -> Sample:
        """Generate one response. Raises `EngineError`; `BadRequest` where trying again cannot help."""
        sample = Sample()
        while True:
            rest = SamplingParams(params.max_new_tokens - len(sample.tokens), params.temperature, params.top_p, params.top_k, params.stop)
            pauses = self._num_pauses()
            # Another seed for each segment, far from those of other samples: a seed's random numbers must not be used twice.
            generation = await self._engine.generate(rid, prompt + sample.tokens, rest, (seed + 1_000_003 * len(sample.tokens)) % 2**31)
            if generation.finish == "abort" and self._num_pauses() == pauses and pauses % 2 == 0:
                raise EngineError(f"engine: gave up a request: {generation.message}")
            sample.add(generation)
            if generation.finish != "abort" or len(sample.tokens) >= params.max_new_tokens or self._stopped(sample, params):
                break
            sample.num_interruptions += 1
            sample.tokens_interrupted += len(generation.tokens)
        if not sample.tokens:
            raise EngineError("engine: a response without a token")
        return sample

    def _stopped(self, sample: Sample, params: SamplingParams) -> bool:
        text = self._tokenizer.decode(sample.tokens, skip_special_tokens=True)
        return any(string in text for string in params.stop)
