"""A run on a local SLURM cluster under a schedule of faults, and what is judged after it.

    schedule.py --event every 20 s--> faults.py: harm --after up to a minute--> mended
    run with real engines and trainer, on a small disk of its own; two who watch it: one keeps it, the other takes over
    then: it trains on, is drained, and its books are read:  runs.py: every prompt and step once, nothing left
                                                             replay_run.py: the journal, to the same states, every invariant
                                                             evaluations.jsonl: as good as a run that nothing has disturbed
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.chaos.faults import Faults, Harm, LeftOut, thaw
from tests.chaos.schedule import Event, schedule
from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import ROOT, SlurmRun
from workers.coordinator.process.replay_run import audit
from workers.run.files import read_lines, write_atomic

DISK_MB = 600
OVERRIDES = (
    "run.num_steps=1000000", "run.target_accuracy=null", "evaluation.every_steps=20", "data.num_heldout=30", "staleness.bound=hard",
    "checkpoint.every_steps=10", "run.max_hours=3", "cluster.spare_chunks=60", "cluster.crash_backoff_s=1", "cluster.max_consecutive_crashes=20",
    "cluster.inference.partition=preemptible", "cluster.inference.exclude='trn[0-1]'",
    "cluster.train.partition=preemptible", "cluster.train.exclude='inf[0-2]'")
RECOVERY_S, RECOVERY_STEPS = 600.0, 10
LOOK_S = 0.2


@dataclass
class Findings:
    """What a campaign has found. `rows`: each event as it went. `longest_s`: without a step; `faults`: what should not be, [] is as it should."""

    minutes: float
    seed: int
    rows: list[str] = field(default_factory=list)
    begun: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    longest_s: float = 0.0
    endings: Counter[str] = field(default_factory=Counter)
    num_replayed: int = 0
    num_points: int = 0
    accuracy: str = ""
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{fault} {self.begun[fault]}" + (f" ({self.left_out[fault]} left out)" if self.left_out[fault] else "")
                           for fault in sorted(self.begun | self.left_out))
        return "\n".join([
            *self.rows, f"{self.minutes:g} minutes, seed {self.seed}: {sum(self.begun.values())} faults ({counts})",
            f"{self.num_steps} steps, at most {self.longest_s:.0f} s without one; incarnations: "
            f"{', '.join(f'{number} {how}' for how, number in sorted(self.endings.items()))}",
            f"journal: {self.num_replayed} inputs replayed, the same state at {self.num_points} points; held-out accuracy {self.accuracy}",
            "as it should be" if not self.faults else "NOT AS IT SHOULD BE: " + "; ".join(self.faults)])


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, which can be filled and frozen."""
    image, disk = folder / "disk.image", folder / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_MB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop,noatime", image, disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


class Watchers:
    """Two who follow the run in a terminal; one who is gone comes back."""

    def __init__(self, run: SlurmRun, log: IO[bytes]) -> None:
        self._run, self._log = run, log
        self._all: list[subprocess.Popen] = []

    def look(self) -> None:
        """Start those that are missing, while the run goes on."""
        self._all = [one for one in self._all if one.poll() is None]
        while len(self._all) < 2:
            self._all.append(subprocess.Popen([sys.executable, "-m", "launcher", "watch", "--plain", str(self._run.run.path)], cwd=ROOT,
                                              env=self._run.cluster.env, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log))

    def end(self, timeout_s: float) -> bool:
        """Whether all have ended by themselves."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            for one in self._all:
                one.wait(timeout_s)
            return True
        for one in self._all:
            one.kill()
        return False


class Timeline:
    """Runs a schedule against a run: begins each event in its time, and mends it in its time."""

    def __init__(self, faults: Faults, findings: Findings, say: Callable[[str], object]) -> None:
        self._faults, self._findings, self._say = faults, findings, say
        self._open: list[tuple[float, Harm]] = []

    def begin(self, event: Event, now: float) -> None:
        """Break something."""
        try:
            harm = self._faults.begin(event)
        except LeftOut as why:
            self._findings.left_out[event.fault] += 1
            self._row(event, f"left out: {why}")
            return
        self._findings.begun[event.fault] += 1
        self._open.append((now + event.lasts_s, harm))
        self._row(event, f"{harm.what} for {event.lasts_s:.0f} s")

    def mend(self, now: float) -> None:
        """Mend what is due; what cannot be mended now, because what it takes is away itself, is tried again."""
        due = [(end, harm) for end, harm in self._open if end <= now]
        for end, harm in due:
            self._open.remove((end, harm))
            try:
                harm.mend()
            except (RuntimeError, subprocess.SubprocessError, OSError) as error:
                self._say(f"{harm.what} cannot be mended yet: {error}")
                self._open.append((now + 5, harm))

    def mend_all(self) -> None:
        """Mend all that is broken."""
        while self._open:
            self.mend(float("inf"))
            time.sleep(LOOK_S)

    def _row(self, event: Event, text: str) -> None:
        row = f"{event.at_s:6.0f} s  {event.fault:<24} {text}"
        self._findings.rows.append(row)
        self._say(row)


def campaign(folder: Path, minutes: float, seed: int, say: Callable[[str], object] = print, keep: Path | None = None) -> Findings:
    """Break a run in `folder` for `minutes`, and judge it; what it leaves is copied to `keep` where anything is not as it should be."""
    findings = Findings(minutes, seed)
    with small_disk(folder) as disk:
        cluster = LocalCluster(NTRN=2)
        try:
            cluster.up()
            _disturbed(cluster, folder, disk, findings, say)
            _compare(disk / "run", _undisturbed(cluster, folder / "undisturbed"), findings)
        except BaseException as error:
            findings.faults.append(repr(error))
            raise
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                thaw(disk)
            if keep is not None and findings.faults and (disk / "run").exists():
                shutil.copytree(disk / "run", keep, ignore=shutil.ignore_patterns("checkpoints", "export", "keys"), dirs_exist_ok=True)
            cluster.down()
    return findings


def _disturbed(cluster: LocalCluster, folder: Path, disk: Path, findings: Findings, say: Callable[[str], object]) -> None:
    clocks = folder / "clocks" if shutil.which("cc") else None
    run = SlurmRun(cluster, disk / "run", *OVERRIDES, *(_clocks(clocks) if clocks else ()))
    with (folder / "watch.log").open("wb") as log:
        watchers, timeline = Watchers(run, log), Timeline(Faults(cluster, run, disk, clocks), findings, say)
        try:
            watchers.look()
            run.after_steps(5)
            _time_passes(run, schedule(findings.seed, findings.minutes), timeline, watchers, findings)
        finally:
            timeline.mend_all()
        try:
            _recovers(run, findings)
            run.drain()
        except (AssertionError, RuntimeError, TimeoutError) as error:
            findings.faults.append(str(error))
            say(run.logs())
        if not watchers.end(60):
            findings.faults.append("who watched the run has not ended")
    _read_books(run, findings)


def _clocks(clocks: Path) -> tuple[str, str]:
    """Every element reads its node's clock through a library that may set it off (clock.c); a file for each node says how far."""
    clocks.mkdir()
    for name in ("inf0", "inf1", "inf2", "trn0", "trn1"):
        write_atomic(clocks / name, b"0")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", clocks / "clock.so", Path(__file__).with_name("clock.c")], check=True)
    setup = json.dumps([f"export LD_PRELOAD={clocks}/clock.so CLOCK_FILE={clocks}/$(hostname)"])
    return f"cluster.inference.setup={setup}", f"cluster.train.setup={setup}"


def _time_passes(run: SlurmRun, events: list[Event], timeline: Timeline, watchers: Watchers, findings: Findings) -> None:
    began = moved = time.monotonic()
    number, end_s = len(run.steps), 60 * findings.minutes
    waiting = list(events)
    while (now := time.monotonic()) < began + end_s and run.run.ended() is None:
        timeline.mend(now)
        if waiting and now >= began + waiting[0].at_s:
            timeline.begin(waiting.pop(0), now)
        watchers.look()
        if (steps := len(run.steps)) != number:
            number, moved = steps, now
        findings.longest_s = max(findings.longest_s, now - moved)
        time.sleep(LOOK_S)
    if run.run.ended() is not None:
        findings.faults.append(f"the run ended: {run.run.ended()}")


def _recovers(run: SlurmRun, findings: Findings) -> None:
    began = time.monotonic()
    run.more_steps(RECOVERY_STEPS, RECOVERY_S)
    findings.longest_s = max(findings.longest_s, time.monotonic() - began)


def _read_books(run: SlurmRun, findings: Findings) -> None:
    findings.num_steps, findings.endings = len(run.steps), Counter(run.endings)
    replayed = audit(run.run)
    findings.num_replayed, findings.num_points = replayed.replay.num_inputs, replayed.replay.num_points
    findings.faults += [*filter(None, [replayed.difference]), *(replayed.findings or [])]
    if findings.begun["folder_full"] or findings.begun["folder_stalled"]:  # which may end with the incarnation
        findings.rows += replayed.replay.notes
    else:
        findings.faults += replayed.replay.notes
    token = run.token
    for name in run.cluster.nodes():
        findings.faults += [f"{name} holds /dev/shm/{left}" for left in run.cluster.shared_memory(name) if token in left]


def _undisturbed(cluster: LocalCluster, path: Path) -> list[dict]:
    run = SlurmRun(cluster, path, *OVERRIDES, "run.num_steps=200")
    run.ended(1800)
    run.assert_sound()
    return read_lines(run.run.evaluations)


def _compare(path: Path, undisturbed: list[dict], findings: Findings) -> None:
    """The last evaluation with that of the undisturbed run's end. Both are of a few prompts: it is less where the 95% interval of the difference lies
    below 0 (Newcombe, 1998, Statistics in Medicine 17:873, method 10)."""
    own, other = read_lines(path / "evaluations.jsonl")[-1], undisturbed[-1]
    low, high = other["avg"]["low"], other["avg"]["high"]
    findings.accuracy = (f"{own['accuracy']:.3f} at step {own['step']}, undisturbed {other['accuracy']:.3f} ({low:.3f} to {high:.3f}) "
                         f"at step {other['step']}")
    if other["accuracy"] - own["accuracy"] > math.hypot(own["avg"]["high"] - own["accuracy"], other["accuracy"] - low):
        findings.faults.append(f"it has learned less than an undisturbed run: {findings.accuracy}")
