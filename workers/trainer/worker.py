"""The trainer's process: updates the model whenever a batch is there.

    coordinator (child process) --Batch--> groups -> advantages -> engine.train_step -> publish -> StepFinished --> v + 1
                                                     (proximal log-probs, PPO minibatches)    |
                                            rollout workers <--read-- published weights <-----+

Who waits for whom: the trainer waits for the batch only; rollouts go on while it computes and publishes.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import torch

from workers.algorithms.advantages import batch_norm, group_norm
from workers.config import Advantage, Config
from workers.messages.groups import head_step, samples
from workers.messages.types import Group, Version
from workers.rundir import RunFolder
from workers.trainer.batch import TrainGroup
from workers.trainer.link import CoordinatorLink, RunEnded
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.model import DTYPES
from workers.weights.publisher import Publisher, write_hf_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json")


def to_train_group(group: Group) -> TrainGroup:
    """A received group as the engine takes it."""
    views = samples(group)
    return TrainGroup(
        group_id=group.group_id, prompt=np.asarray(group.prompt, np.int32),
        responses=[np.asarray(view.tokens, np.int32) for view in views],
        behavior_logprobs=[np.asarray(view.logprobs, np.float32) for view in views],
        loss_mask=[np.asarray(view.loss_mask, np.bool_) for view in views],
        rewards=np.asarray(group.rewards, np.float32), versions=[np.asarray(view.steps, np.int32) for view in views],
        head_version=head_step(group))


def compute_advantages(kind: Advantage, groups: list[TrainGroup]) -> list[np.ndarray]:
    """Advantages, float32 [n] for each group."""
    if kind is Advantage.group_norm:
        return [group_norm(torch.from_numpy(group.rewards.copy())).numpy() for group in groups]
    flat = batch_norm(torch.from_numpy(np.concatenate([group.rewards for group in groups]))).numpy()
    return np.split(flat, np.cumsum([group.num_samples for group in groups])[:-1])


class TrainerWorker:
    """One trainer: engine, publisher and the link to the coordinator."""

    def __init__(self, run: RunFolder, config: Config, link: CoordinatorLink) -> None:
        self.run, self.config, self._link = run, config, link
        model = Path(config.model.path)
        self._engine = MegatronEngine(config, model)
        self._publisher = Publisher(run.weights(config.weights.dir), model, DTYPES[config.engine.dtype])

    def train(self) -> str:
        """Train until the run is over; returns its cause ('' is complete)."""
        try:
            epoch, step = self._link.epoch, 0
            self._publish(Version(epoch, step), {}, 0)
            while True:
                step = self._step(Version(epoch, step)).step
        except RunEnded as end:
            if not str(end) and self.config.trainer.export_final:
                self._export()
            return str(end)

    def _step(self, version: Version) -> Version:
        started = time.monotonic()
        batch = self._link.next_batch(version.step)
        received = time.monotonic()
        groups = [to_train_group(group) for group in batch.groups]
        advantages = compute_advantages(self.config.algorithm.advantage, groups)
        metrics = self._engine.train_step(groups, None, advantages)
        trained = time.monotonic()
        metrics |= {"wait_batch_s": received - started, "train_s": trained - received}
        following = Version(version.epoch, version.step + 1)
        self._publish(following, metrics, sum(group.num_valid_tokens for group in groups))
        self._publisher.remove_older(batch.needed)
        return following

    def _publish(self, version: Version, metrics: dict[str, float], tokens_trained: int) -> None:
        started = time.monotonic()
        announcement = self._publisher.publish(self._engine.iter_hf_tensors(), version)
        metrics["publish_s"] = time.monotonic() - started
        self._link.step_finished(announcement, metrics, tokens_trained)

    def _export(self) -> None:
        """Write the trained model as a Hugging Face folder into the run folder."""
        model, final = Path(self.config.model.path), self.run.final_model.with_suffix(".tmp")
        final.mkdir(mode=0o700)
        write_hf_folder(final, self._engine.iter_hf_tensors(), model, DTYPES[self.config.trainer.dtype])
        for name in TOKENIZER_FILES:
            if (model / name).is_file():
                shutil.copy(model / name, final / name)
        final.rename(self.run.final_model)
