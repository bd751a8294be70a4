"""What submitit runs on a node: one element of the inference, the reward or the training array.

Only names are pickled: the role and the run folder. Everything heavy is imported inside `__call__`, so that the launcher
can hold these objects without torch or zmq.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from workers.config import ClusterKind, load
from workers.run.folder import RunFolder
from workers.run.gpus import set_environment
from workers.run.processes import GPUS, distinct, end_with_parent, enlist, keep_logging


@dataclass(frozen=True)
class Element:
    """One array element: `role` is 'rollout', 'evaluation', 'reward' or 'train'. `num_ranks`: processes that train, on one machine (on SLURM they are
    the job's tasks)."""

    role: str
    run_path: str
    num_ranks: int = 1

    def __call__(self) -> str:
        """Do this element's part of the run; returns why the run ended ('' is complete). Raises what broke."""
        os.umask(0o077)
        # submitit has handlers of its own here, which would swallow TERM and requeue on USR2: until ours stand, both just end us.
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
        end_with_parent(os.getppid(), signal.SIGTERM)
        keep_logging()
        run = RunFolder.open(Path(self.run_path))
        if (outcome := run.ended()) is not None:
            return outcome["cause"]
        config = load(run.config)
        run = run.patient(config.run.outage_minutes)
        if config.cluster.kind is ClusterKind.local:
            enlist(run)
        else:
            with contextlib.suppress(OSError):  # where the folder is full or away, the job's script takes it for an element that has not begun
                (run.jobs / f".begun.{os.environ.get('SLURM_JOB_ID')}").touch()  # slurm/stay_after_failure.sh
        if self.role in ("rollout", "evaluation"):
            _set_threads(1)
            from workers.rollout.nodes.other_nodes import place_here

            if (place := place_here(config)) is not None and place.rank > 0:
                from workers.rollout.nodes.node import run_node

                return run_node(run, config, place)
        if self.role == "rollout":
            from workers.rollout.worker import RolloutWorker
            from workers.slurm.element import run_element

            return run_element(run, config, "inference", RolloutWorker(run, config))
        if self.role == "evaluation":
            from workers.evaluation.element import EvaluationElement
            from workers.slurm.element import run_element

            return run_element(run, config, "inference", EvaluationElement(run, config))
        if self.role == "reward":
            _set_threads(1)
            from workers.reward.remote.element import RewardElement
            from workers.slurm.element import run_element

            return run_element(run, config, "reward", RewardElement(run, config))
        if config.cluster.kind is ClusterKind.local:
            _take_gpus()
        set_environment(config)
        _set_threads(config.trainer.num_threads)
        from workers.trainer.element import run_trainer

        return run_trainer(run, config, self.num_ranks)


def _take_gpus() -> None:
    """See the GPUs that the launcher sees."""
    visible = os.environ.get(GPUS, "all")
    if visible == "all":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = distinct(visible)


def _set_threads(number: int) -> None:
    # Oversubscribed OpenMP threads spin against each other; must be set before torch is imported.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(number)
