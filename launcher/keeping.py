"""Carries out what launcher/keeper.py decides: one keeper a run, whoever holds keeper.lock (best effort: a shared folder's locks).

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

from launcher import slurm
from launcher.accounting import training_hours
from launcher.facts import Facts
from launcher.jobs import fit, job_specs
from launcher.keeper import CancelPending, Decision, End, Exclude, Keeper, Release, Situation, Submit, Tell, pending_arrays
from launcher.living import ROLES, cancel
from launcher.schema import FullConfig, read_full
from workers.config import ConfigError
from workers.files import write_atomic
from workers.rundir import RunFolder
from workers.slurm_command import SlurmError


@contextlib.contextmanager
def lock(run: RunFolder) -> Iterator[bool]:
    """Hold the run's keeper.lock; gives whether nobody else holds it."""
    descriptor = os.open(run.path / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def keeping(run: RunFolder, say: Callable[[str], None]) -> Iterator[Callable[[Facts], None]]:
    """Gives what keeps the run going, to be called with the facts from time to time; it does nothing where somebody else keeps it."""
    with lock(run) as mine:
        if mine:
            yield Keeping(run, say).act
        else:
            say("this run is kept going by another `headway watch` already; this one only shows it")
            yield lambda _: None


class Keeping:
    """A keeper with its hands."""

    def __init__(self, run: RunFolder, say: Callable[[str], None]) -> None:
        self.run, self._say = run, say
        self._config = read_full(run)
        needed = {spec.role: spec.nodes_per_element for spec in job_specs(self._config.plan(), self._config, run)}
        self._keeper = Keeper(self._config.run.max_hours, needed, read_excluded(run))
        self._num_nodes: dict[str, int] = {}
        self._refused = ""

    def act(self, facts: Facts) -> None:
        """Decide and do. Raises `SlurmError`."""
        if not self._num_nodes:
            self._num_nodes = {role: self._count_nodes(role) for role in ROLES}
        if facts.no_history and self._refused != facts.no_history:
            self._refused = facts.no_history
            self._say(f"SLURM's accounting cannot be read, so failing nodes are not noticed: {facts.no_history}")
        for decision in self._keeper.decide(self._situation(facts)):
            self._do(decision, facts)

    def _count_nodes(self, role: str) -> int:
        partition = self._config.cluster.role(role).partition
        return sum(kind.num_nodes for kind in slurm.node_kinds(partition)) if partition else 0

    def _situation(self, facts: Facts) -> Situation:
        submission = self.run.submission()
        step = max([facts.checkpoint.step if facts.checkpoint else 0, *(life.end.step for life in facts.lives if life.end)])
        return Situation(facts, self.run.ended() is not None, self.run.stop_requested() is not None,
                         (self.run.newest_epoch(), step), training_hours(facts.lives, facts.time), self._num_nodes,
                         None if submission.get("complete", True) else time.time() - submission["time"])

    def _submit(self, role: str, facts: Facts) -> None:
        from launcher import preflight, site  # these import submitit
        from launcher.submit import submit

        config = remaining(with_excluded(self._config, self._keeper.excluded), training_hours(facts.lives, facts.time))
        try:
            specs = tuple(spec for spec in job_specs(config.plan(), config, self.run) if spec.role == role)
            submit(fit(specs, preflight.budget(site.look(config.cluster), config.cluster)), config, self.run)
        except (ConfigError, SlurmError) as error:  # the queue may be full, or SLURM away
            self._keeper.not_submitted(role)
            self._say(f"not submitted, to be tried again: {error}")

    def _do(self, decision: Decision, facts: Facts) -> None:
        match decision:
            case Submit(role):
                self._say(f"nothing of {role} is left in the queue: submitting again")
                self._submit(role, facts)
            case Exclude(role, node, why):
                self._say(f"{role} leaves out node {node}: {why}")
                write_atomic(self.run.path / "excluded.json", json.dumps(self._keeper.excluded).encode())
                for array in pending_arrays(facts.queue[role]):
                    slurm.update_exclude(array, [with_excluded(self._config, self._keeper.excluded).cluster.role(role).exclude])
            case Release(role):
                self._say(f"held elements of {role} are released: training runs")
                slurm.release(pending_arrays(facts.queue[role]))
            case CancelPending():
                cancel(self.run, pending_only=True)
            case End(cause, in_order):
                drain = (self.run.stop_requested() or {"drain": True})["drain"]
                self.run.end(cause, "launcher", "drained" if in_order and drain and facts.checkpoint else "")
                cancel(self.run, pending_only=True)
            case Tell(text):
                self._say(text)


def read_excluded(run: RunFolder) -> dict[str, dict[str, float]]:
    """Nodes that were excluded before."""
    try:
        return json.loads((run.path / "excluded.json").read_bytes())
    except FileNotFoundError:
        return {}


def remaining(config: FullConfig, training_hours: float) -> FullConfig:
    """The config with what is left of run.max_hours, for the number of chunks."""
    result = copy.deepcopy(config)
    result.run.max_hours = max(0.05, config.run.max_hours - training_hours)
    return result


def with_excluded(config: FullConfig, excluded: dict[str, dict[str, float]]) -> FullConfig:
    """The config with our excluded nodes beside the user's."""
    result = copy.deepcopy(config)
    for role in ROLES:
        part = result.cluster.role(role)
        part.exclude = ",".join([*([part.exclude] if part.exclude else []), *sorted(excluded.get(role, {}))])
    return result
