"""The training engine: one training step from groups of responses to new weights, on Megatron-core.

    groups, advantages                                              (numpy, from the worker)
        |
        v  shuffled, split into num_minibatches of whole groups     one optimizer step each, in order
    minibatch --layout.py, packing.py--> micro-batches              at most microbatch_tokens input tokens each
        |
        v  plan_attention: indices, masks, rotary angles            once per micro-batch, shared by all layers
    Megatron forward_backward_func
        |   PackedGPTModel -> log-probs, entropies [2, N]           logits only where a response token is predicted
        |   decoupled_ppo_loss / valid tokens of the minibatch      sums, so micro-batches simply add up
        v
    gradients (float32) --finite? clip--> optimizer step            scheduler: once per training step, before it
        |
        v
    iter_hf_tensors()                                               to whoever publishes the weights

Proximal log-probs are those of the weights before the step. If the caller does not bring them, the engine makes them: a
forward pass for every minibatch but the first, whose own training pass starts from exactly these weights. Groups whose
advantages are all zero have no gradient; they are passed forward only, for the metrics. Everything here is synchronous:
a call returns when its work is done, nothing runs in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from workers.algorithms.losses import Stats, decoupled_ppo_loss, merge_stats, summarize
from workers.config import Config, OffPolicy
from workers.trainer.batch import TrainGroup, check_per_response
from workers.trainer.layout import PackedBatch, pack_groups
from workers.trainer.megatron import cpu_backend, process_group
from workers.trainer.megatron.hf_conversion import iter_hf_tensors
from workers.trainer.megatron.model import DTYPES, build_model
from workers.trainer.megatron.optimizer import build_optimizer, build_scheduler, checked_step
from workers.trainer.megatron.packed_attention import PackedLayoutParams, plan_attention
from workers.weights.architecture import read_architecture
from workers.weights.rope import inverse_frequencies

TokenValues = list[list[np.ndarray]]  # float32, by group, response, token


class MegatronEngine:
    """Holds model, optimizer and schedule of one trainer rank.

    `architecture` is what the model folder says; `num_steps` counts the training steps done.
    """

    def __init__(self, config: Config, model_folder: Path) -> None:
        """Initialise the process groups and load the weights. Raises ModelError or ConfigError on what cannot work."""
        torch.set_num_threads(config.trainer.num_threads)
        self._config = config
        self.architecture = read_architecture(model_folder)
        self._inverse_frequencies = inverse_frequencies(self.architecture)
        self._device = cpu_backend.device()
        dtype = DTYPES[config.trainer.dtype]
        process_group.initialize()
        with cpu_backend.redirected():
            self._model = build_model(self.architecture, model_folder, dtype, config.workflow.temperature)
            wrapped = Float16Module(self._model.config, self._model) if dtype is torch.bfloat16 else self._model
            ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
            self._parallel_model = DistributedDataParallel(self._model.config, ddp, wrapped)
            self._optimizer = build_optimizer(self._parallel_model, config.trainer, dtype)
            self._scheduler = build_scheduler(self._optimizer, config.trainer, config.run)
        self._model.config.finalize_model_grads_func = finalize_model_grads

    @property
    def num_steps(self) -> int:
        """Training steps done; the schedule is what counts them."""
        return self._scheduler.num_steps

    def iter_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights, (Hugging Face name, tensor) one at a time; a tensor may share memory with the model."""
        return iter_hf_tensors(self._model, self.architecture)

    def logprobs(self, groups: list[TrainGroup]) -> TokenValues:
        """Log-probs of all response tokens under the current weights, at the sampling temperature, without gradient.

        Returns float32 arrays [L_i] by group and response. Raises ValueError on groups that cannot be used.
        """
        return self.logprobs_and_entropy(groups)[0]

    def logprobs_and_entropy(self, groups: list[TrainGroup]) -> tuple[TokenValues, TokenValues]:
        """As `logprobs`, and the entropy (nats) of the distribution that each token was drawn from."""
        self._check(groups)
        return self._evaluate(groups, list(range(len(groups))))

    def train_step(self, groups: list[TrainGroup], proximal: TokenValues | None, advantages: list[np.ndarray]) -> dict[str, float]:
        """One training step: `num_minibatches` optimizer steps on whole groups, shuffled by seed and step.

        `proximal` are log-probs by group, response and token from before this step (None: made here, see the top of this
        file); `advantages` float32 [n] by group. Returns metrics: loss, grad_norm (means over minibatches), lr, entropy
        (nats), the means and shares of `losses.summarize`, num_tokens (response tokens trained on), num_packed_tokens
        (input tokens of training passes), num_microbatches. Raises ValueError on bad input, FloatingPointError on a loss
        or gradient that is not finite; the weights are then those before the failing minibatch.
        """
        trainer = self._config.trainer
        self._check(groups)
        self._check_step(groups, proximal, advantages)
        order = np.random.default_rng([self._config.run.seed, self.num_steps]).permutation(len(groups))
        minibatches = [part.tolist() for part in np.split(order, trainer.num_minibatches)]
        exact_first = proximal is None
        if proximal is None:
            needed = [index for part in minibatches[1:] for index in part] if self._config.algorithm.decoupled else []
            proximal = self._evaluate(groups, needed)[0]
        self._scheduler.step(1)
        stats: list[Stats] = []
        norms: list[float] = []
        for number, indices in enumerate(minibatches):
            own_proximal = None if exact_first and number == 0 else proximal
            part = self._minibatch(groups, indices, own_proximal, advantages)
            loss = float(sum(float(share["loss"]) for share in part))
            if not math.isfinite(loss):
                raise FloatingPointError(f"training step {self.num_steps}, minibatch {number}: the loss is {loss}. The weights are those "
                                         "before this minibatch. Lower trainer.lr, or train in float32")
            with cpu_backend.redirected():
                norms.append(checked_step(self._optimizer, trainer.clip_grad, self.num_steps))
            stats += part
        return self._metrics(merge_stats(stats), norms)

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
                   advantages: list[np.ndarray]) -> list[Stats]:
        """Accumulate the gradients of one minibatch; returns the statistics of its micro-batches."""
        normalizer = float(max(1, sum(groups[index].num_valid_tokens for index in indices)))
        with_gradient = [index for index in indices if np.any(advantages[index])] or indices
        without = [index for index in indices if index not in set(with_gradient)]
        loss = partial(self._loss, groups=groups, proximal=proximal, advantages=advantages, normalizer=normalizer)
        self._parallel_model.zero_grad_buffer()
        self._optimizer.zero_grad()
        stats = self._run(groups, with_gradient, loss, forward_only=False)
        if without:
            stats += self._run(groups, without, loss, forward_only=True)
        return stats

    def _loss(self, batch: PackedBatch, output: Tensor, *, groups: list[TrainGroup], proximal: TokenValues | None,
              advantages: list[np.ndarray], normalizer: float) -> tuple[Tensor, Stats]:
        """This micro-batch's share of the minibatch's loss, and its statistics."""
        current, entropy = output[0], output[1].detach()
        algorithm = self._config.algorithm
        behavior = batch.gather(lambda group, sample: groups[group].behavior_logprobs[sample]).to(self._device)
        mask = batch.gather(lambda group, sample: groups[group].loss_mask[sample]).to(self._device)
        lengths = torch.tensor(batch.sample_lengths)
        advantage = torch.tensor([float(advantages[group][sample]) for group, sample in batch.samples]).repeat_interleave(lengths)
        if proximal is None or not algorithm.decoupled:
            centre = current.detach()
        else:
            centre = batch.gather(lambda group, sample: proximal[group][sample]).to(self._device)
        loss, stats = decoupled_ppo_loss(
            current, centre, behavior, advantage.to(self._device), mask, normalizer=normalizer,
            clip_epsilon=algorithm.clip_epsilon, behavior_cap=algorithm.behavior_cap,
            clamp=algorithm.off_policy is OffPolicy.clamp, decoupled=algorithm.decoupled)
        stats["entropy"] = torch.where(mask, entropy, 0.0).sum()
        stats["packed_tokens"] = torch.tensor(len(batch.tokens))
        stats["microbatches"] = torch.tensor(1)
        return loss, stats

    def _evaluate(self, groups: list[TrainGroup], indices: list[int]) -> tuple[TokenValues, TokenValues]:
        """Log-probs and entropies of the groups at `indices`; the other groups' lists stay empty."""
        logprobs: TokenValues = [[np.empty(0, np.float32)] * group.num_samples for group in groups]
        entropies: TokenValues = [list(rows) for rows in logprobs]

        def collect(batch: PackedBatch, output: Tensor) -> tuple[Tensor, Stats]:
            batch.scatter(output[0], logprobs)
            batch.scatter(output[1], entropies)
            return output[0, 0], {}

        if indices:
            self._run(groups, indices, collect, forward_only=True)
        return logprobs, entropies

    def _run(self, groups: list[TrainGroup], indices: list[int], loss: Any, forward_only: bool) -> list[Stats]:
        """Pack the groups at `indices` and pass them through Megatron's schedule; returns what `loss` gave besides the loss."""
        trainer = self._config.trainer
        batches = pack_groups(groups, indices, trainer.microbatch_tokens, trainer.share_prompts)
        plans = [plan_attention(batch, self._inverse_frequencies, self._device) for batch in batches]
        # Megatron divides the loss by the number of micro-batches; ours is normalised already.
        step = partial(self._forward_step, loss=loss, scale=1 if forward_only else len(plans))
        with cpu_backend.redirected(), torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(plans),
                model=self._parallel_model,
                num_microbatches=len(plans),
                seq_length=max(len(batch.tokens) for batch in batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _forward_step(self, plans: Iterator[PackedLayoutParams], model: Any, loss: Any, scale: int) -> tuple[Tensor, Any]:
        plan = next(plans)
        batch = plan.batch
        assert batch is not None
        output = model(batch.tokens[None].to(self._device), batch.position_ids[None].to(self._device), None, packed_seq_params=plan)

        def scaled_loss(result: Tensor) -> tuple[Tensor, Stats]:
            value, stats = loss(batch, result)
            return value * scale, stats

        return output, scaled_loss

    def _check(self, groups: list[TrainGroup]) -> None:
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
