"""How things break, and how they are mended: each fault does its harm, and returns what it has hit and what undoes it.

    processes  kill, stop                           jobs     preempt, requeue (twice), hold, suspend
    nodes      power_cut (also at a checkpoint), network_cut, clock_off
    services   controller_away, database_away       storage  folder_full, folder_stalled
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

from tests.chaos.schedule import Event
from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import Element, SlurmRun, occupy
from workers.run.files import write_atomic

T = TypeVar("T")
KINDS = {"engine": "workers.rollout.engines.servers", "coordinator": "workers.coordinator.process.main",
         "reward": "workers.reward.pool.worker_process", "watch": "watch"}
CHECKPOINT_S = 15.0


class LeftOut(Exception):
    """There is nothing now that this fault could hit. Its text says why."""


class Harm(NamedTuple):
    """`what` was hit; `mend` undoes it."""

    what: str
    mend: Callable[[], object] = lambda: None


class Faults:
    """All that can be done to one run. `disk`: the file system that its folder lies on; `clocks`: where nodes read how far their clock is off."""

    def __init__(self, cluster: LocalCluster, run: SlurmRun, disk: Path, clocks: Path | None) -> None:
        self.cluster, self.run, self.disk, self.clocks = cluster, run, disk, clocks
        self._down: set[str] = set()  # nodes without power, or without a network
        self._away: set[str] = set()  # services and storage that are not there

    def begin(self, event: Event) -> Harm:
        """Let it happen. Raises `LeftOut`."""
        try:
            return getattr(self, f"_{event.fault}")(event)
        except (RuntimeError, subprocess.TimeoutExpired, psutil.NoSuchProcess) as error:  # what it was to be done with is away itself
            raise LeftOut(str(error).strip().splitlines()[-1][:150] if str(error) else type(error).__name__) from error

    def _undo(self, *command: str) -> None:
        """Let scontrol undo something that may be undone already. Raises RuntimeError where SLURM cannot be asked: to be tried again."""
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                self.cluster.run("scontrol", *command)
                return
            self.cluster.run("squeue", "--noheader")

    # -- processes -------------------------------------------------------------------------------------------------------

    def _process(self, event: Event) -> tuple[str, psutil.Process]:
        found: dict[str, list[psutil.Process]] = {}
        for process in self.run.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                job = process.environ().get("SLURM_JOB_NAME", "")
                kind = next((name for name, mark in KINDS.items() if any(mark == word or f"{mark}." in word for word in words)), "")
                if not kind and "submitit.core._submit" in words and process.status() != psutil.STATUS_STOPPED:
                    kind = "trainer" if "-train-" in job else "rollout worker"
                if kind:
                    found.setdefault(kind, []).append(process)
        if not found:
            raise LeftOut("no process of the run lives")
        share = event.choice * len(found)
        kind = sorted(found)[int(share)]
        return kind, _chosen(found[kind], share % 1)

    def _kill(self, event: Event) -> Harm:
        kind, process = self._process(event)
        process.send_signal(signal.SIGKILL)
        return Harm(f"{kind} {process.pid}")

    def _stop(self, event: Event) -> Harm:
        kind, process = self._process(event)
        process.suspend()

        def mend() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

        return Harm(f"{kind} {process.pid}", mend)

    # -- jobs ------------------------------------------------------------------------------------------------------------

    def _element(self, event: Event) -> Element:
        running = [element for role in ("inference", "train") for element in self.run.elements(role) if element.node not in self._down]
        by_role = [part for role in ("-inference-", "-train-") if (part := [element for element in running if role in element.name])]
        if not by_role:
            raise LeftOut("no element runs")
        share = event.choice * len(by_role)
        return _chosen(by_role[int(share)], share % 1)

    def _preempt(self, event: Event) -> Harm:
        element = self._element(event)
        other = occupy(self.cluster, "train" if element.node.startswith("trn") else "inference", element.node)
        return Harm(f"{element.name} on {element.node}", lambda: self.cluster.run("scancel", str(other)))

    def _requeue(self, event: Event) -> Harm:
        element = self._element(event)
        self.cluster.run("scontrol", "requeue", element.job_id)
        return Harm(f"{element.name} {element.job}")

    def _requeue_twice(self, event: Event) -> Harm:
        harm = self._requeue(event)
        number = harm.what.split()[-1]

        def again() -> None:
            with contextlib.suppress(RuntimeError):  # it has not begun again
                self.cluster.run("scontrol", "requeue", number)

        return Harm(harm.what, again)

    def _hold(self, event: Event) -> Harm:
        element = self._element(event)
        self.cluster.run("scontrol", "requeuehold", element.job_id)
        return Harm(f"{element.name} {element.job}", lambda: self._undo("release", element.job))

    def _suspend(self, event: Event) -> Harm:
        element = self._element(event)
        self.cluster.run("scontrol", "suspend", element.job_id)
        return Harm(f"{element.name} {element.job}", lambda: self._undo("resume", element.job_id))

    # -- nodes -----------------------------------------------------------------------------------------------------------

    def _node(self, event: Event) -> str:
        return _chosen(sorted(self.cluster.nodes().keys() - self._down), event.choice)

    def _power_cut(self, event: Event) -> Harm:
        return self._power_off(self._node(event))

    def _power_cut_at_checkpoint(self, event: Event) -> Harm:
        training = [element.node for element in self.run.elements("train") if element.node not in self._down]
        if not training:
            raise LeftOut("no training element runs")
        deadline = time.monotonic() + CHECKPOINT_S
        while not list(self.run.run.checkpoints.glob(".*.tmp")):
            if time.monotonic() > deadline:
                raise LeftOut("no checkpoint is being written")
            time.sleep(0.002)
        return self._power_off(training[0])

    def _power_off(self, node: str) -> Harm:
        self.cluster.power_off(node)
        self._down.add(node)

        def mend() -> None:
            self.cluster.power_on(node)
            self._undo("update", f"NodeName={node}", "State=RESUME")
            self._down.discard(node)

        return Harm(node, mend)

    def _network_cut(self, event: Event) -> Harm:
        node = self._node(event)
        self.cluster.cut_network(node)
        self._down.add(node)

        def mend() -> None:
            self.cluster.reconnect(node)
            self._undo("update", f"NodeName={node}", "State=RESUME")
            self._down.discard(node)

        return Harm(node, mend)

    def _clock_off(self, event: Event) -> Harm:
        if self.clocks is None:
            raise LeftOut("there is no C compiler to make clock.c with")
        node, clock = self._node(event), self.clocks
        hours = 1 if event.choice < 0.5 else -1
        write_atomic(clock / node, str(3600 * hours).encode())
        return Harm(f"{node} by {hours:+} h", lambda: write_atomic(clock / node, b"0"))

    # -- services and storage --------------------------------------------------------------------------------------------

    def _gone(self, name: str, away: Callable[[], object], back: Callable[[], object]) -> Harm:
        if name in self._away:
            raise LeftOut(f"the {name} is away already")
        away()
        self._away.add(name)

        def mend() -> None:
            back()
            self._away.discard(name)

        return Harm(name, mend)

    def _controller_away(self, event: Event) -> Harm:
        return self._gone("controller", lambda: self.cluster.service("stop", "controller"), lambda: self.cluster.service("start", "controller"))

    def _database_away(self, event: Event) -> Harm:
        return self._gone("database", lambda: self.cluster.service("stop", "database"), lambda: self.cluster.service("start", "database"))

    def _folder_full(self, event: Event) -> Harm:
        return self._gone("folder", self._fill, lambda: (self.disk / "filler").unlink())

    def _fill(self) -> None:
        with (self.disk / "filler").open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def _folder_stalled(self, event: Event) -> Harm:
        return self._gone("folder", lambda: freeze(self.disk), lambda: thaw(self.disk))


def _chosen(among: Sequence[T], choice: float) -> T:
    if not among:
        raise LeftOut("there is none")
    return among[int(choice * len(among))]


def freeze(disk: Path) -> None:
    """Whoever writes there waits, and cannot be ended meanwhile."""
    subprocess.run(["fsfreeze", "--freeze", disk], check=True, timeout=60)


def thaw(disk: Path) -> None:
    """They go on."""
    subprocess.run(["fsfreeze", "--unfreeze", disk], check=True, timeout=60)
