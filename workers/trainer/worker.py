"""The trainer's process: updates the model whenever a batch is there.

    coordinator (child process) --Batch--> groups -> advantages -> engine.train_step -> publish -> StepFinished --> v + 1
                                                     (proximal log-probs, PPO minibatches)    |
                                            rollout workers <--read-- published weights <-----+
                                            checkpoints/ <-- state of trainer and coordinator, when due and before leaving

Who waits for whom: the trainer waits for the batch only; rollouts go on while it computes and publishes. With several ranks, rank 0
does all this, and tells the others (ranks.py) what to compute with it.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from workers import checkpoints
from workers.checkpoints import Checkpoint, Fenced
from workers.config import Config
from workers.messages.types import Batch, CheckpointRequest, Finish, Message, Version
from workers.rundir import RunFolder
from workers.trainer.link import CoordinatorLink, DrainRequested, RunEnded
from workers.trainer.megatron.checkpoint import CheckpointError
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.model import DTYPES
from workers.trainer.megatron.stop import StepAbandoned
from workers.trainer.ranks import IDLE_S, Ranks
from workers.trainer.train_batch import train_batch
from workers.weights.publisher import Publisher, write_hf_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json")


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
        if restored is not None:
            self._engine.load_state(restored.trainer)
        self.version = Version(epoch, self._engine.num_steps)
        self._publisher = Publisher(run.weights(config.weights.dir), model, DTYPES[config.engine.dtype])
        self._published = False
        self._saved_at, self._saved_step = time.monotonic(), self.version.step

    def train(self) -> Ending:
        """Train until the run is over, or until this incarnation is told to leave."""
        try:
            self._link.wait_until_welcome()
            self._publish({}, 0)
            while True:
                self._step()
                if self._checkpoint_due():
                    self._save_if_possible()
        except RunEnded as end:
            self._tell(Finish(str(end)))
            if not str(end) and self.config.trainer.export_final:
                self._export()
            return Ending("ended" if str(end) else "finished", str(end))
        except (DrainRequested, StepAbandoned):
            return self._leave()
        except Fenced as error:
            self._tell(Finish(str(error)))
            return Ending("fenced", str(error))

    def _leave(self) -> Ending:
        """Save the state of the last completed step, which is what the next incarnation goes on from."""
        try:
            if self._published:
                self._save(final=True)
            self._tell(Finish(self._link.drain_reason))
        except (RunEnded, Fenced) as end:
            self._tell(Finish(str(end)))
            return Ending("fenced" if isinstance(end, Fenced) else "ended" if str(end) else "finished", str(end))
        return Ending("drained", self._link.drain_reason)

    def _step(self) -> None:
        started = time.monotonic()
        batch = self._next_batch()
        received = time.monotonic()
        self._tell(batch)
        metrics, tokens = train_batch(self._engine, self.config, batch, lambda: bool(self._link.drain_reason))
        metrics |= {"wait_batch_s": received - started, "train_s": time.monotonic() - received}
        self.version = Version(self.version.epoch, self.version.step + 1)
        self._publish(metrics, tokens)
        self._publisher.remove_older(batch.needed)

    def _next_batch(self) -> Batch:
        while True:
            batch = self._link.next_batch(self.version.step, IDLE_S if self._ranks.others else None)
            if batch is not None:
                return batch
            self._ranks.idle()

    def _publish(self, metrics: dict[str, float], tokens_trained: int) -> None:
        started = time.monotonic()
        if self.run.newest_epoch() != self.version.epoch:
            raise Fenced(f"version {self.version}: epoch {self.run.newest_epoch()} has begun, this one may publish nothing any more")
        announcement = self._publisher.publish(self._engine.iter_hf_tensors(), self.version)
        metrics["publish_s"] = time.monotonic() - started
        self._link.step_finished(announcement, metrics, tokens_trained)
        self._published = True

    def _checkpoint_due(self) -> bool:
        config, steps = self.config.checkpoint, self.version.step - self._saved_step
        by_time = config.every_minutes and time.monotonic() - self._saved_at >= 60 * config.every_minutes
        return bool(by_time) or bool(config.every_steps and steps >= config.every_steps)

    def _save_if_possible(self) -> None:
        """A checkpoint that cannot be written (a full disk) is no reason to stop: say so, and try again when the next one is due."""
        try:
            self._save(final=False)
        except (CheckpointError, OSError) as error:
            print(f"the checkpoint of step {self.version.step} could not be written, training goes on without it: {error}", flush=True)
            self._saved_at, self._saved_step = time.monotonic(), self.version.step

    def _save(self, final: bool) -> None:
        """Write the checkpoint of this step: every rank's part and the coordinator's, published as one."""
        folder = checkpoints.begin(self.run, self.version)
        self._tell(CheckpointRequest(self.version.step, str(folder), final))
        self._engine.save_state(folder / checkpoints.TRAINER)
        self._link.save(self.version.step, folder, final)
        checkpoints.commit(self.run, folder, self.version, self.config.checkpoint.keep)
        self._saved_at, self._saved_step = time.monotonic(), self.version.step

    def _tell(self, message: Message) -> None:
        self._ranks.tell(message)

    def _export(self) -> None:
        """Write the trained model as a Hugging Face folder into the run folder."""
        model, final = Path(self.config.model.path), self.run.final_model.with_suffix(".tmp")
        for earlier in (final, self.run.final_model):  # of an incarnation that was killed at this point
            shutil.rmtree(earlier, ignore_errors=True)
        final.mkdir(mode=0o700)
        write_hf_folder(final, self._engine.iter_hf_tensors(), model, DTYPES[self.config.trainer.dtype])
        for name in TOKENIZER_FILES:
            if (model / name).is_file():
                shutil.copy(model / name, final / name)
        final.rename(self.run.final_model)
