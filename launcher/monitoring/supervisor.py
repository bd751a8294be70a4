"""Carries out what supervisor_policy.py decides: one supervisor a run, whoever holds supervisor.lock (best effort: a shared folder's locks, which
some file systems lack).

excluded.json remembers which nodes new submissions leave out: role -> node -> when, in seconds since 1970.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.config.cluster import RoleConfig
from launcher.config.schema import FullConfig, read_full
from launcher.jobs import job_records
from launcher.jobs.job_specs import fit, job_specs
from launcher.jobs.liveness import ROLES, cancel, other_cluster
from launcher.monitoring.keeping import Keeping
from launcher.monitoring.observation import Observation
from launcher.monitoring.supervisor_policy import (
    CancelPending,
    Decision,
    End,
    Exclude,
    Release,
    Situation,
    Submit,
    SupervisorPolicy,
    Tell,
    pending_arrays,
)
from launcher.slurm import queries
from launcher.slurm.parsing import expand_hosts
from launcher.views import evaluation_view
from workers.config import ConfigError
from workers.run.checkpoints import can_go_on
from workers.run.files import write_atomic
from workers.run.folder import RunFolder
from workers.slurm.command import OtherCluster, SlurmError
from workers.slurm.command import run as ask

_without_locks: set[RunFolder] = set()


@contextlib.contextmanager
def lock(run: RunFolder, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the run's supervisor.lock; gives whether nobody else holds it, or has said on another machine that it keeps the run. Where the file system
    has no locks, that is said once."""
    with _lock_file(run) as descriptor:
        mine = _locked(descriptor, run, say)
        with Keeping(run) if mine else contextlib.nullcontext():
            yield mine


@contextlib.contextmanager
def _lock_file(run: RunFolder) -> Iterator[int]:
    descriptor = os.open(run.supervisor_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(descriptor: int, run: RunFolder, say: Callable[[str], None]) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # Lustre without flock: ENOSYS; NFS without lockd: ENOLCK; others: EOPNOTSUPP
        if run not in _without_locks:
            say(f"{run.path}: its file system has no locks ({error.strerror}), so that nothing keeps two `headway watch` or `headway resume` "
                "of this run apart. Run one at a time, or mount it with locks (Lustre: -o flock)")
        _without_locks.add(run)
    return not run.kept_elsewhere()


@contextlib.contextmanager
def supervising(run: RunFolder, say: Callable[[str], None]) -> Iterator[Callable[[Observation], None]]:
    """Gives what keeps the run going, to be called with what is observed from time to time. While somebody else keeps it that does nothing; it takes
    over when that one is gone. Raises `OtherCluster`."""
    keeper: tuple[Supervisor, Keeping] | None = None
    if other := _other_cluster(run):
        raise OtherCluster(other)
    with _lock_file(run) as descriptor, contextlib.ExitStack() as kept:
        def act(observed: Observation) -> None:
            nonlocal keeper
            if keeper is not None and keeper[1].lost:
                say(f"this run is kept going by a `headway watch` on {run.kept_elsewhere() or 'another machine'}, as this one was silent for long")
                keeper = None
            elif keeper is None and _locked(descriptor, run, say):
                say("the `headway watch` that kept this run going has gone; this one does from now on")
                keeper = Supervisor(run, say), kept.enter_context(Keeping(run))
            if keeper is not None:
                keeper[0].act(observed)

        if _locked(descriptor, run, say):
            keeper = Supervisor(run, say), kept.enter_context(Keeping(run))
        else:
            where = f" on {host}" if (host := run.kept_elsewhere()) else ""
            say(f"this run is kept going by another `headway watch` already{where}; this one only shows it, and takes over should that one go")
        yield act


def _other_cluster(run: RunFolder) -> str:
    with contextlib.suppress(SlurmError):  # it is asked again with every look
        return other_cluster(run)
    return ""


class Supervisor:
    """A `SupervisorPolicy` with its hands."""

    def __init__(self, run: RunFolder, say: Callable[[str], None]) -> None:
        self.run, self._say = run, say
        self._config = read_full(run)
        needed = {spec.role: spec.nodes_per_element for spec in job_specs(self._config.plan(), self._config, run)}
        self._policy = SupervisorPolicy(self._config.run.max_hours, needed, read_excluded(run))
        self._num_nodes: dict[str, int] = {}
        self._refused = self._trouble = ""

    def act(self, observed: Observation) -> None:
        """Decide and do; what SLURM does not do is said, and does not keep the rest from being done. Raises `SlurmError`."""
        if not self._num_nodes:
            with contextlib.suppress(SlurmError):  # no node is excluded before that is known
                self._num_nodes = {role: len(usable_nodes(self._config.cluster.role(role))) for role in self._policy.nodes_needed}
        if observed.no_history and self._refused != observed.no_history:
            self._refused = observed.no_history
            self._say(f"SLURM's accounting cannot be read, so failing nodes are not noticed: {observed.no_history}")
        for decision in self._policy.decide(self._situation(observed)):
            try:
                self._do(decision, observed)
            except SlurmError as error:
                if str(error) != self._trouble:
                    self._say(f"not done, SLURM did not take it: {error}")
                self._trouble = str(error)

    def _situation(self, observed: Observation) -> Situation:
        submission = self.run.submission()
        step = max([observed.checkpoint.step if observed.checkpoint else 0, *(life.end.step for life in observed.lives if life.end)])
        if (judging := evaluation_view.progress(self.run)) is not None:
            step = judging["num_judged"]
        return Situation(observed, self.run.ended() is not None, self.run.stop_requested() is not None,
                         (self.run.newest_epoch(), step), observed.training_hours, self._num_nodes,
                         None if submission.get("complete", True) else time.time() - submission["time"], job_records.settle(self.run))

    def _submit(self, role: str, observed: Observation) -> None:
        from launcher.jobs.submit import submit
        from launcher.slurm import site, submit_limits  # these import submitit

        config = remaining(with_excluded(self._config, self._policy.excluded), observed.training_hours)
        try:
            specs = tuple(spec for spec in job_specs(config.plan(), config, self.run) if spec.role == role)
            limits = site.look(config.cluster, config.roles).limits
            submit(fit(specs, submit_limits.rooms(limits, config.cluster, config.roles)), config, self.run, going_on=True)
        except (ConfigError, SlurmError) as error:  # the queue may be full, or SLURM away
            self._policy.not_submitted(role)
            self._say(f"not submitted, to be tried again: {error}")

    def _do(self, decision: Decision, observed: Observation) -> None:
        match decision:
            case Submit(role):
                self._say(f"nothing of {role} is left in the queue: submitting again")
                self._submit(role, observed)
            case Exclude(role, node, why):
                self._say(f"{role} leaves out node {node}: {why}")
                write_atomic(self.run.excluded, json.dumps(self._policy.excluded).encode())
                for array in pending_arrays(observed.queue[role]):
                    queries.update_exclude(array, [with_excluded(self._config, self._policy.excluded).cluster.role(role).exclude])
            case Release(role):
                self._say(f"held elements of {role} are released: training runs")
                queries.release(pending_arrays([entry for entry in observed.queue[role] if entry.held]))
            case CancelPending():
                cancel(self.run, pending_only=True)
            case End(cause, in_order):
                drain = (self.run.stop_requested() or {"drain": True})["drain"]
                self.run.end(cause, "launcher", "drained" if in_order and drain and can_go_on(self.run) else "")
                cancel(self.run, pending_only=True)
            case Tell(text):
                self._say(text)


def usable_nodes(part: RoleConfig) -> set[str]:
    """The nodes of the role's partitions (of the cluster's default one if none is given) that `exclude` and `nodelist` leave to it.

    Lists in files (with a '/') are not read. Raises `SlurmError`.
    """
    wanted = set(part.partition.split(",")) if part.partition else None
    nodes = set()
    for line in ask("sinfo", "--all", "--noheader", "--Node", "--format=%N|%P").stdout.splitlines():
        node, _, partition = line.strip().partition("|")
        if partition.rstrip("*") in wanted if wanted else partition.endswith("*"):  # the star marks the default partition
            nodes.add(node)
    given = {text: set(expand_hosts(text)) if text and "/" not in text else None for text in (part.exclude, part.nodelist)}
    only = given[part.nodelist]
    return nodes - (given[part.exclude] or set()) if only is None else nodes & only - (given[part.exclude] or set())


def read_excluded(run: RunFolder) -> dict[str, dict[str, float]]:
    """Nodes that were excluded before."""
    try:
        return json.loads(run.excluded.read_bytes())
    except FileNotFoundError:
        return {}


def remaining(config: FullConfig, training_hours: float) -> FullConfig:
    """The config with what is left of run.max_hours, for the number of chunks."""
    result = copy.deepcopy(config)
    result.run.max_hours = max(0.05, config.run.max_hours - training_hours)
    return result


def with_excluded(config: FullConfig, excluded: dict[str, dict[str, float]]) -> FullConfig:
    """The config with our excluded nodes beside the user's; a file of these (with a '/') is read, as sbatch takes one or the other."""
    result = copy.deepcopy(config)
    for role in ROLES:
        part = result.cluster.role(role)
        if excluded.get(role) and (named := _nodes_named(part.exclude)) is not None:
            part.exclude = ",".join([*named, *sorted(excluded[role])])
    return result


def _nodes_named(exclude: str) -> list[str] | None:
    """None where the file cannot be read, which SLURM then says."""
    if "/" not in exclude:
        return [exclude] if exclude else []
    try:
        return [node for line in Path(exclude).read_text("utf-8").splitlines() for node in line.partition("#")[0].split()]
    except (OSError, UnicodeDecodeError):
        return None
