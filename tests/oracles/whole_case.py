"""Training by the papers beside the engine: configs of all algorithms, batches, and a loop with a Hugging Face model and torch's AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import yaml

from tests.oracles import policy
from tests.oracles.padded import Padded, Rows, forward, pad, rows_of
from tests.oracles.papers import PAPERS
from tests.support.hf_reference import ReferenceLearner, load_reference, saved_tensors
from tests.support.megatron_case import config, make_groups
from workers.config import Advantage, AlgorithmConfig, Config, ImportanceLevel, KlEstimator, KlPlace, OffPolicy, Surrogate
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "algorithm"
FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
KIND = "qwen3-tied"
NUM_STEPS = 2
NUM_GROUPS = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo-entropy-dual": {"entropy_weight": 0.01, "dual_clip": 1.5},
    "decoupled_ppo-batch-k2": {"advantage": Advantage.batch_norm, "kl_weight": 0.1, "kl_estimator": KlEstimator.k2},
    "reinforce_pp-baseline": {"advantage": Advantage.reinforce_pp_baseline, "kl_weight": 0.0},
    "rloo-paper": {"surrogate": Surrogate.none, "off_policy": OffPolicy.clamp},
    "distillation-rewards": {"advantage": Advantage.group_norm, "kl_weight": 0.3},
    "tis-sequence": {"behavior_level": ImportanceLevel.sequence},
}
Results = dict[str, np.ndarray]


def algorithm(name: str) -> AlgorithmConfig:
    """That of a file, or of a variant of one."""
    text = (FOLDER / f"{name.split('-')[0]}.yaml").read_text()
    found = msgspec.convert(yaml.safe_load(text), AlgorithmConfig)
    for key, value in VARIANTS.get(name, {}).items():
        setattr(found, key, value)
    found.check()
    return found


def setup(name: str, teacher: Path | None = None, **trainer: Any) -> Config:
    """Two minibatches a step, and steps that are large enough for ratios to leave their bounds. `teacher`: of what learns from one."""
    result = config(**{"num_minibatches": 2, "clip_grad": 0.05, "weight_decay": 0.1, "adam_eps": 1e-5, "lr": 1e-2, **trainer})
    result.algorithm = algorithm(name)
    if result.algorithm.kl_in is KlPlace.advantage and teacher is not None:
        result.algorithm.teacher = str(teacher)
    result.workflow.max_new_tokens = 16
    return result


def write_behavior(folder: Path) -> None:
    """Behaviour log-probs of all steps near the starting model's, some far: `behavior.npz`."""
    model, rng, found = load_reference(folder), np.random.default_rng(3), {}
    for step in range(NUM_STEPS):
        with torch.no_grad():
            logprobs, _ = forward(model, make_groups(NUM_GROUPS, seed=step), config().workflow.temperature)
        noise = rng.normal(0, 0.3, logprobs.shape) - 2.5 * (rng.random(logprobs.shape) > 0.9)
        found[str(step)] = logprobs.numpy() + noise.astype(np.float32)
    np.savez(folder / "behavior.npz", **found)


def batch(folder: Path, step: int) -> list[TrainGroup]:
    """The groups of a step, one without any advantage; tokens of several versions, and garbage under the mask."""
    groups, rng = make_groups(NUM_GROUPS, seed=step), np.random.default_rng(step)
    groups[1].rewards = np.full(5, 0.3, np.float32)
    rows = iter(np.load(folder / "behavior.npz")[str(step)])
    for group in groups:
        group.behavior_logprobs = [np.where(mask, next(rows)[:len(mask)], np.float32(np.nan)) for mask in group.loss_mask]
        group.versions = [rng.integers(-3, step + 1, len(mask), np.int32) for mask in group.loss_mask]
    return groups


def minibatches_of(setup: Config) -> list[np.ndarray]:
    return np.array_split(np.arange(NUM_GROUPS), setup.trainer.num_minibatches)


def train(engine: MegatronEngine, groups: list[TrainGroup], setup: Config) -> dict[str, float]:
    """A training step, in which each copy of the model takes its part of every minibatch."""
    own: list[int] = []
    minibatches = []
    for part in minibatches_of(setup):
        mine = part[process_group.copy_index()::process_group.num_copies()].tolist()
        minibatches.append(list(range(len(own), len(own) + len(mine))))
        own += mine
    return engine.train_step([groups[index] for index in own], minibatches)


def trained_by_engine(engine: MegatronEngine, folder: Path, setup: Config) -> Results:
    """Losses and gradient norms of all steps, and the weights afterwards (on rank 0)."""
    found: Results = {}
    for step in range(NUM_STEPS):
        metrics = train(engine, batch(folder, step), setup)
        found |= {f"{step}:{key}": np.array(metrics[key]) for key in ("loss", "grad_norm", "num_tokens")}
    return found | {f"weight:{name}": tensor.float().numpy().copy() for name, tensor in engine.iter_hf_tensors()}


class PaperTraining:
    """The algorithm of a paper, its policy begun as the model in `folder`."""

    def __init__(self, folder: Path, name: str, setup: Config) -> None:
        self._setup, self._paper = setup, PAPERS[name]
        self._learner = ReferenceLearner(load_reference(folder), setup.trainer, setup.trainer.lr)
        self._reference = load_reference(Path(setup.algorithm.teacher) if setup.algorithm.teacher else folder)

    def run(self, folder: Path) -> Results:
        """As `trained_by_engine`."""
        found: Results = {}
        for step in range(NUM_STEPS):
            groups = batch(folder, step)
            loss, norm = self._step(groups, step)
            tokens = sum(group.num_valid_tokens for group in groups)
            found |= {f"{step}:loss": np.array(loss), f"{step}:grad_norm": np.array(norm), f"{step}:num_tokens": np.array(float(tokens))}
        return found | {f"weight:{name}": tensor.numpy() for name, tensor in saved_tensors(self._learner.model).items()}

    def _step(self, groups: list[TrainGroup], version: int) -> tuple[float, float]:
        setup, temperature = self._setup, self._setup.workflow.temperature
        masks = rows_of(groups, "loss_mask")
        with torch.no_grad():
            proximal, reference = (forward(model, groups, temperature)[0] for model in (self._learner.model, self._reference))
        gaps: Rows = [row[:len(mask)].tolist() for row, mask in zip((proximal - reference).double(), masks, strict=True)]
        advantages = self._paper.advantages(groups, gaps, setup.algorithm)
        moved = [(row[:len(old)].double() - torch.from_numpy(old).double()).tolist()
                 for row, old in zip(proximal, rows_of(groups, "behavior_logprobs"), strict=True)]
        kept = policy.m2po(moved, advantages, [mask.tolist() for mask in masks], setup.algorithm.second_moment)
        found, responses = [], np.split(np.arange(len(masks)), np.cumsum([group.num_samples for group in groups])[:-1])
        for part in minibatches_of(setup):
            own = [groups[index] for index in part]
            rows = np.concatenate([responses[index] for index in part])
            current, entropy = forward(self._learner.model, own, temperature)
            mask, width = pad(rows_of(own, "loss_mask")), current.shape[1]
            found.append(self._learner.step(self._paper.loss(Padded(
                current, entropy, proximal[rows, :width], pad(rows_of(own, "behavior_logprobs"), mask), reference[rows, :width],
                pad([advantages[row] for row in rows], mask), mask, pad([kept[row] for row in rows]),
                (version - pad(rows_of(own, "versions"))).clamp(min=0)), setup)))
        loss, norm = np.mean(found, axis=0).tolist()
        return loss, norm


def assert_equal(found: Results, expected: Results) -> None:
    """Losses to 1e-5 (absolutely 1e-6: their terms cancel), gradient norms to 1e-4, weights to 1e-5 of their norm; counts exactly."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.startswith("weight:"):
            assert np.linalg.norm(found[name] - value) <= 1e-5 * np.linalg.norm(value), name
        else:
            rel, absolute = {"loss": (1e-5, 1e-6), "grad_norm": (1e-4, 0.0), "num_tokens": (0.0, 0.0)}[name.split(":")[1]]
            assert abs(float(found[name]) - float(value)) <= rel * abs(float(value)) + absolute, (name, found[name], value)
