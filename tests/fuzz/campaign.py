"""Attacks on a run that trains, for some minutes; then the run is drained, and its books are read.

    live run (tests/e2e/runs.py) <--- Attack x 5, each in a thread
        memory and processes before and after; status.json: refused, malformed; the last checkpoint: no prompt lost, none twice;
        the coordinator's journal: replayed to the same states, every invariant held
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.runs import END_S, LiveRun, headway, live_run, wait_for
from tests.fuzz.attacks import Attack
from tests.support.processes import command_line, lives
from workers.coordinator.process.replay_run import audit
from workers.coordinator.snapshot import Snapshot, decode
from workers.rollout.engines.servers.embedded.__main__ import API_KEY_VARIABLE
from workers.run import checkpoints
from workers.run.files import read_lines
from workers.run.folder import RunFolder

ATTACKS = ("stranger", "key_holder", "weight_thief", "bad_worker", "http_client")
OVERRIDES = ("run.num_steps=1000000", "run.target_accuracy=null", "evaluation.every_steps=200", "checkpoint.every_steps=500", "run.max_hours=24")
LOOK_S = 2.0
MAX_GROWTH_MB = 200.0


@dataclass
class Findings:
    """What a campaign has found. `memory_mb`: resident, before and after, of each process that was there all the time."""

    minutes: float
    seed: int
    sent: dict[str, Counter[str]] = field(default_factory=dict)
    num_steps: int = 0
    refused: int = 0
    malformed: int = 0
    crashed: list[str] = field(default_factory=list)
    memory_mb: dict[str, tuple[float, float]] = field(default_factory=dict)
    prompts_lost: int = 0
    prompts_twice: int = 0
    num_replayed: int = 0
    audit: list[str] = field(default_factory=list)
    outcome: str = ""

    @property
    def num_frames(self) -> int:
        """All that was sent."""
        return sum(counts["frames"] for counts in self.sent.values())

    @property
    def faults(self) -> list[str]:
        """What should not be; [] is as it should."""
        grown = [name for name, (before, after) in self.memory_mb.items() if after > 2 * before + MAX_GROWTH_MB]
        return [*(f"{name} has crashed" for name in self.crashed), *(f"{name} has grown" for name in grown),
                *(["prompts were lost"] if self.prompts_lost else []), *(["prompts were consumed twice"] if self.prompts_twice else []),
                *self.audit, *([] if self.outcome.startswith("drained") else [self.outcome])]

    def __str__(self) -> str:
        answers = {name: ", ".join(f"{number} {what}" for what, number in sorted(counts.items()) if what != "frames")
                   for name, counts in self.sent.items()}
        lines = [f"{name:<12}{counts['frames']:>10} frames   {answers[name]}" for name, counts in self.sent.items()]
        memory = ", ".join(f"{name} {before:.0f} -> {after:.0f} MB" for name, (before, after) in self.memory_mb.items())
        return "\n".join([
            *lines, f"{self.num_frames} frames in {self.minutes:g} minutes (seed {self.seed}), beside {self.num_steps} training steps",
            f"{self.refused} connections refused, {self.malformed} messages malformed, {len(self.crashed)} processes crashed {self.crashed or ''}",
            memory, f"{self.prompts_lost} prompts lost, {self.prompts_twice} consumed twice; the run: {self.outcome}",
            f"{self.num_replayed} inputs of the coordinator replayed: {'; '.join(self.audit) or 'the same states, every invariant held'}"])


class Ports:
    """The ports on which processes of a run listen; looked up now and then."""

    def __init__(self, run: LiveRun) -> None:
        self._run, self.all, self.http = run, list[int](), dict[int, str]()  # of HTTP servers with their keys

    def look(self) -> None:
        """Look again."""
        found, http = set[int](), dict[int, str]()
        for process in self._run.look():
            try:
                ports = {connection.laddr.port for connection in process.net_connections("tcp") if connection.status == psutil.CONN_LISTEN}
                key = process.environ().get(API_KEY_VARIABLE, "")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            found |= ports
            if any("engines.servers" in word for word in command_line(process)):
                http |= dict.fromkeys(ports, key)
        self.all, self.http = sorted(found), http


def campaign(folder: Path, minutes: float, seed: int, *overrides: str) -> Findings:
    """Attack a run of the tiny experiment in `folder`. What is random is drawn from `seed`; which of it meets which state of the run is not."""
    findings = Findings(minutes, seed)
    with live_run(folder, *OVERRIDES, *overrides) as run:
        run.after_steps(3)
        ports, stop = Ports(run), threading.Event()
        ports.look()
        before = _processes(run)
        memory = {name: _rss(process) for name, process in before.items()}
        attacks = {name: Attack(run.run, f"{seed} {name}", stop, lambda: ports.all, lambda: ports.http) for name in ATTACKS}
        threads = [threading.Thread(target=attack.live, args=(getattr(attack, name),), name=name) for name, attack in attacks.items()]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60 * minutes
        while time.monotonic() < deadline and run.launcher.poll() is None:
            stop.wait(LOOK_S)
            ports.look()
        stop.set()
        for thread in threads:
            thread.join(END_S)
        findings.sent = {name: attack.counts for name, attack in attacks.items()}
        findings.crashed = [name for name, process in before.items() if not lives(process)]
        findings.memory_mb = {name: (memory[name], _rss(process)) for name, process in before.items() if lives(process)}
        _close(run, findings)
    return findings


def _processes(run: LiveRun) -> dict[str, psutil.Process]:
    return {name: run.process(name) for name in ("coordinator", "engine", "inference task", "train task")}


def _rss(process: psutil.Process) -> float:
    return process.memory_info().rss / 2**20


def _close(run: LiveRun, findings: Findings) -> None:
    """That it trains after all this, and how it stands."""
    done = len(read_lines(run.run.metrics))
    wait_for("training that goes on", lambda: run.launcher.poll() is not None or len(read_lines(run.run.metrics)) > done + 3, END_S)
    status = json.loads(run.run.status.read_bytes())
    findings.refused, findings.malformed = status["refused_peers"], status["malformed_messages"]
    headway("stop", "--drain", str(run.run.path))
    wait_for("the end of the run", lambda: run.launcher.poll() is not None, END_S)
    outcome = run.run.ended() or {"state": "none", "cause": ""}
    findings.outcome = f"{outcome['state']} ({outcome['cause']})"
    findings.num_steps = len(read_lines(run.run.metrics))
    newest = checkpoints.all_checkpoints(run.run)[-1]
    _count_prompts(run.run, decode(newest.coordinator.read_bytes()), findings)
    replayed = audit(run.run)
    findings.num_replayed, findings.audit = replayed.replay.num_inputs, [*filter(None, [replayed.difference]), *(replayed.findings or []),
                                                                            *replayed.replay.notes]


def _count_prompts(run: RunFolder, snapshot: Snapshot, findings: Findings) -> None:
    """Every prompt that was begun is consumed once, or waits, or is on record as left out."""
    consumed = Counter(group for record in read_lines(run.consumed) for group in record["groups"])
    findings.prompts_twice = sum(count > 1 for count in consumed.values())
    ledger = snapshot.ledger
    waiting = len(ledger.running) + len(ledger.parked) + len(ledger.finished) + len(ledger.retry) + len(ledger.set_aside)
    findings.prompts_lost = ledger.next_index - ledger.num_consumed - ledger.num_rejected - waiting
