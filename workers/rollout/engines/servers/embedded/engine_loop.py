"""The engine loop: one thread that owns scheduler and model, and nothing else touches them.

    event loop thread                              engine thread
    -----------------                              -------------
    submit(request) ---- append, notify ---->  inbox (deque + Condition)
    call(function)  ---- append, notify ---->    |
         |                                       v
         |                              +-> run every command in the inbox, in order
         |                              |   (submit, pause, update weights, ...: always between two steps)
    Future <------- set_result -------- |        |
                                        |   scheduler.plan -> copies, prefill, decode, sample -> scheduler.commit
    on_finish(request) <--------------- |        |
                                        +--------+     no step possible: wait on the Condition until notified

The event loop never waits for the engine but through a Future. The engine waits for nobody but the Condition. So when
`call(pause)` has answered, no forward runs until a later command resumes it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from workers.model.architecture import ModelError
from workers.rollout.engines.servers.embedded.api import RequestError
from workers.rollout.engines.servers.embedded.requests import Copy, Finish, Request, Segment
from workers.rollout.engines.servers.embedded.scheduler import Scheduler
from workers.rollout.engines.servers.embedded.text import Text

Result = TypeVar("Result")


class Compute(Protocol):
    """Computes the steps that the scheduler plans: model_runner.py, or the synthetic engine's model. All calls come from the engine's thread, inside
    `on_thread()`."""

    def on_thread(self) -> AbstractContextManager[object]:
        """Entered once, on the engine's thread, around everything else."""

    def apply(self, copies: Sequence[Copy], capacity: int) -> None:
        """Carry out `copies` in order, then make the cache hold `capacity` positions a row."""

    def prefill(self, segments: Sequence[Segment]) -> None:
        """Compute what later steps need of `segments`."""

    def decode(self, requests: list[Request]) -> tuple[list[int], list[float]]:
        """The next token of each request and its log-prob; `requests[i]` owns row i."""

    def take_routing(self) -> Sequence[bytes]:
        """The experts chosen for each token that was fed since the last call, in order: int32 [layers, experts per token]; nothing where they are
        not recorded."""

    def load_weights(self, source: Path | Mapping[str, Any]) -> Any:
        """A folder's weights, or these tensors, as `use_weights` takes them, beside those in use; the only call that any thread may make, at any
        time. Raises `ModelError` if they are not all of this model's."""

    def use_weights(self, weights: Any, keep_cache: bool) -> None:
        """Compute with `weights` from now on; those before are freed."""


class Engine:
    """Drives `compute` by `scheduler`. `on_finish` is called on the engine's thread, once for each request."""

    def __init__(self, compute: Compute, scheduler: Scheduler, text: Text | None, on_finish: Callable[[Request], None]) -> None:
        self._compute = compute
        self._scheduler = scheduler
        self._text = text
        self._on_finish = on_finish
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()

    def submit(self, request: Request) -> None:
        """Queue `request`; from any thread."""
        self._post(lambda: self._scheduler.submit(request))

    def cancel(self, request: Request) -> None:
        """End `request` if it still runs, as its client has gone; from any thread."""
        self._post(lambda: self._scheduler.cancel(request, "the client disconnected"))

    def call(self, function: Callable[[Scheduler], Result]) -> Future[Result]:
        """Run `function` on the engine's thread between two steps; from any thread.

        `RequestError` and `ModelError` come back through the future. Anything else ends the engine, as it is a bug.
        """
        future: Future[Result] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._scheduler))
            except (RequestError, ModelError) as error:
                future.set_exception(error)

        self._post(command)
        return future

    def update_weights(self, source: Path | Mapping[str, Any], version: str | None, flush: bool) -> Future[bool]:
        """Load a folder's tensors, or these, while nothing is generated; the future tells whether the cache could be flushed, if it was to be.

        It cannot while requests are paused in place: they keep their KV, but the weights are new all the same. No prefix that was
        computed before is reused in any case. A failing update changes nothing (`ModelError`).
        """
        def update(scheduler: Scheduler) -> bool:
            keep = not flush or bool(scheduler.running)
            self._use(scheduler, self._compute.load_weights(source), version, keep)
            return not (flush and keep)

        return self.call(update)

    def load_weights(self, folder: Path) -> Any:
        """What `exchange_weights` takes, loaded on the caller's thread while the loop goes on. Raises `ModelError`."""
        return self._compute.load_weights(folder)

    def exchange_weights(self, weights: Any, version: str | None, mode: str) -> Future[None]:
        """Go on with `weights` from the next step on. Running requests are interrupted by `mode`, retract or in_place, as by a pause, but nothing
        stands still."""
        def exchange(scheduler: Scheduler) -> None:
            scheduler.interrupt(mode)
            self._use(scheduler, weights, version, keep_cache=bool(scheduler.running))

        return self.call(exchange)

    def _use(self, scheduler: Scheduler, weights: Any, version: str | None, keep_cache: bool) -> None:
        self._compute.use_weights(weights, keep_cache)
        scheduler.weights_changed(scheduler.version if version is None else version, keep_cache)

    def run(self) -> None:
        """The loop; runs for as long as the process. An exception that leaves it is a bug."""
        with self._compute.on_thread():
            while True:
                self._run_commands()
                worked = self._step()
                for request in self._scheduler.take_finished():
                    self._on_finish(request)
                if not worked:
                    with self._wake:
                        self._wake.wait_for(lambda: bool(self._inbox))

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _run_commands(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _step(self) -> bool:
        """Plan, compute and commit one step; False if there is nothing to do."""
        step = self._scheduler.plan()
        if step is None:
            return False
        self._compute.apply(step.copies, step.capacity)
        if step.prefill:
            self._compute.prefill(step.prefill)
        tokens, logprobs = self._compute.decode(step.decode) if step.decode else ([], [])
        self._scheduler.commit(step, tokens, logprobs, self._outcomes(step.decode, tokens), self._compute.take_routing())
        return True

    def _outcomes(self, requests: list[Request], tokens: list[int]) -> dict[int, Finish]:
        """What the scheduler cannot see: stop strings."""
        outcomes: dict[int, Finish] = {}
        for index, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if request.stop_texts and self._text is not None:
                found = self._text.find_stop([*request.output, token], request.stop_texts)
                if found is not None:
                    outcomes[index] = Finish("stop", found)
        return outcomes


def counters(scheduler: Scheduler) -> dict[str, Any]:
    """What GET /server_info tells."""
    return {
        "max_total_num_tokens": len(scheduler.table.rows) * scheduler.context_length,
        "num_running": len(scheduler.running),
        "num_queued": len(scheduler.queue),
        "generated_tokens": scheduler.generated_tokens,
        "prefill_tokens": scheduler.prefill_tokens,
        "cached_tokens": scheduler.cached_tokens,
        "num_retractions": scheduler.num_retractions,
        "weight_version": scheduler.version,
        "paused": scheduler.paused,
    }
