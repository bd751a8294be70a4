"""The coordinator's process: drives the state machine in core.py. Started by the trainer on its first node.

    sockets, clock, stop file, launcher's lock, SIGTERM, newest epoch --Input--> machine.py: the state machine ----> messages --send--> workers
                              each of them is noted by flight_recorder.py, for headway replay
                              records --> run_records.py: metrics.jsonl, ..., alarms;   every second or so --> status.json
                              checkpoint --> coordinator.msgpack, beside the trainer's part

Waits: only for messages, with a tick every quarter of a second. How it ends is in shutdown.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from workers.config import ClusterKind, ConfigError, load
from workers.coordinator.core import LOOK_S, TICK_S, Coordinator
from workers.coordinator.monitoring import reporting
from workers.coordinator.process.flight_recorder import FlightRecorder
from workers.coordinator.process.machine import Machine
from workers.coordinator.process.outside import Outside
from workers.coordinator.process.recovered_partials import RecoveredPartials
from workers.coordinator.process.run_records import RunRecords
from workers.coordinator.process.shutdown import Shutdown
from workers.coordinator.process.slurm_watch import SlurmWatch
from workers.coordinator.process.storage import Storage
from workers.coordinator.recording.inputs import Arrived, Ended, Greeted, Left, Malformed, Ticked, Unreachable
from workers.coordinator.recording.journal import Witness
from workers.coordinator.snapshot import SnapshotError, decode
from workers.data.examples import open_examples
from workers.data.prompts import open_prompts
from workers.messages.codec import MessageError
from workers.messages.from_coordinator import CheckpointPart
from workers.messages.from_worker import CheckpointRequest
from workers.messages.parts import Version
from workers.run import checkpoints
from workers.run.checkpoints import COORDINATOR
from workers.run.files import write_atomic
from workers.run.folder import RunFolder, RunFolderError
from workers.run.processes import PARENT_DIED, end_with_parent, enlist, keep_logging
from workers.run.retention import scores
from workers.transport.addresses import address_of
from workers.transport.keys import read_keys
from workers.transport.rendezvous import Address, publish
from workers.transport.server import ServerSockets

ORPHANED = "the coordinator was told to end by a signal: the trainer that started it has died or was cancelled"
STATUS_SHARE = 0.05
"""Of the process's time that writing status.json may take: with a large fleet it is written less often than every second."""


class CoordinatorWorker:
    """One incarnation of the coordinator; `checkpoint`: the file with its part of the checkpoint to go on from, or None."""

    def __init__(self, run: RunFolder, epoch: int, checkpoint: Path | None) -> None:
        self.run, self.config, self.epoch = run, load(run.config), epoch
        prompts = open_prompts(self.config.data, self.config.reward, self.config.run.seed, Path(self.config.model.path))
        transport = dataclasses.replace(self.config.transport, interface=address_of(self.config.transport.interface))
        self.sockets = ServerSockets(transport, read_keys(run, "server"), read_keys(run, "client").public)
        snapshot = decode(checkpoint.read_bytes()) if checkpoint else None
        examples = Witness(open_examples(self.config), self.config.engine.context_length) if self.config.supervised else None
        self.core = Coordinator(self.config, prompts, epoch, time.monotonic(), snapshot, examples)
        self._started = time.monotonic() - (snapshot.seconds if snapshot else 0.0)
        self.recorder = FlightRecorder(run, self.core, lambda: (time.monotonic(), time.time(), self.seconds), examples)
        self.machine = Machine(self.core, self.recorder.note)
        self.storage = Storage(run, self.machine, self.config.run.outage_minutes * 60)
        self.partials = RecoveredPartials(run, self.machine, self.config.transport.max_message_mb)
        self.records = RunRecords(run, self.machine, snapshot)
        self._fleet_watch = SlurmWatch(run, self.machine)
        self._next_status = self._next_look = self._next_tick = 0.0
        self._outside = Outside(run, self.config, epoch, self.machine)
        self._beside: list[asyncio.Task[None]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the run began, without the time between incarnations."""
        return time.monotonic() - self._started

    async def serve(self) -> int:
        """Coordinate until the run ends or this incarnation goes away; returns the exit status."""
        core = self.core
        asyncio.get_running_loop().add_signal_handler(PARENT_DIED, self._told_to_end)
        self.recorder.begin(time.monotonic())
        self.partials.absorb()
        publish(self.run, Address(self.epoch, self.sockets.router_endpoint, self.sockets.publisher_endpoint))
        receiving = asyncio.create_task(self.sockets.receive())
        watching = asyncio.create_task(self._fleet_watch.watch())
        self._beside.append(watching)
        try:
            while core.ended is None and core.left is None:
                receiving = await self.receive(receiving)
                self._look_around()
                self._check_what_runs_beside()
                await self.flush()
            self.record()
            self.write_status()
            return await Shutdown(self).go(receiving)
        finally:
            receiving.cancel()
            watching.cancel()
            self.sockets.close(linger_ms=1000)
            self.on_disk(self.records.close)
            await self.recorder.flush()

    def _told_to_end(self) -> None:
        self.machine.do((Left if self.core.replaceable else Ended)(time.monotonic(), ORPHANED))

    async def receive(self, receiving: asyncio.Task) -> asyncio.Task:
        """Take what arrives within one tick, many messages at once where many wait; returns the task that waits for the next one."""
        self.recorder.look(time.monotonic())
        await asyncio.wait([receiving], timeout=TICK_S)
        if not receiving.done():
            return receiving
        began, core = time.monotonic(), self.core
        before = (core.goes_on, core.ended, core.left)
        for peer, message in itertools.chain([receiving.result()], self.sockets.waiting()):
            now = time.monotonic()
            if self.records.rollouts.told(peer, message):
                continue
            self.machine.do(Malformed(now, peer, str(message)) if isinstance(message, MessageError) else Arrived(now, peer, message))
            self.record()  # of the state after each step, not after the last one
            self._save()
            if now - began > TICK_S / 2 or (core.goes_on, core.ended, core.left) != before:
                break
        return asyncio.create_task(self.sockets.receive())

    def _save(self) -> None:
        """Begin to write this process's part of a checkpoint, if the trainer has asked for it. Storage may be slow: leases go on meanwhile."""
        if self.machine.checkpoint is None or self.records.num_held:
            return
        (peer, request), self.machine.checkpoint = self.machine.checkpoint, None
        self.record()
        try:
            positions = self.records.positions()
        except OSError as error:
            print(f"the checkpoint of step {request.step} waits: {error}", flush=True)
            self.machine.checkpoint = (peer, request)
            return
        content = self.core.snapshot(self.seconds, positions).buffers()
        self.partials.in_checkpoint(Version(self.epoch, request.step))
        self._beside.append(asyncio.create_task(self._write_part(peer, request, content)))

    async def _write_part(self, peer: bytes, request: CheckpointRequest, content: list[bytes | memoryview]) -> None:
        await self.recorder.flush()  # an audit of the next incarnation is to know what this part holds
        try:
            await asyncio.to_thread(write_atomic, Path(request.folder) / COORDINATOR, content)
        except OSError as error:  # the trainer waits in vain, and says so
            print(f"the coordinator's part of the checkpoint of step {request.step} cannot be written: {error}", flush=True)
            return
        await self.sockets.send(peer, CheckpointPart(request.step, request.final))

    def _check_what_runs_beside(self) -> None:
        """Raise what ended a task that nobody waits for."""
        for task in [task for task in self._beside if task.done()]:
            self._beside.remove(task)
            task.result()

    def _look_around(self) -> None:
        now = time.monotonic()
        self.record()
        self._save()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S / 2
        self.machine.do(Ticked(now))
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        self.on_disk(self.partials.absorb)
        self.machine.do(Greeted(now))
        if now >= self._next_status:
            self.write_status()
            self._next_status = now + (time.monotonic() - now) / STATUS_SHARE
        self.on_disk(self._outside.look)

    def on_disk(self, write: Callable[[], object]) -> None:
        """Read or write something of the run; left for a later call while its folder is full or away (storage.py)."""
        self.storage.attempt(write)

    def write_status(self) -> None:
        """Write status.json."""
        if self.storage.attempt(self._write_status) and not self.records.num_held:  # what is held may be larger
            self.storage.worked()

    def _write_status(self) -> None:
        now = time.monotonic()
        status = reporting.status(self.core, now, self.seconds, time.time(), self.sockets.door.num_refused, self.sockets.num_malformed)
        status["not_recorded"] = self.recorder.trouble
        status["alarms"] = self.records.health.active
        status["checkpoint"] = checkpoints.describe(self.run, scores(self.records.evaluations), time.time())
        write_atomic(self.run.status, msgspec.json.encode(status))

    def record(self) -> None:
        """Write finished steps and evaluations, unless another incarnation has taken over."""
        self.on_disk(lambda: self.records.write(self.seconds, self.sockets.door.num_refused + self.sockets.num_malformed))

    async def flush(self) -> None:
        """Send what the state machine has to say."""
        for notice in self.machine.take_notices():
            print(notice, flush=True)
        for peer, message in self.machine.take_sending():
            if peer is None:
                await self.sockets.publish(message)
            elif not await self.sockets.send(peer, message):
                self.machine.do(Unreachable(time.monotonic(), peer))


def main(run_path: Path, parent: int, epoch: int, checkpoint: Path | None) -> int:
    """Run one coordinator; exit status 0 if it ended in order, 1 otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # SLURM tells every process of a job; the trainer decides
    end_with_parent(parent, PARENT_DIED)
    run = RunFolder.open(run_path)
    enlist(run)

    async def coordinate() -> int:
        return await CoordinatorWorker(run, epoch, checkpoint).serve()

    try:
        return asyncio.run(coordinate())
    except (ConfigError, RunFolderError, SnapshotError) as error:
        if run.submission().get("cluster") == ClusterKind.local.value:
            run.end(str(error), "coordinator")
        print(error, file=sys.stderr)  # on SLURM it may be this node's fault: the trainer counts it as a crash, and another one follows
        return 1


if __name__ == "__main__":
    os.umask(0o077)
    keep_logging()
    main_arguments = sys.argv[1:]
    sys.exit(main(Path(main_arguments[0]), int(main_arguments[1]), int(main_arguments[2]), Path(main_arguments[3]) if main_arguments[3:] else None))
