"""The trainer's process: updates the model whenever a batch is there.

    coordinator (child process) --Batch--> groups -> advantages -> engine.train_step -> copy the weights -> next step
                                                     (proximal log-probs, PPO minibatches)  |
                          rollout workers <--fetch-- digests, announced: StepFinished <-----+ a thread (announcer.py, rank_publisher.py)
                                            checkpoints/ <-- state of trainer and coordinator, when due and before leaving

Who waits for whom: the trainer waits for the batch only, and asks for the next one while it computes; rollouts go on while it computes and
publishes. The next step begins while the last version is still being published; the version after that, checkpoints, exports and leaving
wait until it is announced. With several ranks, rank 0 does all this, and tells the others (ranks.py) what to do; their batches come from the
coordinator.

A supervised run (`run.kind=supervised`) has no rollouts: nothing is published, and the held-out loss is measured here when it is due.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from workers.config import Config
from workers.messages.from_coordinator import Finish
from workers.messages.parts import Announcement, Version
from workers.run.checkpoints import Checkpoint, Fenced, check_epoch
from workers.run.files import read_lines
from workers.run.folder import RunFolder
from workers.run.outage import patiently
from workers.trainer.coordinator_link.client import CoordinatorLink
from workers.trainer.coordinator_link.endings import DrainRequested, RunEnded
from workers.trainer.coordinator_link.inbox import Received
from workers.trainer.heldout import HeldoutExamples
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group
from workers.trainer.megatron.parallel.stop_gate import StepAbandoned
from workers.trainer.orders import MeasureHeldout, Order, StillThere, TrainStep, WriteAdapters, WriteWeights
from workers.trainer.ranks import IDLE_S, Ranks, spread_in_copy
from workers.trainer.saving.exporter import Exporter
from workers.trainer.saving.run_saver import RunSaver
from workers.trainer.selftest.self_test import SelfTest, SelfTestFailed
from workers.trainer.train_step import kept_logprobs, train_batch
from workers.trainer.weights.announcer import Announcer
from workers.trainer.weights.broadcast import WeightGroup
from workers.trainer.weights.lanes import Lanes
from workers.trainer.weights.rank_publisher import RankPublisher

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
        self._announcer = None if config.supervised else Announcer(
            run, config, link, ranks, RankPublisher(run, config, self._engine, epoch, link.wake), self._weight_group())
        self._self_test = SelfTest(config, self._engine.architecture, self.version, partial(print, flush=True))
        self._begins_new, self._restored = restored is None, restored
        self._published = False
        self._saver = RunSaver(run, config, link, ranks, self._engine, self.version, restored, self._settle)
        self._exporter = Exporter(run, config, ranks, self._engine.architecture, self._weights, self._adapters)

    def train(self) -> Ending:
        """Train until the run is over, or until this incarnation is told to leave."""
        try:
            ending = self._train()
        finally:
            if self._announcer is not None:
                self._announcer.close()
        self._saver.abandon()
        self._exporter.abandon()
        self._engine.close()
        return ending

    def _train(self) -> Ending:
        try:
            self._link.wait_until_welcome()
            self._publish({})
            if self._restored is not None and self._exporter.lacks(self._restored.version):
                self._export()
            while True:
                self._step()
                self._export()  # first: the coordinator may end the run with this step, and answers no checkpoint then
                self._saver.after_step(self.version)
        except RunEnded as end:
            return self._finish(str(end))
        except (DrainRequested, StepAbandoned):
            return self._leave()
        except Fenced as error:
            self._tell(Finish(str(error)))
            return Ending("fenced", str(error))
        except SelfTestFailed as error:
            return self._refuse(str(error))

    def _finish(self, cause: str) -> Ending:
        """The run is over: if it is complete, nothing of it is left half-written."""
        if not cause:
            try:
                self._saver.finish()
                self._exporter.finish(self.version)
            except Fenced as error:
                self._tell(Finish(str(error)))
                return Ending("fenced", str(error))
        self._tell(Finish(cause))
        return Ending("ended" if cause else "finished", cause)

    def _refuse(self, cause: str) -> Ending:
        """End the run before an update that would spoil it: another incarnation would come to the same."""
        self._tell(Finish(cause))
        if self.run.newest_epoch() != self.version.epoch:
            return Ending("fenced", cause)
        self.run.end(cause, "trainer")
        return Ending("ended", cause)

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
            self._link.ask(self.version.step + 1, self.version.step)
        self._tell(TrainStep(self.version.step))
        metrics = train_batch(self._engine, spread_in_copy(received.batch), lambda: bool(self._link.drain_reason), self._self_test)
        most_bytes = self.config.transport.max_message_mb << 19  # half of a message, beside its head
        if (logprobs := kept_logprobs(self._engine, received.batch, self.config.rollout.keep, most_bytes)) is not None:
            self._link.say(logprobs)
        metrics |= {"wait_batch_s": waited, "batch_transfer_s": received.at - received.batch.formed_at,
                    "train_s": time.monotonic() - started - waited}
        self.version = Version(self.version.epoch, self.version.step + 1)
        self._publish(metrics)

    def _next_batch(self) -> Received:
        while True:
            if self._announcer is not None:
                self._announcer.attend()
            received = self._link.next_batch(self.version.step, IDLE_S)
            if received is not None:
                return received
            self._tell(StillThere())

    def _publish(self, metrics: dict[str, float]) -> None:
        metrics |= self._measure_heldout() | self._saver.take_metrics() | self._exporter.take_metrics()
        if self._announcer is not None:
            self._announcer.publish(self.version, metrics)
        else:
            check_epoch(self.run, self.version, "version")
            self._link.step_finished(Announcement(self.version, NOWHERE, NOWHERE), metrics)
        self._published = True

    def _settle(self) -> None:
        """Wait until the coordinator knows of the newest version. Raises what has prevented its publication."""
        if self._announcer is not None:
            self._announcer.wait()

    def _export(self) -> None:
        if self._exporter.due(self.version.step):
            self._settle()
        self._exporter.after_step(self.version)

    def _measure_heldout(self) -> dict[str, float]:
        """The held-out loss of this version, where it is due: before the first step, every `evaluation.every_steps`, after the last."""
        step, every = self.version.step, self.config.evaluation.every_steps
        last = step >= self.config.run.num_steps
        if self._heldout is None or not self.config.evaluation.enabled:
            return {}
        if self._published:
            due = last or (every and step % every == 0)
        else:  # an incarnation before may have measured it
            known = partial(read_lines, self.run.evaluations)
            due = self._begins_new or (last and all(line["step"] != step for line in patiently(self.run, known)))
        if not due:
            return {}
        started = time.monotonic()
        self._tell(MeasureHeldout())
        return self._heldout.measure() | {"heldout_s": time.monotonic() - started}

    def _tell(self, order: Order) -> None:
        self._ranks.tell(order)

    def _weight_group(self) -> WeightGroup | None:
        """Rank 0's part of broadcasts, where weights travel by them."""
        if not self.config.broadcasts:
            return None
        group = WeightGroup(Lanes(self.config, self._engine.architecture, self._engine.iter_shards), self._ranks, self._link.say)
        self._link.on_broadcast = group.take
        return group

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, which all ranks give together: to be gone through to the end."""
        self._tell(WriteWeights())
        return self._engine.iter_hf_tensors()

    def _adapters(self) -> Iterator[tuple[str, Tensor]]:
        """The same of adapters (trainer.lora)."""
        self._tell(WriteAdapters())
        return self._engine.iter_adapter_tensors()
