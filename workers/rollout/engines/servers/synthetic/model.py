"""A latency and length model in the place of a neural network: which tokens come, and when.

- Time: a step gives one token to every running request and takes (running requests) / tokens_per_s seconds. So the server
  gives tokens_per_s tokens a second whatever the load, and a request gets an equal share of them. Prefill and weight
  updates take no time of their own.
- Length: lognormal with sigma 0.8 and the given mean. Where it is reached, the model "samples" an end-of-sequence id; a request
  that ignores that, or has max_new_tokens or stop tokens, ends as with any model.
- Tokens: uniform over the vocabulary without the end-of-sequence ids, each with log-prob -log(vocabulary).

Everything depends on the request's seed and the position only (for greedy requests: on the prompt), never on the batch,
the weights or interruptions. An answer that is sent again with its tokens so far as prompt (mode abort) draws a new
length for the rest: lengths are not memoryless, so such answers come out longer than uninterrupted ones.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from workers.model.architecture import Architecture, ModelError
from workers.model.compatibility import check_complete, check_same_model
from workers.rollout.engines.servers.embedded.requests import Copy, Request, Segment

SIGMA = 0.8
SLACK_S = 0.05
"""How far behind its rate the server may be and still catch up."""
Clock = Callable[[], float]
Sleep = Callable[[float], None]


class SyntheticModel:
    """A `Compute` (rollout/engines/servers/embedded/engine_loop.py) that computes nothing. `clock` and `sleep` are there for tests. `elsewhere`:
    looks at a folder of weights on the server's other nodes."""

    def __init__(self, architecture: Architecture, eos_ids: Collection[int], tokens_per_s: float, mean_tokens: float,
                 clock: Clock = time.monotonic, sleep: Sleep = time.sleep, elsewhere: Callable[[Path], None] = lambda _: None) -> None:
        self._architecture = architecture
        self._ends = sorted(eos_ids)
        self._words = [token for token in range(architecture.vocab_size) if token not in eos_ids]
        if not self._words:
            raise ModelError(f"eos_token_id={sorted(eos_ids)}: is the whole vocabulary, so nothing can be generated. Correct config.json")
        self._logprob = -math.log(architecture.vocab_size)
        self._tokens_per_s, self._mean_tokens = tokens_per_s, mean_tokens
        self._clock, self._sleep, self._elsewhere = clock, sleep, elsewhere
        self._due = 0.0
        self._lengths: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def on_thread(self) -> AbstractContextManager[object]:
        """Nothing to set up."""
        return nullcontext()

    def apply(self, copies: Sequence[Copy], capacity: int) -> None:
        """There is no cache."""

    def prefill(self, segments: Sequence[Segment]) -> None:
        """There is nothing to compute."""

    def take_routing(self) -> Sequence[bytes]:
        """There are no experts."""
        return ()

    def load_weights(self, source: Path | Mapping[str, Any]) -> None:
        """Check that a folder holds this model, or these tensors do, as an engine that uses them would. Raises `ModelError`."""
        if isinstance(source, Path):
            check_same_model(source, self._architecture)
            self._elsewhere(source)
        else:
            check_complete(source, self._architecture)

    def use_weights(self, weights: None, keep_cache: bool) -> None:
        """There are none."""

    def decode(self, requests: list[Request]) -> tuple[list[int], list[float]]:
        """One token for each request, when its time has come."""
        self._take(len(requests) / self._tokens_per_s)
        return [self._token(request) for request in requests], [self._logprob] * len(requests)

    def _take(self, seconds: float) -> None:
        # From where the last step should have ended: oversleeping and the time between steps are made up for, an idle time is not.
        now = self._clock()
        self._due = (self._due if now - self._due < SLACK_S else now) + seconds
        if self._due > now:
            self._sleep(self._due - now)

    def _token(self, request: Request) -> int:
        position, end = len(request.output), max(self._length(request), request.min_new_tokens) - 1
        draw = random.Random((_seed(request) << 24) + position)
        if position == end and self._ends:
            return draw.choice(self._ends)
        token = draw.choice(self._words)
        while position < request.min_new_tokens - 1 and token in request.stop_ids and not request.stop_ids.issuperset(self._words):
            token = draw.choice(self._words)
        return token

    def _length(self, request: Request) -> int:
        if request not in self._lengths:
            drawn = random.Random(f"length {_seed(request)}").lognormvariate(math.log(self._mean_tokens) - SIGMA**2 / 2, SIGMA)
            self._lengths[request] = max(1, round(drawn))
        return self._lengths[request]


def _seed(request: Request) -> int:
    """What a request's draws depend on."""
    if request.sampling.temperature > 0:
        return request.sampling.seed
    return hash(tuple(request.prompt)) & (2**63 - 1)  # Python hashes integers the same way in every process
