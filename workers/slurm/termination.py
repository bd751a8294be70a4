"""How the time of a rollout worker or of a reward element ends, and who tells it so."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import Literal

from workers.config import ClusterConfig

AFTER_TERM_S = 15.0
"""SLURM kills what is left 30 s (KillWait) after SIGTERM."""
AFTER_USR2_S = 20.0


class WorkerEnded(RuntimeError):
    """Something that this worker cannot live without has ended."""


@dataclass(frozen=True)
class Termination:
    """Why a worker leaves in order.

    finished   the run is over; `cause` is '' if it is complete
    drained    a signal or the coordinator told it to go; `cause` says which, `signal` is the signal's number
    idle       there has been no coordinator for `rollout.max_idle_minutes`
    """

    how: Literal["finished", "drained", "idle"]
    cause: str
    signal: int | None = None


@dataclass(frozen=True)
class Told:
    """The worker was told to leave within `limit_s` seconds: by a signal, or by the coordinator (`signal` is None)."""

    reason: str
    limit_s: float
    signal: int | None = None


def drain_limit_s(cluster: ClusterConfig, number: int | None) -> float:
    """How long a drain may take to hand everything over, before the rest is spilled."""
    return AFTER_TERM_S if number == signal.SIGTERM else min(AFTER_USR2_S, float(cluster.signal_delay_s))


def listen(cluster: ClusterConfig) -> asyncio.Future[Told]:
    """Take SIGTERM and SIGUSR2 from now on; the future says which one came first. Others can set it too."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[Told] = loop.create_future()

    def tell(number: signal.Signals) -> None:
        if not told.done():
            told.set_result(Told(f"told by {number.name}", drain_limit_s(cluster, number), number))

    for number in (signal.SIGTERM, signal.SIGUSR2):
        loop.add_signal_handler(number, tell, number)
    return told


def slurm_job() -> str:
    """This process's SLURM job as 'array job id_task id', or the job id of a job that is no array; '' outside SLURM."""
    job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{job}_{task}" if job and task else os.environ.get("SLURM_JOB_ID", "")
