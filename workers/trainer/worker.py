"""The trainer's process: updates the model whenever a batch is there.

    coordinator (child process) --Batch--> groups -> advantages -> engine.train_step -> publish -> StepFinished --> v + 1
                                                     (proximal log-probs, PPO minibatches)    |
                                            rollout workers <--read-- published weights <-----+
                                            checkpoints/ <-- state of trainer and coordinator, when due and before leaving

Who waits for whom: the trainer waits for the batch only, and asks for the next one while it computes; rollouts go on while it computes and
publishes. With several ranks, rank 0 does all this, and tells the others (ranks.py) what to do; their batches come from the coordinator.

A supervised run (`run.kind=supervised`) has no rollouts: nothing is published, and the held-out loss is measured here when it is due.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from workers.checkpoints import Checkpoint, Fenced
from workers.config import Config
from workers.messages.types import Announcement, Finish, Version
from workers.rundir import RunFolder
from workers.trainer.exporter import Exporter
from workers.trainer.heldout import HeldoutExamples
from workers.trainer.inbox import Received
from workers.trainer.link import CoordinatorLink, DrainRequested, RunEnded
from workers.trainer.megatron import process_group
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.model import DTYPES
from workers.trainer.megatron.stop import StepAbandoned
from workers.trainer.ranks import IDLE_S, MeasureHeldout, Order, Ranks, StillThere, TrainStep, WriteWeights, spread_in_copy
from workers.trainer.run_saver import RunSaver
from workers.trainer.train_batch import train_batch
from workers.weights.publisher import Publisher

NOWHERE = "not published"

OWN_SIGNAL_S = 15.0
"""How long rank 0 waits for its own signal after another rank had one: srun passes them to all nodes, but not at once."""


@dataclass(frozen=True)
class Ending:
    """How training came to its end in this process: 'finished', 'ended' (the run ended early), 'drained' (saved), 'fenced'."""

    how: str
    cause: str


class TrainerWorker:
    """Rank 0 of a trainer: engine, publisher and the link to the coordinator; goes on from `restored` if that is given."""

    def __init__(self, run: RunFolder, config: Config, link: CoordinatorLink, epoch: int, restored: Checkpoint | None, ranks: Ranks) -> None:
        self.run, self.config, self._link, self._ranks = run, config, link, ranks
        model = Path(config.model.path)
        self._engine = MegatronEngine(config, model, ranks.gang)
        link.num_shares = process_group.num_copies()
        if restored is not None:
            self._engine.load_state(restored.trainer)
        self.version = Version(epoch, self._engine.num_steps)
        self._heldout = HeldoutExamples(config, self._engine) if config.supervised else None
        self._publisher = None if config.supervised else Publisher(run.weights(config.weights.dir), model, DTYPES[config.engine.dtype])
        self._begins_new = restored is None
        self._published = False
        self._saver = RunSaver(run, config, link, ranks, self._engine, self.version, restored)
        self._exporter = Exporter(run, config, ranks, self._engine.architecture, self._weights)

    def train(self) -> Ending:
        """Train until the run is over, or until this incarnation is told to leave."""
        try:
            self._link.wait_until_welcome()
            self._publish({})
            while True:
                self._step()
                self._saver.after_step(self.version)
                self._exporter.after_step(self.version)
        except RunEnded as end:
            return self._finish(str(end))
        except (DrainRequested, StepAbandoned):
            return self._leave()
        except Fenced as error:
            self._tell(Finish(str(error)))
            return Ending("fenced", str(error))

    def _finish(self, cause: str) -> Ending:
        """The run is over: if it is complete, nothing of it is left half-written."""
        if not cause:
            try:
                self._saver.wait()
                if self.config.trainer.export_final:
                    self._exporter.export_final(self.version)
            except Fenced as error:
                self._tell(Finish(str(error)))
                return Ending("fenced", str(error))
        self._tell(Finish(cause))
        return Ending("ended" if cause else "finished", cause)

    def _leave(self) -> Ending:
        """Save the state of the last completed step, which is what the next incarnation goes on from."""
        try:
            if self._published:
                self._saver.save_last(self.version)
            self._tell(Finish(self._link.wait_for_drain(OWN_SIGNAL_S)))
        except (RunEnded, Fenced) as end:
            self._tell(Finish(str(end)))
            return Ending("fenced" if isinstance(end, Fenced) else "ended" if str(end) else "finished", str(end))
        return Ending("drained", self._link.drain_reason)

    def _step(self) -> None:
        started = time.monotonic()
        received = self._next_batch()
        waited = time.monotonic() - started
        if self.config.trainer.prefetch:
            self._link.ask(self.version.step + 1)
        self._tell(TrainStep(self.version.step))
        metrics = train_batch(self._engine, self.config, spread_in_copy(received.batch), lambda: bool(self._link.drain_reason))
        metrics |= {"wait_batch_s": waited, "batch_transfer_s": received.at - received.batch.formed_at,
                    "train_s": time.monotonic() - started - waited}
        self.version = Version(self.version.epoch, self.version.step + 1)
        self._publish(metrics)
        if self._link.needed is not None and self._publisher is not None:
            self._publisher.remove_older(self._link.needed)

    def _next_batch(self) -> Received:
        while True:
            received = self._link.next_batch(self.version.step, IDLE_S if self._ranks.others else None)
            if received is not None:
                return received
            self._tell(StillThere())

    def _publish(self, metrics: dict[str, float]) -> None:
        started = time.monotonic()
        if self.run.newest_epoch() != self.version.epoch:
            raise Fenced(f"version {self.version}: epoch {self.run.newest_epoch()} has begun, this one may publish nothing any more")
        metrics |= self._measure_heldout()
        announcement = self._publisher.publish(self._weights(), self.version) if self._publisher else Announcement(self.version, NOWHERE, NOWHERE)
        metrics |= {"publish_s": time.monotonic() - started, **self._saver.take_metrics(), **self._exporter.take_metrics()}
        self._link.step_finished(announcement, metrics)
        self._published = True

    def _measure_heldout(self) -> dict[str, float]:
        """The held-out loss of this version, where it is due: before the first step, every `evaluation.every_steps`, after the last."""
        step, every = self.version.step, self.config.evaluation.every_steps
        due = (every and step % every == 0) or step >= self.config.run.num_steps
        if self._heldout is None or not (due if self._published else self._begins_new):
            return {}
        started = time.monotonic()
        self._tell(MeasureHeldout())
        return self._heldout.measure() | {"heldout_s": time.monotonic() - started}

    def _tell(self, order: Order) -> None:
        self._ranks.tell(order)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, which all ranks give together: to be gone through to the end."""
        self._tell(WriteWeights())
        return self._engine.iter_hf_tensors()
