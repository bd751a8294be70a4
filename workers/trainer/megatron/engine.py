"""The training engine: one training step from groups of responses to new weights, on Megatron-core.

    groups, advantages                                              (numpy, from the worker; the same on every rank)
        |
        v  shuffled, split into num_minibatches of whole groups     one optimizer step each, in order
    minibatch --passes.py--> micro-batches                          each rank its share, by tokens
        |   decoupled_ppo_loss / valid tokens of the minibatch      sums, so micro-batches and ranks simply add up
        v
    gradients (float32) --all-reduce, finite? clip--> optimizer step     schedule: once per training step, before the first
        |
        v
    iter_hf_tensors()                                               to whoever publishes the weights

Proximal log-probs are those of the weights before the step. If the caller does not bring them, the engine makes them: a
forward pass for every minibatch but the first, whose own training pass starts from exactly these weights. Groups whose
advantages are all zero have no gradient; they are passed forward only, for the metrics. Everything here is synchronous:
a call returns when its work is done, nothing runs in between. With several ranks, every rank makes every call, with the
same arguments, and gets the same results; only `iter_hf_tensors` is for one rank alone. Until its first update a step
can be abandoned (stop.py): up to there it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from workers.algorithms.losses import Stats, summarize
from workers.config import Config
from workers.trainer.batch import TrainGroup, check_per_response
from workers.trainer.megatron import checkpoint, cpu_backend, process_group
from workers.trainer.megatron.checkpoint import CheckpointError, TrainingState
from workers.trainer.megatron.gang import Gang
from workers.trainer.megatron.hf_conversion import iter_hf_tensors
from workers.trainer.megatron.model import DTYPES, build_model
from workers.trainer.megatron.objective import TokenValues, add_totals, merge_over_ranks, microbatch_loss
from workers.trainer.megatron.optimizer import build_optimizer, build_scheduler, clip_gradients
from workers.trainer.megatron.passes import PackedPasses
from workers.trainer.megatron.stop import StopGate
from workers.weights.architecture import read_architecture
from workers.weights.rope import inverse_frequencies


def _never() -> bool:
    return False


class MegatronEngine:
    """Holds model, optimizer and schedule of one trainer rank.

    `architecture` is what the model folder says; `num_steps` counts the training steps done.
    """

    def __init__(self, config: Config, model_folder: Path, gang: Gang | None = None) -> None:
        """Initialise the process groups, as a rank of `gang` or alone, and load the weights.

        Raises ModelError or ConfigError on what cannot work, GangError where the other ranks are not found.
        """
        torch.set_num_threads(config.trainer.num_threads)
        self._config = config
        self.architecture = read_architecture(model_folder)
        dtype = DTYPES[config.trainer.dtype]
        process_group.initialize(gang)
        with cpu_backend.redirected():
            self._model = build_model(self.architecture, model_folder, dtype, config.workflow.temperature)
            wrapped = Float16Module(self._model.config, self._model) if dtype is torch.bfloat16 else self._model
            ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
            self._parallel_model = DistributedDataParallel(self._model.config, ddp, wrapped)
            self._optimizer = build_optimizer(self._parallel_model, config.trainer, dtype)
            self._scheduler = build_scheduler(self._optimizer, config.trainer, config.run)
        self._passes = PackedPasses(self._parallel_model, config.trainer, inverse_frequencies(self.architecture))
        self._state = TrainingState(self._model, self._optimizer, self._scheduler, self.architecture, dtype)
        self._whole = True

    @property
    def num_steps(self) -> int:
        """Training steps done; the schedule is what counts them."""
        return self._scheduler.num_steps

    def iter_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights, (Hugging Face name, tensor) one at a time; a tensor may share memory with the model.

        Every rank holds all of them, and may be asked alone.
        """
        self._check_whole()
        return iter_hf_tensors(self._model, self.architecture)

    def save_state(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and RNG states into `folder` (there, empty, private); return when they are on disk.

        Raises CheckpointError where that fails: what lies in `folder` is then refused by `load_state`.
        """
        self._check_whole()
        checkpoint.save(folder, self._state)

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, with this number of ranks or another; hyper-parameters stay those of the config.

        Raises CheckpointError on a folder that is missing, incomplete, broken, or of another model; the engine is then as it
        was. Should reading fail half-way all the same, the engine refuses everything but another `load_state`.
        """
        checkpoint.check(folder, self._state)
        self._whole = False
        checkpoint.load(folder, self._state)
        self._whole = True

    def logprobs(self, groups: list[TrainGroup]) -> TokenValues:
        """Log-probs of all response tokens under the current weights, at the sampling temperature, without gradient.

        Returns float32 arrays [L_i] by group and response. Raises ValueError on groups that cannot be used.
        """
        return self.logprobs_and_entropy(groups)[0]

    def logprobs_and_entropy(self, groups: list[TrainGroup]) -> tuple[TokenValues, TokenValues]:
        """As `logprobs`, and the entropy (nats) of the distribution that each token was drawn from."""
        self._check(groups)
        return self._passes.evaluate(groups, list(range(len(groups))), StopGate(_never))

    def train_step(self, groups: list[TrainGroup], proximal: TokenValues | None, advantages: list[np.ndarray],
                   stop_requested: Callable[[], bool] = _never) -> dict[str, float]:
        """One training step: `num_minibatches` optimizer steps on whole groups, shuffled by seed and step.

        `proximal` are log-probs by group, response and token from before this step (None: made here, see the top of this
        file); `advantages` float32 [n] by group. `stop_requested` is asked before each micro-batch until the first update is
        due. Returns metrics: loss, grad_norm (means over minibatches), lr, entropy (nats), the means and shares of
        `losses.summarize`, num_tokens (response tokens trained on), num_packed_tokens (input tokens of training passes),
        num_microbatches. Raises ValueError on bad input; StepAbandoned where the stop came in time, on all ranks, with
        everything as it was; FloatingPointError on a loss or gradient that is not finite, and the weights are then those
        before the failing minibatch.
        """
        self._check(groups)
        self._check_step(groups, proximal, advantages)
        step = self.num_steps + 1
        gate = StopGate(stop_requested, step)
        gate.agree()
        minibatches = self._shuffled(len(groups))
        exact_first = proximal is None
        if proximal is None:
            needed = [index for part in minibatches[1:] for index in part] if self._config.algorithm.decoupled else []
            proximal = self._passes.evaluate(groups, needed, gate)[0]
        totals: list[dict[str, float]] = []
        norms: list[float] = []
        for number, indices in enumerate(minibatches):
            own_proximal = None if exact_first and number == 0 else proximal
            stats = self._minibatch(groups, indices, own_proximal, advantages, gate)
            gate.agree(last=True)
            totals.append(merge_over_ranks(stats))
            loss = totals[-1]["loss"]
            if not math.isfinite(loss):
                raise FloatingPointError(f"training step {step}, minibatch {number}: the loss is {loss}. The weights are those "
                                         "before this minibatch. Lower trainer.lr, or train in float32")
            norms.append(self._update(step))
        return self._metrics(add_totals(totals), norms)

    def _shuffled(self, num_groups: int) -> list[list[int]]:
        """Indices of groups, by minibatch; a function of seed and step."""
        order = np.random.default_rng([self._config.run.seed, self.num_steps]).permutation(num_groups)
        return [part.tolist() for part in np.split(order, self._config.trainer.num_minibatches)]

    def _update(self, step: int) -> float:
        """One optimizer step with the gradients of all ranks, the first of training step `step` advances the schedule; returns their norm."""
        with cpu_backend.redirected():
            finalize_model_grads([self._parallel_model])
            norm = clip_gradients(self._optimizer, self._config.trainer.clip_grad, step)
            self._scheduler.step(step - self.num_steps)
            self._optimizer.step_with_ready_grads()
        return norm

    def _metrics(self, totals: dict[str, float], norms: list[float]) -> dict[str, float]:
        return {
            "loss": totals["loss"] / len(norms),
            "grad_norm": sum(norms) / len(norms),
            "lr": float(self._optimizer.param_groups[0]["lr"]),
            "entropy": totals["entropy"] / max(totals["tokens"], 1.0),
            **summarize(totals),
            "num_tokens": totals["tokens"],
            "num_packed_tokens": totals["packed_tokens"],
            "num_microbatches": totals["microbatches"],
        }

    def _minibatch(self, groups: list[TrainGroup], indices: list[int], proximal: TokenValues | None,
                   advantages: list[np.ndarray], gate: StopGate) -> list[Stats]:
        """Accumulate this rank's share of one minibatch's gradients; returns the statistics of its micro-batches."""
        normalizer = float(max(1, sum(groups[index].num_valid_tokens for index in indices)))
        with_gradient = [index for index in indices if np.any(advantages[index])] or indices
        without = [index for index in indices if index not in set(with_gradient)]
        loss = partial(microbatch_loss, groups=groups, proximal=proximal, advantages=advantages, normalizer=normalizer,
                       algorithm=self._config.algorithm)
        self._parallel_model.zero_grad_buffer()
        self._optimizer.zero_grad()
        stats = self._passes.run(groups, with_gradient, loss, forward_only=False, gate=gate)
        return stats + self._passes.run(groups, without, loss, forward_only=True, gate=gate)

    def _check_whole(self) -> None:
        if not self._whole:
            raise CheckpointError("the engine is partly loaded, as reading a state failed half-way: it can only load another. "
                                  "Call load_state with an older checkpoint, or build a new engine")

    def _check(self, groups: list[TrainGroup]) -> None:
        self._check_whole()
        if not groups:
            raise ValueError("no groups were given, at least one is needed. Wait until a batch is there")
        for group in groups:
            group.check(self.architecture.vocab_size)

    def _check_step(self, groups: list[TrainGroup], proximal: TokenValues | None, advantages: list[np.ndarray]) -> None:
        number = self._config.trainer.num_minibatches
        if len(groups) % number:
            raise ValueError(f"{len(groups)} groups cannot be split into trainer.num_minibatches={number} equal minibatches. "
                             "Give trainer.batch_groups groups")
        if len(advantages) != len(groups):
            raise ValueError(f"advantages are for {len(advantages)} groups, the batch has {len(groups)}. Give one array for each group")
        for group, values in zip(groups, advantages, strict=True):
            if values.shape != (group.num_samples,) or not np.isfinite(values).all():
                raise ValueError(f"group {group.group_id}: advantages {values.tolist()} must be {group.num_samples} finite numbers. "
                                 "Compute them with workers.algorithms.advantages")
        if proximal is not None:
            check_per_response("proximal log-probs", proximal, groups)
