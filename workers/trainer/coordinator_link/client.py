"""The trainer's side of the conversation with the coordinator, in a thread of its own (threaded_peer.py).

    main thread   ask(step)          --BatchRequest-->   coordinator   --Batch--> kept, until next_batch(step) takes it
                  step_finished(...) --StepFinished-->                 --VersionsNeeded--> kept: `needed`; --FallbackWanted--> `fallbacks`
                  save(...)          --CheckpointRequest-->            --CheckpointPart--> returns
    link thread   heartbeats, Drain, Finish, the coordinator's exit

The batch of the next step is asked for while this one is computed. Versions are announced by another thread, perhaps when training has
gone on already: the coordinator is asked for a batch no sooner than it may be (`ask`). `next_batch` waits until the batch, the end of
the run or a reason to leave arrives; `headway status` shows why it waits. With several copies of the model, this link carries the share
of rank 0's. When the run ends early, the main thread gets `GRACE_S` seconds to return; then the process exits under it: there is
nothing to save.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from workers.config import ClusterKind, Config
from workers.messages.broadcasts import Broadcast, BroadcastRefused, LeaveUpdateGroup, OpenUpdateGroup
from workers.messages.from_coordinator import Batch, CheckpointPart, Drain, FallbackWanted, Refused, VersionsNeeded
from workers.messages.from_worker import BatchRequest, CheckpointRequest, Heartbeat, StepFinished, WorkerFailed
from workers.messages.parts import Announcement, Message, Role, Version
from workers.run.folder import RunFolder
from workers.run.processes import OUT_OF_TIME, TOLD_TO_END, first_cause
from workers.slurm.signals import Signals
from workers.tracking.tracker_processes import TrackerProcesses
from workers.trainer.coordinator_link.coordinator_process import CoordinatorProcess
from workers.trainer.coordinator_link.endings import DrainRequested, RunEnded
from workers.trainer.coordinator_link.inbox import Inbox, Received
from workers.trainer.coordinator_link.last_words import LastWords
from workers.trainer.coordinator_link.prefetch import Prefetch
from workers.trainer.coordinator_link.threaded_peer import ThreadedPeer
from workers.transport.peer import Peer

GRACE_S = 3.0
SAVE_S = 120.0


class CoordinatorLink:
    """Starts the coordinator, registers the trainer, and carries batches and versions.

    `crashed` is told, from any thread, why this incarnation fails, or that the run has ended under it: the first word counts. `checkpoint` is the
    folder to go on from. `num_shares`: into how many shares batches are divided. `needed`: published versions older than this are fetched by
    nobody. `fallbacks`: transports by which a worker cannot get weights, and why.
    """

    def __init__(self, run: RunFolder, config: Config, epoch: int, checkpoint: Path | None, signals: Signals,
                 crashed: Callable[[str], None]) -> None:
        self._run, self._config, self._signals = run, config, signals
        self._replaceable = config.cluster.kind is ClusterKind.slurm
        self._last_words = LastWords(run, self._replaceable, crashed)
        self.num_shares = 1
        self.needed: Version | None = None
        self.fallbacks: dict[str, str] = {}
        self.on_broadcast: Callable[[Message], None] = lambda message: None
        self._prefetch, self._telling = Prefetch(), threading.Lock()
        self._batches: Inbox[Received | None] = Inbox()
        self._parts: Inbox[CheckpointPart] = Inbox()
        self._told = threading.Event()
        self._drain_reason = self._parting = ""
        peer = Peer(run, config.batch_transport, Role.trainer, config.transport.heartbeat_timeout_s, heartbeat=Heartbeat, on_message=self._on_message,
                    on_announcement=lambda _: None, min_epoch=epoch)
        self._peer = ThreadedPeer(peer, "coordinator-link", self._over, self._lost)
        self._coordinator = CoordinatorProcess(run, epoch, checkpoint)
        self._trackers = TrackerProcesses(run, config.tracking, epoch)
        signals.on_signal = self._signalled
        if signals.received is not None:
            self._signalled()
        self._coordinator.watch(self._coordinator_ended)
        self._peer.start()

    # -- main thread ---------------------------------------------------------------------------------------------------

    def wait_until_welcome(self) -> None:
        """Wait for the coordinator's welcome. Raises `RunEnded`."""
        while not self._peer.welcomed.wait(0.2):
            self._raise_if_ended()

    @property
    def drain_reason(self) -> str:
        """Why this incarnation is to save its state and leave; '' while it is not."""
        return self._drain_reason

    def wait_for_drain(self, timeout_s: float) -> str:
        """Why this incarnation leaves. Another rank may have been told so before this one: wait `timeout_s` for what rank 0 is told itself."""
        if not self._told.wait(timeout_s):
            self._drain(TOLD_TO_END)
        return self._drain_reason

    def ask(self, step: int, announced: int) -> None:
        """Ask for the batch of `step`, once, as soon as the version `announced` is (prefetch.py)."""
        with self._telling:
            self._ask(self._prefetch.want(step, announced))

    def _ask(self, steps: list[int]) -> None:
        for step in steps:
            self._peer.send(BatchRequest(step, 0, self.num_shares))

    def next_batch(self, step: int, timeout_s: float | None = None) -> Received | None:
        """Rank 0's share of the batch of `step`; waits for it, or returns None after `timeout_s`, or when there is something else to be looked
        at (`wake`). Raises `RunEnded`, `DrainRequested`."""
        self.ask(step, step)
        while True:
            if self._drain_reason:
                raise DrainRequested(self._drain_reason)
            try:
                item = self._batches.take(timeout_s)
            except queue.Empty:
                with self._telling:
                    self._prefetch.again()  # request or answer may have been lost with a connection
                return None
            if item is None or item.batch.step == step:
                return item

    def wake(self) -> None:
        """Have `next_batch` return, now or when it is called next. From any thread."""
        self._batches.put(None)

    def step_finished(self, announcement: Announcement, metrics: dict[str, float]) -> None:
        """Tell that new weights are published. From any thread."""
        with self._telling:
            self._peer.send(StepFinished(announcement, metrics))
            self._ask(self._prefetch.announced(announcement.version.step))
            self._trackers.look()

    def say(self, message: Message) -> None:
        """Tell the coordinator something besides; what it says about broadcasts goes to `on_broadcast`. From any thread."""
        self._peer.send(message)

    def save(self, step: int, folder: Path, final: bool) -> None:
        """Have the coordinator write its part of the checkpoint of `step` into `folder`. Raises `RunEnded`; TimeoutError after `SAVE_S`."""
        self._peer.send(CheckpointRequest(step, str(folder), final))
        while True:
            try:
                part = self._parts.take(SAVE_S)
            except queue.Empty as error:
                raise TimeoutError(f"checkpoint of step {step}: the coordinator has not written its part in {SAVE_S:g} s") from error
            if (part.step, part.final) == (step, final):
                return

    def fail(self, cause: str) -> None:
        """Tell that the trainer cannot go on, and end the process soon. Where it is replaced by another one, the run goes on."""
        self._last_words.record(cause)
        self._peer.send(WorkerFailed(cause))
        self._peer.finish(cause)
        self._end(cause)

    def close(self, parting: str = "") -> int:
        """Leave (`parting`: why, where the run goes on): end the link, wait for the coordinator to exit; returns its exit status."""
        self._parting = parting
        self._peer.leave(parting, finish=bool(parting))
        status = self._coordinator.close()
        self._trackers.close()
        self._last_words.remove_weights_if_over(self._config.weights.dir)
        return status

    def _signalled(self) -> None:
        reason = OUT_OF_TIME if self._signals.received and self._signals.received.name == "SIGUSR2" else TOLD_TO_END
        if self._replaceable:
            self._drain(reason)
        else:
            self.fail(f"the trainer ended: {reason}")

    def _drain(self, reason: str) -> None:
        self._drain_reason = self._drain_reason or reason
        self._told.set()
        self.wake()

    # -- link thread ---------------------------------------------------------------------------------------------------

    def _over(self, cause: str) -> None:
        if self._parting:
            return
        if cause and self._run.known_end() is not None:
            self._last_words.record(cause)  # before Goodbye leaves: the report is written when all workers have gone
        self._end(cause)

    def _lost(self, error: BaseException) -> None:
        if not isinstance(error, ConnectionError | ExceptionGroup):
            traceback.print_exception(error)
        cause = f"the trainer lost the coordinator: {first_cause(error)}"
        self._last_words.record(cause)
        self._end(cause)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Batch):
            self._batches.put(Received(message, time.monotonic()))
        elif isinstance(message, CheckpointPart):
            self._parts.put(message)
        elif isinstance(message, VersionsNeeded):
            self.needed = message.oldest
        elif isinstance(message, FallbackWanted):
            self.fallbacks[message.transport] = message.cause
            self.wake()
        elif isinstance(message, OpenUpdateGroup | LeaveUpdateGroup | Broadcast | BroadcastRefused):
            self.on_broadcast(message)
        elif isinstance(message, Drain):
            self._drain(message.reason)
        elif isinstance(message, Refused):
            self.fail(f"the coordinator refused the trainer's message: {message.reason}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, cause: str) -> None:
        self._batches.end(RunEnded(cause))
        self._parts.end(RunEnded(cause))
        if cause:
            threading.Thread(target=self._exit_if_main_stays, name="exit", daemon=True).start()

    def _exit_if_main_stays(self) -> None:
        if self._peer.left.wait(GRACE_S):
            return
        self._peer.join(GRACE_S)  # lets Goodbye leave
        self._last_words.record("the run has ended, and the trainer with it in the middle of a step")
        self._coordinator.abandon()
        self._last_words.remove_weights_if_over(self._config.weights.dir)
        os._exit(self._last_words.exit_status())

    def _coordinator_ended(self, status: int) -> None:
        if self._peer.left.is_set():
            return
        if (outcome := self._run.known_end()) is not None:
            self._end(outcome["cause"])
            return
        cause = self._coordinator.describe_end(status)
        self._last_words.record(cause)
        self._peer.finish(cause)
        self._end(cause)

    def _raise_if_ended(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._batches.take(0)
