"""The coordinator's process: drives the state machine in core.py. Started by the trainer on its first node.

    sockets --receive--> core.handle -----> outbox --send--> workers
    clock, stop file, launcher's lock, SIGTERM --> core.tick / core.end
                              core.records --> metrics.jsonl, TensorBoard;   every second --> status.json

Waits: only for messages, with a tick every quarter of a second. At the end it records the outcome, says Finish to
every worker, waits for their Goodbye (at most `FAREWELL_S`), writes the summary, removes the published weights, exits.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from workers.config import ConfigError, load
from workers.coordinator import reporting
from workers.coordinator.core import Coordinator, StepRecord
from workers.data.prompts import open_prompts
from workers.files import write_atomic
from workers.messages.codec import MessageError
from workers.messages.types import Finish, HeartbeatReply, Refused, Role
from workers.metrics.recorder import Recorder
from workers.processes import end_with_parent, enlist
from workers.rundir import RunFolder, RunFolderError
from workers.transport.keys import read_keys
from workers.transport.rendezvous import Address, publish
from workers.transport.server import ServerSockets

TICK_S = 0.25
FAREWELL_S = 15.0
ORPHANED = "the coordinator was told to end by a signal: the trainer that started it has died or was cancelled"


class CoordinatorWorker:
    """One incarnation of the coordinator."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.config = run, load(run.config)
        prompts = open_prompts(self.config.data, self.config.reward, self.config.run.seed, Path(self.config.model.path))
        self.sockets = ServerSockets(self.config.transport, read_keys(run, "server"), read_keys(run, "client").public)
        self.epoch = run.claim_epoch()
        self.started = time.monotonic()
        self.core = Coordinator(self.config, prompts, self.epoch, self.started)
        self.recorder = Recorder(run)
        self.evaluations: list[dict] = []
        self.tokens_generated = 0
        self._next_status = 0.0

    async def serve(self) -> str:
        """Coordinate until the run ends; returns the cause ('' is complete)."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.core.end, ORPHANED)
        publish(self.run, Address(self.epoch, self.sockets.router_endpoint, self.sockets.publisher_endpoint))
        receiving = asyncio.create_task(self.sockets.receive())
        try:
            while self.core.ended is None:
                receiving = await self._receive(receiving)
                self._look_around()
                await self._flush()
            await self._farewell(receiving)
        finally:
            receiving.cancel()
            self.sockets.close()
            self.recorder.close()
        return self.core.ended

    async def _receive(self, receiving: asyncio.Task) -> asyncio.Task:
        """Take what arrives within one tick; returns the task that waits for the next message."""
        await asyncio.wait([receiving], timeout=TICK_S)
        if not receiving.done():
            return receiving
        peer, message = receiving.result()
        if isinstance(message, MessageError):
            self.core.outbox.append((peer, Refused(str(message))))
        else:
            self.core.handle(peer, message, time.monotonic())
        return asyncio.create_task(self.sockets.receive())

    def _look_around(self) -> None:
        now = time.monotonic()
        self.core.tick(now)
        self._record(now)
        if now < self._next_status:
            return
        self._next_status = now + 1.0
        self.core.greet()
        self.tokens_generated = max(self.tokens_generated, reporting.fleet(self.core).tokens_generated)
        status = reporting.status(self.core, now, self.started, time.time(), self.sockets.num_refused, self.sockets.num_malformed)
        write_atomic(self.run.status, json.dumps(status).encode())
        if self.run.stop.exists():
            self.core.end(f"stopped: {self.run.stop.read_text()}")
        elif self.run.launcher_is_gone():
            self.core.end("the launcher has died while attached; start with --detach for a run that outlives it")
        elif (outcome := self.run.ended()) is not None:
            self.core.end(outcome["cause"] or "the run was ended from outside")

    def _record(self, now: float) -> None:
        for record in self.core.records:
            if isinstance(record, StepRecord):
                self.recorder.step(reporting.step_record(self.core, record, now - self.started))
            else:
                self.evaluations.append(reporting.evaluation_record(record, now - self.started))
                self.recorder.evaluation(self.evaluations[-1])
        self.core.records.clear()

    async def _flush(self) -> None:
        outbox, self.core.outbox = self.core.outbox, []
        for peer, message in outbox:
            if peer is None:
                await self.sockets.publish(message)
            elif not await self.sockets.send(peer, message):
                self.core.registry.unreachable(peer, time.monotonic())

    async def _farewell(self, receiving: asyncio.Task) -> None:
        """Record the outcome, send everyone home, and wait for them.

        A failure is recorded first. A complete run is recorded last, because the trainer may still fail to export the model;
        it has all the time it needs for that as long as it is heard from.
        """
        seconds = time.monotonic() - self.started
        if self.core.ended:
            self.run.end(self.core.ended, "coordinator")
        self._record(time.monotonic())
        deadline = time.monotonic() + FAREWELL_S
        told: set[bytes] = set()
        while workers := self.core.registry.workers:
            if time.monotonic() > deadline and (self.core.ended or not self.core.registry.of(Role.trainer)):
                break
            for peer in list(workers):
                # Said once; written again because a send to a dead worker fails, and then nobody waits for it.
                message = HeartbeatReply(self.core.announcement, known=True) if peer in told else Finish(self.core.ended or "")
                told.add(peer)
                if not await self.sockets.send(peer, message):
                    self.core.departed(peer)
            receiving = await self._receive(receiving)
            self.core.tick(time.monotonic())
            self.core.outbox.clear()
            self.tokens_generated = max(self.tokens_generated, reporting.fleet(self.core).tokens_generated)
        receiving.cancel()
        self.run.end(self.core.ended or "", "coordinator")
        summary = reporting.summary(self.core, self.evaluations, seconds, self.tokens_generated)
        write_atomic(self.run.summary, json.dumps(summary, indent=2).encode() + b"\n")
        self.run.remove_weights(self.config.weights.dir)


def main(run_path: Path, parent: int) -> int:
    """Run one coordinator; exit status 0 if the run completed, 1 otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    end_with_parent(parent, signal.SIGTERM)
    run = RunFolder.open(run_path)
    enlist(run)

    async def coordinate() -> str:
        return await CoordinatorWorker(run).serve()

    try:
        return 1 if asyncio.run(coordinate()) else 0
    except (ConfigError, RunFolderError) as error:
        run.end(str(error), "coordinator")
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
