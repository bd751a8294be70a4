"""One run of benchmarks.staleness: a model learns sums from samples that are exactly `eta` versions old.

    version max(0, v - eta) --weights--> embedded engine --samples of step v--> verifier --> rewards
              ^                          (its loop, scheduler and sampler)                                   |
              +------- version v + 1 <--------------- MegatronEngine.train_step <----------------------------+

So the trainer, the engine, the verifier and the objective are those of a real run, and only the timing is not: every token of a batch is by
one version, whose age does not depend on the machine. With eta=inf that is version 0, the starting model, for ever.

As a program (`python -m benchmarks.staleness.run MODEL PARENT`) it answers orders as children.py says, each by a process of its own, forked
when all imports are done: imports take longer than many a run.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.children import answer_orders
from benchmarks.configs import composed
from benchmarks.sampler import Sampler, Weights
from launcher.config.schema import register
from workers.config import Config
from workers.coordinator.training.batch_split import divide_batch
from workers.data.prompts import open_prompts
from workers.reward import shaping
from workers.reward.verifiers import registry
from workers.run.processes import end_with_parent
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine

RIGHT = "numeric"
"""The verifier of held-out answers: right or wrong, whatever training is rewarded for."""
DATA_SEED = 1
"""Which prompts are held out: the same for all seeds, as all begin with one model, which must not have seen them."""
PROMPTS_APART = 1_000_000
"""Seeds begin so many training prompts apart."""


@dataclass(frozen=True)
class Case:
    """One run: `objective` names a file in conf/algorithm, `overrides` are all other settings, as on the command line."""

    objective: str
    eta: float
    seed: int
    overrides: tuple[str, ...]

    def config(self, model: Path) -> Config:
        """The composed and checked config. Raises `ConfigError`."""
        own = ["model=hf", f"model.path={model}", f"algorithm={self.objective}", f"run.seed={self.seed}"]
        return composed([*self.overrides, *own])


def behavior_version(step: int, eta: float) -> int:
    """The version that samples the batch of step `step` (from 0), which is trained on by version `step`."""
    return int(max(0.0, step - eta))


@dataclass
class Learning:
    """What a run came to: per step, and per evaluation `steps`, held-out `accuracy` (greedy) and `cpu_s` so far."""

    versions: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    clip_shares: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    diverged: str = ""


class Run:
    """Trains the model in folder `model` as `case` says, and evaluates it every so many steps."""

    def __init__(self, case: Case, model: Path, every: int) -> None:
        self._case, self._every = case, every
        self._config = config = case.config(model)
        self._prompts = open_prompts(config.data, config.reward, DATA_SEED)
        self._reward, self._right = registry.load(config.reward.verifier), registry.load(RIGHT)
        self._trainer, self._sampler = MegatronEngine(config, model), Sampler(config, model)
        self._folder = tempfile.TemporaryDirectory(prefix="headway-staleness-")
        self._weights = {0: self._copy(0)}

    def learn(self) -> Learning:
        """All steps, or those until a loss or gradient is not finite."""
        learning = Learning()
        self._evaluate(0, learning)
        for step in range(self._config.run.num_steps):
            try:
                self._step(step, learning)
            except FloatingPointError as error:
                learning.diverged = f"step {step + 1}: {error}"
                self._evaluate(step, learning)
                break
            if (step + 1) % self._every == 0 or step + 1 == self._config.run.num_steps:
                self._evaluate(step + 1, learning)
        return learning

    def _step(self, step: int, learning: Learning) -> None:
        config, version = self._config, behavior_version(step, self._case.eta)
        self._sampler.load(self._weights[version], version)
        groups = self._groups(step, version)
        divided = divide_batch([sum(map(len, group.responses)) for group in groups], config.trainer.num_minibatches, 1, [config.run.seed, step])
        metrics = self._trainer.train_step(groups, [copies[0] for copies in divided])
        self._weights[step + 1] = self._copy(step + 1)
        oldest = behavior_version(step + 1, self._case.eta)
        for version in [version for version in self._weights if 0 < version < oldest]:
            del self._weights[version]
            self._file(version).unlink()
        learning.versions.append(version)
        learning.rewards.append(float(np.concatenate([group.rewards for group in groups]).mean()))
        learning.gaps.append(metrics["gap_current_behavior"])
        learning.clip_shares.append(metrics["clip_share"])

    def _groups(self, step: int, version: int) -> list[TrainGroup]:
        """The batch of step `step`, sampled by the weights that the engine has, which are those of `version`."""
        config = self._config
        number, size = config.trainer.batch_groups, config.workflow.group_size
        first = config.run.seed * PROMPTS_APART + step * number
        prompts = [self._prompts.train(first + index) for index in range(number)]
        seed = (config.run.seed * config.run.num_steps + step) * number * size
        groups = []
        for prompt, requests in zip(prompts, self._sampler.sample(prompts, size, config.workflow.temperature, seed), strict=True):
            scores = [self._reward(prompt.text, self._sampler.text(request), prompt.reference) for request in requests]
            rewards = [shaping.reward(score, len(request.output), config.reward, config.workflow.max_new_tokens)
                       for score, request in zip(scores, requests, strict=True)]
            groups.append(TrainGroup(
                group_id=prompt.id, prompt=np.array(requests[0].prompt, np.int32),
                responses=[np.array(request.output, np.int32) for request in requests],
                behavior_logprobs=[np.array(request.logprobs, np.float32) for request in requests],
                loss_mask=[np.ones(len(request.output), np.bool_) for request in requests], rewards=np.array(rewards, np.float32),
                versions=[np.full(len(request.output), version, np.int32) for request in requests]))
        return groups

    def _evaluate(self, step: int, learning: Learning) -> None:
        """Held-out accuracy of the newest weights."""
        self._sampler.load(self._weights[step], step)
        heldout = self._prompts.heldout()
        answers = self._sampler.sample(heldout, 1, 0.0, 0)
        learning.accuracy.append(float(np.mean([self._right(prompt.text, self._sampler.text(request), prompt.reference)
                                                for prompt, [request] in zip(heldout, answers, strict=True)])))
        learning.steps.append(step)
        learning.cpu_s.append(round(time.process_time(), 2))

    def _file(self, version: int) -> Path:
        return Path(self._folder.name) / f"{version}.safetensors"

    def _copy(self, version: int) -> Weights:
        """The weights in training, in a file of which memory is a view: with eta=16 there are 17 of them."""
        save_file({name: tensor.detach().contiguous() for name, tensor in self._trainer.iter_hf_tensors()}, self._file(version))
        return load_file(self._file(version))


def run(order: dict[str, Any], model: Path) -> dict[str, Any]:
    """The order with what came of it, but for its settings, which all runs share."""
    began = time.monotonic()
    case = Case(order["objective"], math.inf if order["eta"] == "inf" else float(order["eta"]), order["seed"], tuple(order["overrides"]))
    learning = Run(case, model, order["every"]).learn()
    rounded = {name: [round(value, 5) for value in values] if isinstance(values, list) else values for name, values in vars(learning).items()}
    return {key: order[key] for key in ("objective", "eta", "seed")} | {"wall_s": round(time.monotonic() - began, 2)} | rounded


def apart(order: dict[str, Any], model: Path) -> dict[str, Any]:
    """`run` in a process forked from this one. Raises RuntimeError if that does not answer; what it said stands on standard error."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(order, model, writer, os.getpid()))
    process.start()
    writer.close()
    try:
        return json.loads(reader.recv_bytes())
    except EOFError as error:
        raise RuntimeError(f"the run {order} ended without an answer; what it said stands above") from error
    finally:
        process.join()


def _answer(order: dict[str, Any], model: Path, writer: Connection, parent: int) -> None:
    end_with_parent(parent)
    writer.send_bytes(json.dumps(run(order, model)).encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    register()
    answer_orders(lambda order: apart(order, Path(sys.argv[1])))
