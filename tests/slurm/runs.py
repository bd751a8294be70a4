"""Runs on a local SLURM cluster for tests: started by the command, looked at through their folder, accounted for when they have ended."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from tests.slurm.cluster import LocalCluster
from workers.config import Bound, Config, load
from workers.coordinator.groups.group_states import index_of
from workers.coordinator.snapshot import LedgerState, decode
from workers.run import checkpoints, incarnations
from workers.run.files import read_lines
from workers.run.folder import RunFolder
from workers.run.incarnations import Incarnation

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
"""From submission, or from a fault, to training steps. Generous: other tests may take all cores meanwhile."""
END_S = 90.0
ENDLESS = ("run.num_steps=1000000", "evaluation.every_steps=0", "data.num_heldout=4")
SLOW_TOKENS = ("engine.server=synthetic", "engine.synthetic_tokens_per_s=40")
"""About a second a group: long enough to be interrupted, and a training step every second."""
FAST_BACKOFF = ("cluster.crash_backoff_s=1",)
HARD = "staleness.bound=hard"


def headway(cluster: LocalCluster, *arguments: str | Path, check: bool = True, timeout_s: float = 180) -> str:
    """Run the command on the cluster's login node; returns its output."""
    return cluster.run(sys.executable, "-m", "launcher", *arguments, cwd=ROOT, check=check, timeout_s=timeout_s)


@dataclass(frozen=True)
class Element:
    """An array element that has not ended."""

    job: str  # 17_3
    job_id: str  # SLURM's own number of it
    array: str
    name: str
    state: str
    reason: str
    node: str


class SlurmRun:
    """A detached run of the tiny experiment, with three inference elements and one of training."""

    def __init__(self, cluster: LocalCluster, path: Path, *overrides: str) -> None:
        self.cluster, self.run = cluster, RunFolder(path)
        headway(cluster, "--detach", "experiment=tiny", "cluster=local_slurm", "allocation.num_devices=4", "cluster.probe_s=0", f"run.dir={path}",
                *overrides)
        self.token: str = self.run.submission()["token"]

    # -- looking ---------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """As the workers read it."""
        return load(self.run.config)

    @property
    def steps(self) -> list[dict]:
        """metrics.jsonl."""
        return read_lines(self.run.metrics)

    @property
    def consumed(self) -> list[dict]:
        """consumed.jsonl."""
        return read_lines(self.run.consumed)

    @property
    def status(self) -> dict:
        """status.json; {} before it is there."""
        try:
            return json.loads(self.run.status.read_bytes())
        except FileNotFoundError:
            return {}

    @property
    def incarnations(self) -> list[Incarnation]:
        """All claims of epochs with their ends."""
        return incarnations.history(self.run)

    @property
    def endings(self) -> list[str]:
        """How each incarnation ended; 'killed' for one that never said."""
        return [each.end.how if each.end else "killed" for each in self.incarnations]

    def workers(self, name: str = "rollout") -> list[dict]:
        """The workers in status.json whose name begins so."""
        return [worker for worker in self.status.get("workers", []) if worker["name"].startswith(name)]

    def elements(self, role: str, *states: str) -> list[Element]:
        """The role's elements in the queue in any of the states (default: running)."""
        return [element for element in self.queue() if f"-{role}-" in element.name and element.state in (states or ("RUNNING",))]

    def queue(self) -> list[Element]:
        """Everything of this run that has not ended; arrays are found by their names, however often they were submitted."""
        lines = self.cluster.run("squeue", "--noheader", "--array", "--format=%i|%A|%F|%j|%T|%r|%N").splitlines()
        return [element for element in (Element(*line.split("|")) for line in lines) if self.token in element.name]

    def processes(self) -> list[psutil.Process]:
        """Every living process of the run on any node of its cluster: nodes are namespaces of this machine."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            marks = [process.environ().get("SLURM_JOB_NAME", ""), process.cwd(), *process.cmdline()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        return any(self.token in mark or str(self.run.path) in mark for mark in marks) and self.cluster.has(process)

    def tasks(self, role: str) -> list[psutil.Process]:
        """The processes that SLURM started as the role's tasks."""
        return [process for process in self.processes() if f"-{role}-" in process.environ().get("SLURM_JOB_NAME", "")
                and "submitit.core._submit" in process.cmdline() and "python" in Path(process.cmdline()[0]).name]

    def logs(self) -> str:
        """The last lines of all logs."""
        texts = {path.name: path.read_text(errors="replace")[-3000:] for path in sorted(self.run.jobs.glob("*.*")) if path.suffix in (".log", ".out")}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items() if text)

    # -- waiting ---------------------------------------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = START_S) -> SlurmRun:
        """Until the condition holds; fails at once if the run ends before that."""
        def look() -> bool:
            holds = condition()
            assert holds or self.run.ended() is None, f"the run ended before: {what}: {self.run.ended()}"
            return holds

        self.cluster.wait(what, look, timeout_s)
        return self

    def after_steps(self, number: int, timeout_s: float = START_S) -> SlurmRun:
        """Until `number` training steps are done."""
        return self.wait(f"{number} training steps", lambda: len(self.steps) >= number, timeout_s)

    def more_steps(self, number: int, timeout_s: float = START_S) -> SlurmRun:
        """Until so many steps beyond the newest one are done."""
        return self.after_steps((self.steps[-1]["step"] if self.steps else 0) + number, timeout_s)

    def in_epoch(self, epoch: int, timeout_s: float = START_S) -> SlurmRun:
        """Until this incarnation has finished a training step."""
        def trained() -> bool:
            past = self.incarnations
            return len(past) >= epoch and bool(self.steps) and self.steps[-1]["step"] > past[epoch - 1].claim.step \
                and self.status.get("epoch", 0) >= epoch and self.status.get("step", 0) > past[epoch - 1].claim.step

        return self.wait(f"training in epoch {epoch}", trained, timeout_s)

    def with_replicas(self, number: int, timeout_s: float = START_S) -> SlurmRun:
        """Until so many rollout workers hold weights."""
        return self.wait(f"{number} rollout workers ready", lambda: self.status.get("replicas_ready") == number, timeout_s)

    def ended(self, timeout_s: float = START_S) -> dict:
        """The outcome; waits for it."""
        self.cluster.wait("the outcome", lambda: self.run.ended() is not None, timeout_s)
        return self.run.ended() or {}

    # -- ending ----------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """`headway stop --drain`, and then the books are checked."""
        said = headway(self.cluster, "stop", "--drain", self.run.path)
        assert "drained at step" in said, said
        self.assert_sound("drained")

    def assert_nothing_left(self) -> None:
        """No element in the queue, no process on any node, no published weights."""
        self.cluster.wait("an end of all elements and processes", lambda: not self.queue() and not self.processes(), END_S)
        assert not self.run.weights(self.config.weights.dir).exists()

    def assert_sound(self, state: str = "finished", cause: str = "", timeout_s: float = END_S) -> None:
        """The run has ended, or does so in time, as it should have; every prompt and every step is accounted for; nothing is left."""
        outcome = self.ended(timeout_s)
        assert outcome["state"] == state and cause in outcome["cause"], outcome
        self.assert_nothing_left()
        self._assert_steps()
        if state == "finished":
            self._assert_summary()
            self._assert_none_forgotten()
        elif state == "drained":
            self._assert_ledger()

    def _assert_steps(self) -> None:
        """metrics.jsonl and consumed.jsonl have each step once; no prompt was consumed twice; totals go on over restarts."""
        steps, consumed, size = self.steps, self.consumed, self.config.trainer.batch_groups
        assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
        assert [record["step"] for record in consumed] == list(range(len(steps)))
        assert {len(record["groups"]) for record in consumed} <= {size}
        twice = [index for index, count in Counter(index for record in consumed for index in record["groups"]).items() if count > 1]
        assert not twice, f"consumed twice: {twice}"
        for before, after in pairwise(steps):
            assert before["seconds"] <= after["seconds"] and before["tokens_trained"] < after["tokens_trained"], (before, after)
        if self.config.staleness.bound is Bound.hard:
            assert max((record["staleness_max"] for record in steps), default=0) <= self.config.staleness.eta

    def _assert_summary(self) -> None:
        summary, last = json.loads(self.run.summary.read_bytes()), self.steps[-1]
        assert summary["num_steps"] == self.config.run.num_steps == last["step"]
        assert summary["tokens_trained"] == last["tokens_trained"]
        assert summary["num_incarnations"] == len(self.incarnations)
        assert summary["num_set_aside"] == 0, "no fault of the cluster may count as a failure of a prompt"
        ages: Counter[int] = Counter()
        for record in self.steps:
            ages.update({int(age): count for age, count in record["staleness_histogram"].items()})
        assert {str(age): ages[age] for age in sorted(ages)} == summary["staleness_histogram"]
        assert summary["max_staleness"] == max(ages)
        if self.config.staleness.bound is Bound.hard:
            assert summary["max_staleness"] <= self.config.staleness.eta

    def _assert_none_forgotten(self) -> None:
        """What was not consumed is what was under way at the end: recent, and within the admission limit."""
        consumed = {index for record in self.consumed for index in record["groups"]}
        missing = set(range(max(consumed))) - consumed
        per_step, ahead = self.config.trainer.batch_groups, self.config.staleness.eta + 1
        assert len(missing) <= ahead * per_step, f"never consumed: {sorted(missing)}"
        # A prompt that is lost for good stays behind, while one that was lost and found again is leased before any new one.
        oldest = (self.config.run.num_steps - 2 * ahead) * per_step
        assert min(missing, default=oldest) >= oldest, f"forgotten: {sorted(missing)}"

    def _assert_ledger(self) -> None:
        """In the last checkpoint every prompt that was ever leased is in exactly one place."""
        ledger = self.ledger()
        places = {
            "consumed": [index for record in self.consumed for index in record["groups"]],
            "running": [lease.index for lease in ledger.running], "parked": [entry.index for entry in ledger.parked],
            "finished": [index_of(entry.group.group_id) for entry in ledger.finished], "retry": ledger.retry}
        assert sorted(index for indices in places.values() for index in indices) == list(range(ledger.next_index)), places
        assert not ledger.set_aside, "no fault of the cluster may count as a failure of a prompt"
        # What workers held is in the checkpoint, or, where no coordinator was left to take it, in the run folder.
        spilled = {path.name.split(".")[0] for path in self.run.partials.iterdir()}
        assert {f"g{lease.index}" for lease in ledger.running} <= spilled, (ledger.running, spilled)
        if (self.run.ended() or {})["reported_by"] == "coordinator":
            assert not ledger.running
        assert ledger.num_consumed == len(places["consumed"])

    def ledger(self) -> LedgerState:
        """The ledger in the newest checkpoint, which is whole."""
        newest = checkpoints.newest(self.run)
        assert newest is not None
        return decode(newest.coordinator.read_bytes()).ledger

    def stop(self) -> None:
        """`headway stop`: nothing of the run is left afterwards."""
        said = headway(self.cluster, "stop", self.run.path)
        assert "stopped" in said and "by force" not in said, said
        self.assert_sound("failed", "by headway stop")


def kill(process: psutil.Process) -> None:
    """SIGKILL: no word to anybody."""
    process.send_signal(signal.SIGKILL)


def occupy(cluster: LocalCluster, partition: str, node: str = "") -> int:
    """A job of somebody else on one node of the partition, with its GPU; returns its number."""
    place = (f"--nodelist={node}",) if node else ()
    return cluster.sbatch("sleep 3600", f"--partition={partition}", "--gres=gpu:1", "--output=/dev/null", "--job-name=somebody-else", *place)


@contextlib.contextmanager
def slurm_run(cluster: LocalCluster, path: Path, *overrides: str) -> Iterator[SlurmRun]:
    """A run whose state and logs are shown if the test fails."""
    run = SlurmRun(cluster, path, *overrides)
    try:
        yield run
    except BaseException:
        print(f"status: {json.dumps(run.status, indent=1)}\nincarnations: {run.incarnations}\noutcome: {run.run.ended()}")
        print(f"queue: {cluster.run('squeue', '--array', check=False)}\naccounts: {cluster.run('sacct', '-XD', check=False)}\n{run.logs()}")
        raise

