"""What submitit runs on a node: one element of the inference or the training array.

Only names are pickled: the role and the run folder. Everything heavy is imported inside `__call__`, so that the launcher
can hold these objects without torch or zmq.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from workers.config import Config, load
from workers.processes import end_with_parent, enlist, first_cause
from workers.rundir import RunFolder

ROLES = ("rollout", "train")


@dataclass(frozen=True)
class Element:
    """One array element: `role` is 'rollout' or 'train'."""

    role: str
    run_path: str

    def __call__(self) -> str:
        """Do this element's part of the run; returns why the run ended ('' is complete). Raises what broke."""
        os.umask(0o077)
        # submitit has handlers of its own here, which would swallow TERM and requeue on USR2: until ours stand, both just end us.
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
        end_with_parent(os.getppid(), signal.SIGTERM)
        run = RunFolder.open(Path(self.run_path))
        enlist(run)
        if (outcome := run.ended()) is not None:
            return outcome["cause"]
        config = load(run.config)
        return {"rollout": _rollout, "train": _train}[self.role](run, config)


def _set_threads(number: int) -> None:
    # Oversubscribed OpenMP threads spin against each other; must be set before torch is imported.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(number)


def _rollout(run: RunFolder, config: Config) -> str:
    _set_threads(1)
    import asyncio

    from workers.rollout.worker import RolloutWorker

    async def work() -> str:
        worker = RolloutWorker(run, config)
        try:
            return await worker.work()
        except BaseException as error:
            # With a coordinator it is for that one to say what follows; without one nobody else could.
            if not worker.in_touch:
                run.end(f"a rollout worker (process {os.getpid()}) failed without a coordinator to tell: {first_cause(error)}", "rollout")
            raise

    return asyncio.run(work())


def _train(run: RunFolder, config: Config) -> str:
    _set_threads(config.trainer.num_threads)
    # The coordinator starts first: it and the rollout workers get ready while Megatron is being imported.
    from workers.trainer.link import CoordinatorLink

    link = CoordinatorLink(run, config)
    try:
        from workers.trainer.worker import TrainerWorker

        cause = TrainerWorker(run, config, link).train()
    except BaseException as error:
        traceback.print_exc()
        link.fail(f"the trainer failed: {type(error).__name__}: {error}")
        link.close()
        raise
    link.close()
    if cause:
        sys.exit(1)
    return cause
