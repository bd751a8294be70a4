"""The trainer's side of the conversation with the coordinator, in a thread of its own, so that heartbeats go on while
the main thread computes.

    main thread   next_batch(step) --BatchRequest-->   coordinator   --Batch--> returns
                  step_finished(...) --StepFinished-->
    link thread   heartbeats, Finish, the coordinator's exit

`next_batch` waits until a batch or the end of the run arrives; `headway status` shows why it waits. When the run ends
early, the main thread gets `GRACE_S` seconds to return; then the process exits under it: there is nothing to save.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from workers.config import Config
from workers.messages.types import Announcement, Batch, BatchRequest, Heartbeat, Message, Refused, Role, StepFinished, WorkerFailed
from workers.processes import OUT_OF_TIME, TOLD_TO_END, describe_exit, first_cause
from workers.rundir import RunFolder
from workers.transport.peer import Peer

GRACE_S = 3.0
JOIN_S = 20.0


class RunEnded(Exception):
    """The run is over; the text is the cause, empty if it is complete."""


class CoordinatorLink:
    """Starts the coordinator, registers the trainer, and carries batches and versions."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._run, self._config = run, config
        self._inbox: queue.SimpleQueue[Batch | RunEnded] = queue.SimpleQueue()  # reentrant: signal handlers put too
        self._left = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._peer: Peer | None = None
        log = (run.jobs / "coordinator.log").open("ab")
        self._coordinator = subprocess.Popen(
            [sys.executable, "-m", "workers.coordinator.worker", str(run.path), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        log.close()
        signal.signal(signal.SIGTERM, lambda *_: self.fail(f"the trainer ended: {TOLD_TO_END}"))
        signal.signal(signal.SIGUSR2, lambda *_: self.fail(f"the trainer ended: {OUT_OF_TIME}"))
        threading.Thread(target=self._watch_coordinator, name="coordinator-watch", daemon=True).start()
        self._thread = threading.Thread(target=self._serve, name="coordinator-link", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The epoch of this incarnation; waits for the coordinator's welcome. Raises `RunEnded`."""
        while not self._ready.wait(0.2):
            self._raise_if_ended()
        assert self._peer is not None
        return self._peer.epoch

    def next_batch(self, step: int) -> Batch:
        """The groups of `step`; waits for them. Raises `RunEnded`."""
        self._send(BatchRequest(step))
        item = self._inbox.get()
        if isinstance(item, RunEnded):
            self._inbox.put(item)
            raise item
        return item

    def step_finished(self, announcement: Announcement, metrics: dict[str, float], tokens_trained: int) -> None:
        """Tell that new weights are published."""
        self._send(StepFinished(announcement, metrics, tokens_trained))

    def fail(self, cause: str) -> None:
        """Tell that the trainer cannot go on, and end the process soon."""
        self._run.end(cause, "trainer")
        self._send(WorkerFailed(cause))
        self._finish_serving(cause)
        self._end(cause)

    def close(self) -> int:
        """Leave: end the link, wait for the coordinator to exit, remove the weights; returns the coordinator's exit status."""
        self._left.set()
        self._thread.join(JOIN_S)
        try:
            status = self._coordinator.wait(JOIN_S)
        except subprocess.TimeoutExpired:
            self._coordinator.kill()
            status = self._coordinator.wait()
        self._run.remove_weights(self._config.weights.dir)
        return status

    # -- link thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            cause = self._loop.run_until_complete(self._converse())
        except BaseException as error:  # noqa: BLE001 -- the main thread must learn of whatever ends this one
            cause = f"the trainer lost the coordinator: {first_cause(error)}"
            self._run.end(cause, "trainer")
            if not isinstance(error, ConnectionError | ExceptionGroup):
                traceback.print_exc()
        self._end(cause)

    async def _converse(self) -> str:
        self._peer = Peer(self._run, self._config.transport, Role.trainer, self._config.transport.heartbeat_timeout_s,
                          heartbeat=Heartbeat, on_message=self._on_message, on_announcement=lambda _: None)
        async with self._peer as peer:
            serving = asyncio.create_task(peer.serve())
            welcoming = asyncio.create_task(peer.welcomed())
            await asyncio.wait([serving, welcoming], return_when=asyncio.FIRST_COMPLETED)
            if welcoming.done() and welcoming.exception() is None:
                self._ready.set()
            try:
                cause = await serving
            finally:
                welcoming.cancel()
            self._end(cause)
            while not cause and not self._left.is_set():  # complete: stay in touch until the main thread has exported and left
                await peer.beat()
                await asyncio.sleep(self._config.transport.heartbeat_s)
            return cause

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Batch):
            self._inbox.put(message)
        elif isinstance(message, Refused):
            self.fail(f"the coordinator refused the trainer's message: {message.reason}")

    def _send(self, message: Message) -> None:
        if self._peer is not None and self._ready.is_set() and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._peer.send(message), self._loop)

    def _finish_serving(self, cause: str) -> None:
        if self._peer is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._peer.finish, cause)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, cause: str) -> None:
        self._inbox.put(RunEnded(cause))
        if cause:
            threading.Thread(target=self._exit_if_main_stays, name="exit", daemon=True).start()

    def _exit_if_main_stays(self) -> None:
        if self._left.wait(GRACE_S):
            return
        self._thread.join(GRACE_S)  # lets Goodbye leave
        self._coordinator.terminate()
        self._run.remove_weights(self._config.weights.dir)
        os._exit(1)

    def _watch_coordinator(self) -> None:
        status = self._coordinator.wait()
        if self._left.is_set():
            return
        if (outcome := self._run.ended()) is not None:
            self._end(outcome["cause"])
            return
        log = Path(self._run.jobs / "coordinator.log").read_text(errors="replace").splitlines()[-15:]
        cause = "\n  ".join([f"the coordinator (process {self._coordinator.pid}) {describe_exit(status)}", *log])
        self._run.end(cause, "trainer")
        self._finish_serving(cause)
        self._end(cause)

    def _raise_if_ended(self) -> None:
        try:
            item = self._inbox.get_nowait()
        except queue.Empty:
            return
        self._inbox.put(item)
        if isinstance(item, RunEnded):
            raise item
