"""Which elements of an evaluation are still there: by their processes on one machine, by SLURM's queue elsewhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

from workers.config import ClusterKind, Config
from workers.evaluation.chunks import Holder
from workers.run.folder import RunFolder
from workers.slurm import job
from workers.slurm.command import SlurmError

AT_WORK = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
CLOCK_S = 3.0
"""Two readings of one process's time of creation differ by less: the boot time is whole seconds, and may move."""


def myself(config: Config) -> Holder:
    """This life of this element. Raises `ConfigError` where it should be SLURM's and is not."""
    created = psutil.Process().create_time()
    if config.cluster.kind is ClusterKind.local:
        return Holder("", 0, "", socket.gethostname(), os.getpid(), created)
    element = job.current()
    return Holder(element.job, element.restarts, element.name, socket.gethostname(), os.getpid(), created)


class Liveness:
    """Tells of other claimants which are still there. Where SLURM cannot be asked, all are taken to be, and that is said once."""

    def __init__(self, run: RunFolder, holder: Holder) -> None:
        self._run, self._holder, self._trouble = run, holder, ""

    def __call__(self, holders: Sequence[Holder]) -> set[Holder]:
        """Those of `holders`, none of which is this life, that are still there."""
        if not self._holder.job:
            return {holder for holder in holders if _lives(holder)}
        try:
            states = job.job_states(self._run.arrays("inference"))
        except SlurmError as error:
            if str(error) != self._trouble:
                print(f"SLURM could not be asked which elements are there, none is taken to have gone: {error}", flush=True)
            self._trouble = str(error)
            return set(holders)
        return at_work(holders, states, self._holder)


def at_work(holders: Sequence[Holder], states: dict[str, str], me: Holder) -> set[Holder]:
    """By SLURM's `states` of jobs; earlier lives of one's own job have ended. Pure."""
    return {holder for holder in holders if holder.job != me.job and states.get(holder.job) in AT_WORK}


def _lives(holder: Holder) -> bool:
    try:
        process = psutil.Process(holder.pid)
        return abs(process.create_time() - holder.created) < CLOCK_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
