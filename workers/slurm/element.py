"""One element of the inference or of the reward array, from its start to what follows it.

    the run is over          -> exit                     time limit          -> exit 0: the array's next element takes its place
    preempted                -> requeue                  SIGTERM, failure    -> exit 1: SLURM or the next element follows
    no coordinator for long  -> back into the queue, held, with the elements that wait: a training element releases them. Where none is left
                                in the queue, and nobody keeps the run who would submit one, the run ends

On one machine nothing follows: an error ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import Protocol

from workers.config import ClusterKind, Config
from workers.run.folder import RunFolder
from workers.run.processes import first_cause
from workers.slurm import job, succession
from workers.slurm.job import SlurmElement
from workers.slurm.submission import SubmissionWatch
from workers.slurm.termination import Termination

LOOK_S = 5.0
SOON_S = 180.0


class Worker(Protocol):
    """What an element is there for."""

    @property
    def in_touch(self) -> bool:
        """Whether the coordinator knows it and is heard."""

    async def work(self) -> Termination:
        """Work until the run is over, or until told to leave. Raises what broke."""


def run_element(run: RunFolder, config: Config, role: str, worker: Worker) -> str:
    """The life of an element of the array of `role` ('inference' or 'reward'); returns why the run ended ('' where it is complete, or goes
    on). Raises what broke."""
    element = job.current() if config.cluster.kind is ClusterKind.slurm else None
    ending = asyncio.run(_work(run, config, element, role, worker))
    if element is not None:
        follow_up(run, config, element, role, ending)
    return ending.cause if ending.how == "finished" else ""


async def _work(run: RunFolder, config: Config, element: SlurmElement | None, role: str, worker: Worker) -> Termination:
    started = time.monotonic()
    watching = asyncio.create_task(_watch_submission(run))
    try:
        return await worker.work()
    except BaseException as error:
        # With a coordinator it is for that one to say what follows; without one nobody else could.
        if element is None and not worker.in_touch:
            run.end(f"an element of {role} (process {os.getpid()}) failed without a coordinator to tell: {first_cause(error)}", role)
        elif element is not None and not isinstance(error, asyncio.CancelledError) and time.monotonic() - started < SOON_S:
            await _pause(run, config.cluster.stay_s)  # the next element here would most likely fail alike
        raise
    finally:
        watching.cancel()


async def _pause(run: RunFolder, seconds: float) -> None:
    print(f"failed soon after its start: this element stays for {seconds:g} s, so that a bad node does not use up the array", flush=True)
    told = asyncio.Event()
    for number in (signal.SIGUSR2, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not told.is_set():
        with contextlib.suppress(OSError):  # a run folder that is away is none to hurry for
            if run.ended() is not None or run.stop_requested() is not None:
                return
        await asyncio.sleep(1.0)


async def _watch_submission(run: RunFolder) -> None:
    watch, whole = SubmissionWatch(run), False
    while not whole:
        await asyncio.sleep(LOOK_S)
        with contextlib.suppress(OSError):  # a run folder that is away is looked at again
            whole = watch.is_whole()


def follow_up(run: RunFolder, config: Config, element: SlurmElement, role: str, ending: Termination) -> None:
    """What an element on SLURM does last. Raises `SystemExit` where it was terminated."""
    if ending.how == "idle" and not succession.is_followed(run):
        succession.end(run, role)
    elif ending.how == "idle":
        print("no training job for rollout.max_idle_minutes: this element goes back to the queue, held until one starts", flush=True)
        for array in job.arrays(run, role):
            job.hold(array)
        job.requeue_held(element.job)
    elif ending.signal is not None:
        number = signal.Signals(ending.signal)
        if job.is_to_come_back(element, number, time.time(), config.cluster.signal_delay_s):
            job.requeue(element.job)
        elif number is signal.SIGTERM:
            sys.exit(1)
