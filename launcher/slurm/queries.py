"""What the launcher asks of SLURM, as typed records; elements ask for themselves in workers/slurm/job.py.

    squeue(ids), history(ids)   what is in the queue now; what has ended, each incarnation of a requeued element on its own
    jobs_named(name)            the jobs of a submission whose answer was lost
    cancel release update_exclude                                   change
    show_config cluster_name partition node_kinds test_only         what the cluster is like, before submission

Fixed formats with a separator, not --json: its fields differ between versions.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.slurm.parsing import clock, expand_hosts, gpus, seconds
from launcher.slurm.states import Meaning, State, parse
from workers.slurm.command import COMMENT, ENDED, SlurmError, away, run, user_name

IDS_PER_CALL = 100
AWAY = ("down", "drain", "fail", "inval", "maint", "reboot", "unknown")
"""How the states of nodes begin that take no jobs."""


@dataclass(frozen=True)
class QueueEntry:
    """One array element that has not ended. `start`: when it began, or SLURM's estimate (seconds since 1970), or None; `comment`: what the element
    says itself there, while it cannot write to the run folder."""

    array_job_id: str
    task_id: int | None
    job_id: str
    state: State
    reason: str
    nodes: tuple[str, ...]
    start: float | None
    time_left_s: float | None
    comment: str = ""

    @property
    def element(self) -> str:
        """'1234_5', or '1234' outside an array."""
        return self.array_job_id if self.task_id is None else f"{self.array_job_id}_{self.task_id}"

    @property
    def held(self) -> bool:
        """It waits until somebody releases it."""
        return self.state.meaning is Meaning.held or (self.state is State.PENDING and "held" in self.reason.lower())


@dataclass(frozen=True)
class HistoryEntry:
    """One incarnation of an element, from accounting; also those that run now, and earlier ones of a requeued element. `cancelled_by`: the person
    who has. Without `nodes`: what was cancelled of an array before it began ('12_[3-9]')."""

    element: str
    state: State
    elapsed_s: float
    num_gpus: int
    nodes: tuple[str, ...]
    start: float | None
    end: float | None
    exit_code: int
    cancelled_by: str = ""

    @property
    def array_job_id(self) -> str:
        """The array it belongs to."""
        return self.element.split("_")[0]


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike: how many, what each has, and SLURM's words for their state and GPUs."""

    num_nodes: int
    num_gpus: int
    num_cpus: int
    memory_mb: int
    state: str = "idle"
    gres: str = ""

    def gpus_of(self, gpu_type: str) -> int:
        """GPUs of this type that each has; all of them where it names none such, or none is asked for."""
        return (gpus(self.gres, gpu_type) if gpu_type else 0) or self.num_gpus

    @property
    def away(self) -> bool:
        """They take no jobs now: down, drained, or under maintenance."""
        return self.state.lower().startswith(AWAY)


def _lines(output: str, num_fields: int) -> list[list[str]]:
    return [fields for line in output.splitlines() if len(fields := line.split("|", num_fields - 1)) == num_fields]


def _some(job_ids: list[str]) -> list[str]:
    """Comma-separated ids, as many at once as a command line may hold."""
    return [",".join(job_ids[first:first + IDS_PER_CALL]) for first in range(0, len(job_ids), IDS_PER_CALL)]


def squeue(job_ids: list[str]) -> list[QueueEntry]:
    """Every element of these arrays that has not ended, pending ones too. Raises `SlurmError`."""
    entries = []
    for ids in _some(job_ids):
        output = run("squeue", "--noheader", "--array", f"--jobs={ids}", "--format=%F|%K|%A|%T|%N|%S|%L|%r|%k",
                      tolerate=ENDED).stdout
        for array, task, job, state, nodes, start, left, reason, comment in _lines(output, 9):
            entries.append(QueueEntry(array, int(task) if task.isdecimal() else None, job, parse(state), "" if reason == "None" else reason,
                                      expand_hosts(nodes), clock(start), seconds(left),
                                      comment.removeprefix(COMMENT) if comment.startswith(COMMENT) else ""))
    return [entry for entry in entries if not entry.state.over]


def history(job_ids: list[str]) -> list[HistoryEntry]:
    """Every incarnation of these arrays' elements that has begun, or was cancelled before, from accounting, which lags by seconds.

    Raises `SlurmError`, also where the cluster keeps no accounting (no slurmdbd).
    """
    entries = []
    for ids in _some(job_ids):
        output = run("sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--jobs={ids}",
                      "--format=JobID,State,ElapsedRaw,AllocTRES,NodeList,Start,End,ExitCode", patience_s=0).stdout
        for element, state, elapsed, resources, nodes, start, end, code in _lines(output, 8):
            hosts, who = expand_hosts(nodes), user_name(state.split()[2]) if state.startswith("CANCELLED by ") else ""
            if hosts or who:  # else it never began
                entries.append(HistoryEntry(element, parse(state), float(elapsed or 0), gpus(resources), hosts, clock(start), clock(end),
                                            int(code.split(":")[0] or 0), who))
    return entries


def jobs_named(name: str) -> list[str]:
    """Ids of one's own jobs and arrays of this name, oldest first, from the queue and, where there is any, accounting. Raises `SlurmError`."""
    found = set(run("squeue", "--me", "--noheader", "--states=all", f"--name={name}", "--format=%F").stdout.split())
    try:
        output = run("sacct", "--noheader", "--parsable2", "--allocations", f"--name={name}", "--starttime=now-30days", "--format=JobID",
                      patience_s=0).stdout
        found |= {element.split("_")[0] for element in output.split()}
    except SlurmError:
        pass  # no accounting: the queue still knows the jobs that matter
    return sorted(found, key=int)


def cancel(job_ids: list[str], pending_only: bool = False) -> None:
    """Cancel arrays or elements, or of those what has not begun; what has ended already is no error. Raises `SlurmError`."""
    # Not --quiet: with it, and --state, an array that has ended gives exit status 1 without a word.
    for ids in _some(job_ids):
        run("scancel", *(["--state=PENDING"] if pending_only else []), *ids.split(","), tolerate=ENDED)


def release(job_ids: list[str]) -> None:
    """Let held elements of these arrays go on. Raises `SlurmError`."""
    for ids in _some(job_ids):
        run("scontrol", "release", ids, tolerate=ENDED)


def update_exclude(job_id: str, nodes: list[str]) -> None:
    """Keep what is pending of an array off these nodes. Raises `SlurmError`."""
    run("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}", tolerate=ENDED)


def show_config(patience_s: float | None = 0) -> dict[str, str]:
    """The cluster's configuration: MaxArraySize, KillWait, SlurmctldParameters, ... Raises `SlurmError`, unless told otherwise at once:
    a dry run asks too."""
    return dict(re.findall(r"^(\S+) *= *(.*?) *$", run("scontrol", "show", "config", patience_s=patience_s).stdout, re.MULTILINE))


@functools.cache
def cluster_name() -> str:
    """What the cluster is called that SLURM's commands are of here, '' where it has no name; asked once. Raises `SlurmError`."""
    return show_config(patience_s=None).get("ClusterName", "")


@contextlib.contextmanager
def asked_once() -> Iterator[str]:
    """For a block that can do without a cluster: where the controller does not answer, it is asked once. Gives why it does not, or ''."""
    try:
        show_config()
    except SlurmError as error:
        with away(error):
            yield str(error)
    else:
        yield ""


def partition(name: str) -> dict[str, str] | None:
    """A partition's limits (MaxTime, Nodes, State, PreemptMode, ...); None where there is none of that name. Raises `SlurmError`."""
    output = run("scontrol", "show", "partition", "--oneliner", name, tolerate=("not found",)).stdout
    return dict(word.split("=", 1) for word in output.split() if "=" in word) or None


def node_kinds(partition_name: str, patience_s: float | None = None) -> list[NodeKind]:
    """What the nodes of a partition (or of several, 'a,b') have. Raises `SlurmError`."""
    # Without --exact unlike nodes are one line, with the least that any of them has ('8+').
    output = run("sinfo", "--noheader", "--exact", f"--partition={partition_name}", "--format=%D|%c|%m|%T|%G", patience_s=patience_s).stdout
    return [NodeKind(int(number), gpus(resources), int(cpus.rstrip("+")), int(memory.rstrip("+")), state, resources)
            for number, cpus, memory, state, resources in _lines(output, 5)]


def test_only(script: str) -> str:
    """What SLURM says to this script without submitting it. Raises `SlurmError` with what it objects to."""
    return run("sbatch", "--test-only", stdin=script).stderr.strip()
