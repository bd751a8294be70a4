"""Saves the state of a run: when it is due, and before rank 0 leaves.

    at the end of a step    begin a folder -> the coordinator writes its part -> every rank copies its part of the trainer's state
    then, beside training   every rank writes its part -> rank 0 seals the folder and publishes it --at the end of a later step--> known

Both parts are of the same cut, "this step completed, the next one not begun". One checkpoint is written at a time: where the next is due
before that, training waits (`checkpoint_wait_s`). A process that dies in between leaves a folder that counts for nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from workers.config import Config
from workers.messages.from_worker import CheckpointRequest
from workers.messages.parts import Version
from workers.run import checkpoints
from workers.run.checkpoints import Checkpoint
from workers.run.folder import RunFolder
from workers.run.retention import Retention
from workers.trainer.background import LEAVE_S, Files, PartSaver
from workers.trainer.coordinator_link.client import CoordinatorLink
from workers.trainer.megatron.checkpoint.checkpoint import CheckpointError
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.ranks import IDLE_S, Ranks


class RunSaver:
    """Rank 0's; `version` is the one that this incarnation begins with. `settle` returns when the coordinator is at the same step as training."""

    def __init__(self, run: RunFolder, config: Config, link: CoordinatorLink, ranks: Ranks, engine: MegatronEngine, version: Version,
                 restored: Checkpoint | None, settle: Callable[[], None] = lambda: None) -> None:
        self._run, self._config, self._link, self._ranks = run, config, link, ranks
        self._parts = PartSaver(engine, config.checkpoint.background)
        self._retention = Retention(config.checkpoint.keep, config.checkpoint.keep_best, config.evaluation.every_steps,
                                    restored.version if restored else None)
        self._saved_at, self._saved_step = time.monotonic(), version.step
        self._settle = settle
        self._version, self._folder = version, run.checkpoints / f".{version}.tmp"  # of the one that is being written
        self._stood_s = self._waited_s = 0.0

    def due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved: by steps, by time, or because that step is evaluated."""
        config, evaluated_every = self._config.checkpoint, self._retention.evaluated_every
        by_steps = config.every_steps and step - self._saved_step >= config.every_steps
        by_time = config.every_minutes and time.monotonic() - self._saved_at >= 60 * config.every_minutes
        evaluated = config.keep_best and evaluated_every and step % evaluated_every == 0
        return bool(by_steps or by_time or evaluated)

    def after_step(self, version: Version) -> None:
        """Save if that is due. What cannot be written (a full disk) is no reason to stop: it is said, and tried again when the next is due.

        Raises `Fenced` where another incarnation has begun, `RunEnded`.
        """
        started = time.monotonic()
        try:
            self._parts.writing.end(timeout_s=0)
        except (CheckpointError, OSError) as error:
            self._give_up(error)
        if self.due(version.step):
            try:
                self._save(version, final=False)
            except (CheckpointError, OSError) as error:
                self._give_up(error)
            self._saved_at, self._saved_step = time.monotonic(), version.step
        self._stood_s += time.monotonic() - started

    def save_last(self, version: Version) -> None:
        """Save before leaving, and return when it is published. Raises what prevents that."""
        self._save(version, final=True)

    def finish(self) -> None:
        """The run is complete: wait for the checkpoint that is being written; one that was only begun, as the end came, is given up. Raises
        `Fenced`."""
        self.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises `Fenced`."""
        started = time.monotonic()
        try:
            while not self._parts.writing.end(IDLE_S):
                self._ranks.keep_waiting()
        except (CheckpointError, OSError) as error:
            self._give_up(error)
        self._waited_s += time.monotonic() - started

    def abandon(self) -> None:
        """This process leaves: what is still being written is of no use."""
        self._parts.writing.abandon(LEAVE_S)

    def take_metrics(self) -> dict[str, float]:
        """Seconds that training stood still for checkpoints since this was last asked, and of those the ones spent waiting for the one before."""
        metrics = {"checkpoint_s": self._stood_s, "checkpoint_wait_s": self._waited_s}
        self._stood_s = self._waited_s = 0.0
        return metrics

    def _save(self, version: Version, final: bool) -> None:
        """The checkpoint of `version`: the coordinator's part and every rank's, published as one."""
        self.wait()
        self._settle()
        self._version = version
        folder = self._folder = checkpoints.begin(self._run, version)
        self._link.save(version.step, folder, final)
        self._ranks.tell(CheckpointRequest(version.step, str(folder), final))
        self._parts.save(folder / checkpoints.TRAINER, final, lambda files: self._publish(folder, version, files))

    def _publish(self, folder: Path, version: Version, files: Files) -> None:
        written = {f"{checkpoints.TRAINER}/{name}": entry for name, entry in files.items()}
        checkpoints.commit(self._run, folder, version, self._retention, written)

    def _give_up(self, error: Exception) -> None:
        print(f"the checkpoint of step {self._version.step} could not be written, training goes on without it: {error}", flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
