"""What the engine does next: a pure state machine over requests, without torch, sockets, threads or a clock.

    submit -> queue --admit--> prefilling --promote--> decoding --finish--> taken by take_finished()
                ^                  |                      |
                +----- retract ----+----------------------+        (abort ends a request from any state)

Each step is `plan()`, one forward by the caller, `commit()`. A step prefills at most `prefill_chunk` tokens (so that
decoding never stalls for long) and decodes one token for every row in the decoded range.

Prefill computes KV only, for every token of a request but its last; the last token is always fed by a decode step. So a
fresh prompt, a prompt whose prefix is cached and a retracted request that resumes differ in nothing but lengths.

Invariants: a request is in the queue, or owns exactly one row, or has ended, never two of them; it ends exactly once;
`spans` tile [0, len(output)) and name the weights that produced each token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from workers.rollout.engines.servers.embedded.kv_cache import RowTable, common_prefix
from workers.rollout.engines.servers.embedded.requests import Finish, Request, Segment, Span, Step

BUCKET = 32


class Scheduler:
    """Continuous batching over `num_slots` rows of at most `context_length` tokens. Not thread-safe: one thread owns it."""

    def __init__(self, num_slots: int, context_length: int, prefill_chunk: int, version: str) -> None:
        self.context_length = context_length
        self.prefill_chunk = prefill_chunk
        self.version = version
        self.paused = False
        self.capacity = 0
        self.table = RowTable(num_slots)
        self.queue: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        self.generated_tokens = self.prefill_tokens = self.cached_tokens = self.num_retractions = 0
        self._finished: list[Request] = []

    def submit(self, request: Request) -> None:
        """Queue a request. Its prompt and budget must fit the context; the server checks what clients send."""
        assert request.prompt and request.max_new_tokens >= 1
        assert len(request.prompt) + request.max_new_tokens <= self.context_length
        self.queue.append(request)

    def plan(self) -> Step | None:
        """The next step, or None while paused or without work. Each step must be committed before the next plan."""
        if self.paused:
            return None
        self._admit()
        for request in self.running:
            row = request.row
            assert row is not None
            if row >= self.table.num_decoding and len(self.table.rows[row].tokens) == request.num_fed:
                self.table.promote(row)
        prefill = self._segments()
        decode = [row.owner for row in self.table.rows[: self.table.num_decoding] if row.owner is not None]
        if not prefill and not decode:
            return None
        self._set_capacity(max([segment.start + len(segment.tokens) for segment in prefill]
                               + [request.num_fed + 1 for request in decode]))
        copies, self.table.copies = self.table.copies, []
        return Step(copies, self.capacity, prefill, decode)

    def commit(self, step: Step, tokens: Sequence[int], logprobs: Sequence[float], outcomes: dict[int, Finish],
               routing: Sequence[bytes] = ()) -> None:
        """Record a step's result: token and log-prob of each of `step.decode`.

        `outcomes` maps an index to what the caller found: a stop string in the text. `routing`: of every token that was fed, those of `step.prefill`
        first, where the model records it.
        """
        chosen = iter(routing)
        for segment in step.prefill:
            self.table.rows[segment.row].tokens.extend(segment.tokens)
            self.table.rows[segment.row].routing.extend(islice(chosen, len(segment.tokens)))
            self.prefill_tokens += len(segment.tokens)
        for index, (request, token, logprob) in enumerate(zip(step.decode, tokens, logprobs, strict=True)):
            self.table.rows[index].tokens.append(request.last_token)
            self.table.rows[index].routing.extend(islice(chosen, 1))
            request.output.append(token)
            request.logprobs.append(logprob)
            if request.spans and request.spans[-1].version == self.version:
                request.spans[-1].end += 1
            else:
                request.spans.append(Span(self.version, len(request.output) - 1, len(request.output)))
        self.generated_tokens += len(step.decode)
        for index, request in enumerate(step.decode):
            finish = self._finish_of(request, outcomes.get(index))
            if finish is not None:
                self._end(request, finish)

    def pause(self, mode: str) -> int:
        """Stop planning. 'retract' puts running requests back in the queue, 'abort' ends all requests, 'in_place' keeps
        them where they are. Returns the number of requests that were running."""
        assert not (mode == "abort" and self.paused and self.running), "requests that are paused in place cannot be aborted by a pause"
        running = len(self.running)
        self.paused = True
        self.interrupt(mode)
        return running

    def interrupt(self, mode: str) -> None:
        """What a pause does to requests, without one."""
        if mode == "retract":
            self._retract()
        elif mode == "abort":
            self.abort("", "generation was paused with mode=abort")
        else:
            assert mode == "in_place"

    def resume(self) -> None:
        """Plan again."""
        self.paused = False

    def abort(self, prefix: str, message: str) -> int:
        """End every request whose rid starts with `prefix`; returns how many. Its tokens so far are kept if it runs, and lost, as
        SGLang's are, if it waits in the queue."""
        matching = [request for request in (*self.running, *self.queue) if request.rid.startswith(prefix)]
        for request in matching:
            if request not in self.running:
                request.output, request.logprobs, request.spans = [], [], []
            self._end(request, Finish("abort", message))
        return len(matching)

    def cancel(self, request: Request, message: str) -> None:
        """End this one request, if it has not ended."""
        if request.finish is None:
            self._end(request, Finish("abort", message))

    def weights_changed(self, version: str, keep_cache: bool) -> None:
        """New weights are in place: no prefix computed before is ever reused. Running requests keep their own old KV, which takes
        `keep_cache`; without it the caller may drop the cache."""
        assert keep_cache or not self.running
        self.table.invalidate()
        if not keep_cache:
            self.table.copies.clear()  # every row is empty
            self.capacity = 0
        self.version = version

    def flush(self) -> bool:
        """Forget every reusable prefix, unless requests run; returns whether."""
        if not self.running:
            self.table.invalidate()
        return not self.running

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call; each is handed out once."""
        finished, self._finished = self._finished, []
        return finished

    def _admit(self) -> None:
        """Give idle rows to queued requests, in order. A request whose prefix is being prefilled by another one waits."""
        places, waiting = self.table.num_idle(), []
        while self.queue and places:
            places -= 1
            request = self.queue.popleft()
            if self._should_wait(request):
                waiting.append(request)
                continue
            reused = self.table.acquire(request, request.fed())
            self.running[request] = None
            if request.cached_tokens is None:
                request.cached_tokens = reused
                self.cached_tokens += reused
        self.queue.extendleft(reversed(waiting))

    def _should_wait(self, request: Request) -> bool:
        """Whether most of its prompt that needs computing will soon stand in a row that is being prefilled. Its tokens so far are its own: of the
        samples of a prompt that new weights have retracted, one computes it again, and the others copy."""
        fed = request.fed()
        reusable = coming = self.table.best_match(fed)[1]
        for row in self.table.rows[self.table.num_decoding:]:
            if row.owner is not None and row.shareable and len(row.tokens) < row.owner.num_fed:
                coming = max(coming, common_prefix(row.owner.fed(), fed, coming))
        return coming > reusable and 2 * (coming - reusable) >= len(request.prompt) - 1 - reusable

    def _segments(self) -> list[Segment]:
        """Prefill work of one step, oldest request first, at most `prefill_chunk` tokens."""
        budget, segments = self.prefill_chunk, []
        for request in self.running:
            row = request.row
            assert row is not None
            start = len(self.table.rows[row].tokens)
            if start < request.num_fed and budget:
                tokens = request.fed()[start : start + budget]
                budget -= len(tokens)
                segments.append(Segment(row, start, tokens))
        return segments

    def _set_capacity(self, needed: int) -> None:
        """Grow the cache in buckets; shrink it when a quarter or more is unused, as attention reads all of it."""
        for row in self.table.rows:
            if row.owner is not None:
                needed = max(needed, len(row.tokens))
        rounded = -(-needed // BUCKET) * BUCKET
        if rounded > self.capacity or 4 * rounded <= 3 * self.capacity:
            self.capacity = rounded
            self.table.truncate_idle(rounded)

    def _finish_of(self, request: Request, outcome: Finish | None) -> Finish | None:
        token, length = request.output[-1], len(request.output)
        if token in request.stop_ids and length >= request.min_new_tokens:
            return Finish("stop", token)
        if outcome is not None and length >= request.min_new_tokens:
            return outcome
        if length >= request.max_new_tokens:
            return Finish("length", request.max_new_tokens)
        return None

    def _end(self, request: Request, finish: Finish) -> None:
        assert request.finish is None, "a request ends once"
        if request in self.running:
            del self.running[request]
            assert request.row is not None
            request.routing = self.table.rows[request.row].routing[: request.num_fed]
            self.table.release(request.row)
        else:
            self.queue.remove(request)
        request.finish = finish
        self._finished.append(request)

    def _retract(self) -> None:
        """Put running requests in front of the queue, in their order, with the tokens they have."""
        requests, self.running = list(self.running), {}
        for request in requests:
            assert request.row is not None
            self.table.release(request.row)
            request.num_retractions += 1
        self.num_retractions += len(requests)
        self.queue.extendleft(reversed(requests))
