"""The training engine: one training step from groups of responses to new weights, on Megatron-core.

    groups, minibatches                                             (numpy, from the worker: this copy's share of the batch)
        |
        v  before the step: proximal, reference log-probs; values   reference.py, critic.py; only what the objective needs
    advantages of their rewards                                     preparation.py; what needs the whole batch is summed over all copies
        |
        v
    minibatch by minibatch --passes.py--> micro-batches             spread over the ranks of the copy
        |   microbatch_loss / the minibatch's normaliser            of all copies; sums, so micro-batches and ranks simply add up
        v                                                           (objective.py); of the first: do engine and trainer agree? (selftest/)
    gradients (float32) --reduce, finite? clip--> optimizer step    schedule: once per training step, before the first
        |                 (distributed optimizer: each rank a part of the state; trained_model.py)
        v
    iter_hf_tensors()                                               to whoever publishes the weights; adapters (lora/) are merged into them

With `run.kind=supervised` none of that is there, and the loss is the negative log-likelihood of the responses.

Proximal log-probs are those of the weights before the step. If the caller does not bring them, the first minibatch takes them from its
own training pass, which starts from exactly these weights; for the others a forward pass makes them, or `algorithm.proximal` says how to
do without. Where the step cannot begin without them (a divergence in the rewards, off_policy=second_moment) one pass makes them all.
Groups whose loss has no gradient (advantages all zero, no other term in it) are passed forward only, for the metrics.
A critic takes the same minibatches in the same turn as the policy. Everything here is synchronous: a call returns when its work is done. With
several ranks, every rank makes every call, those of a copy of the model with the same groups, and gets the same metrics. Until its first
update a step can be abandoned (stop_gate.py): up to there it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from workers.algorithms.agreement import Agreement
from workers.config import Config, OffPolicy
from workers.model.architecture import read_architecture
from workers.model.rope import inverse_frequencies
from workers.run.gpus import require_gpu
from workers.trainer.batch.group import TrainGroup, check_step
from workers.trainer.megatron.checkpoint import checkpoint
from workers.trainer.megatron.checkpoint.checkpoint import CheckpointError, Saving
from workers.trainer.megatron.checkpoint.training_state import TrainingState
from workers.trainer.megatron.critic import Critic, Estimates
from workers.trainer.megatron.hf_conversion import Shard
from workers.trainer.megatron.model.model import DTYPES
from workers.trainer.megatron.objective import Advantages, PolicyTargets, TokenMasks, TokenValues, add_totals, per_token, policy_normalizers
from workers.trainer.megatron.parallel import cpu_backend, process_group
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.megatron.parallel.stop_gate import StopGate, never
from workers.trainer.megatron.policy import Policy
from workers.trainer.megatron.preparation import make_advantages, penalty_mean, reward_penalties, second_moment_mask
from workers.trainer.megatron.reference import open_reference

NUM_EXAMINED = 8
"""Groups of a copy of the model whose log-probs are looked at more closely where engine and trainer disagree."""


@dataclass(frozen=True)
class Comparison:
    """Holds the engine's log-probs against the trainer's, before the weights move.

    `fresh`, by group, response and token: those sampled by exactly these weights. `judge` is told, on all ranks alike, how far apart the log-probs
    of the first minibatch are, and is given a function of a temperature that makes them anew, for some groups (the other arrays stay empty);
    all ranks must call that together. What `judge` raises ends the step with everything as it was.
    """

    fresh: TokenMasks
    judge: Callable[[Agreement, Callable[[float], TokenValues]], None]


class MegatronEngine:
    """Holds what one trainer rank has of the policy in training, and of the reference model and the critic where there are any.

    `architecture` is what the model folder says; `num_steps` counts the training steps done; `proximal`: log-probs from before the last one, as far
    as its objective needed them beforehand (the other arrays are empty)."""

    def __init__(self, config: Config, model_folder: Path, gang: Gang | None = None) -> None:
        """Initialise the process groups, as a rank of `gang` or alone, and load the weights of the starting model.

        Raises ModelError or ConfigError on what cannot work, a GPU that is not there among it, GangError where the other ranks are not found.
        """
        torch.set_num_threads(config.trainer.num_threads)
        require_gpu(config)
        self._config, self._algorithm = config, config.algorithm
        self.architecture = read_architecture(model_folder)
        process_group.initialize(gang, config.trainer.parallel)
        with cpu_backend.redirected():
            model_parallel_cuda_manual_seed(config.run.seed, force_reset_rng=True)  # nothing draws from them, but Megatron wants them
            own = (config, self.architecture, model_folder, inverse_frequencies(self.architecture), DTYPES[config.trainer.dtype])
            self._policy = Policy(*own)
            self._reference = open_reference(self._policy, *own) if self._algorithm.kl_weight else None
            self._critic = Critic(*own) if self._algorithm.critic else None
        self._state = TrainingState(self._policy.trained, self._critic.trained if self._critic else None, self.architecture,
                                    config.trainer.lora, model_folder)
        self._whole = True
        self.proximal: TokenValues | None = None

    def close(self) -> None:
        """Let go of the models and take the process groups down, before the process ends in order. Nothing can be called afterwards."""
        del self._policy, self._reference, self._critic, self._state
        process_group.close()

    @property
    def num_steps(self) -> int:
        """Training steps done; the schedule is what counts them."""
        return self._policy.trained.scheduler.num_steps

    def iter_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights, (Hugging Face name, tensor) one at a time, which may share memory with the model, on rank 0. All ranks call this
        together and go through to the end."""
        self._check_whole()
        return self._policy.hf_tensors()

    def iter_held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As `iter_hf_tensors`, but each tensor comes on the rank that publishes it (hf_conversion.sources)."""
        self._check_whole()
        return self._policy.held_tensors()

    def iter_shards(self, sending: Iterable[tuple[Shard, int]]) -> Iterator[list[Tensor]]:
        """For each (shard, rank that sends it) the current weights on that rank, as hf_conversion.iter_shards."""
        self._check_whole()
        return self._policy.shards(sending)

    def iter_adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As `iter_hf_tensors`, the adapters (trainer.lora) under the names that they have in PEFT's folders below the model's own."""
        self._check_whole()
        return self._policy.adapter_tensors()

    def save_state(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Write weights, optimizer, schedule and RNG states into `folder` (there, empty, private); return when they are on disk.

        Returns (bytes, BLAKE3 digest) by file name on rank 0. Raises CheckpointError where that fails: what lies in `folder` is then
        refused by `load_state`.
        """
        self._check_whole()
        return checkpoint.save(folder, self._state)

    def begin_save(self, folder: Path) -> Saving:
        """As `save_state`, but only copies the state as it is now: its `write` does the rest, in a thread if need be, while training goes on."""
        self._check_whole()
        return checkpoint.begin(folder, self._state)

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, with this number of ranks or another; hyper-parameters stay those of the config.

        Raises CheckpointError on a folder that is missing, incomplete, broken, or of another model; the engine is then as it was. Should
        reading fail half-way all the same, it refuses everything but another `load_state`."""
        checkpoint.check(folder, self._state)
        self._whole = False
        checkpoint.load(folder, self._state)
        self._whole = True

    def logprobs(self, groups: list[TrainGroup]) -> TokenValues:
        """Log-probs of all response tokens under the current weights, at the sampling temperature, without gradient: float32 arrays [L_i] by
        group and response, of this copy's groups. Raises ValueError on groups that cannot be used."""
        return self.logprobs_and_entropy(groups)[0]

    def logprobs_and_entropy(self, groups: list[TrainGroup]) -> tuple[TokenValues, TokenValues]:
        """As `logprobs`, and the entropy (nats) of the distribution that each token was drawn from."""
        self._check(groups)
        return self._policy.evaluate(groups, list(range(len(groups))), StopGate(never))

    def train_step(self, groups: list[TrainGroup], minibatches: list[list[int]], proximal: TokenValues | None = None,
                   advantages: Advantages | None = None, stop_requested: Callable[[], bool] = never,
                   comparison: Comparison | None = None) -> dict[str, float]:
        """One training step: an optimizer step for each of `minibatches`, lists of indices into `groups`.

        `groups` are this copy's share of the batch; a minibatch may be empty here, and has groups of other copies then. `proximal` are
        log-probs by group, response and token from before this step (None: see the top of this file). The advantages are made of the groups'
        rewards as `algorithm.advantage` says, unless they are given: `advantages` float32 [n] by group, or by group and response [L_i], not
        with a critic, and not where training is supervised. `stop_requested` is asked before each micro-batch until the first update is due.

        Returns metrics: loss, grad_norm (means over minibatches), lr, entropy (nats), the means and shares of
        `loss_statistics.summarize` (supervised: those of `likelihood.summarize`, whose loss is the mean over all tokens) and `Agreement`, num_tokens
        (response tokens trained on), num_packed_tokens (input tokens of training passes), num_microbatches, pipeline_bubble (share of time);
        with a divergence in the rewards reward_penalty; with a critic value_loss, value_grad_norm (means over minibatches), critic_lr, and of its
        values before the step explained_variance, value_mean, return_mean. Raises
        ValueError on bad input; StepAbandoned where the stop came in time, on all ranks, with everything as it was; FloatingPointError
        on a loss or gradient that is not finite, and the weights are then those before the failing minibatch.
        """
        self._check(groups)
        check_step(groups, minibatches, proximal)
        self._check_advantages(advantages)
        step = self.num_steps + 1
        gate = StopGate(stop_requested, step)
        gate.agree()
        normalizers, value_normalizers = policy_normalizers(groups, minibatches, self._config)
        targets, estimated, known = self._prepare(groups, proximal, advantages, comparison.fresh if comparison else None, gate)
        moves = step > self._algorithm.critic_warmup_steps
        later = self._policy.later_targets(targets, groups, minibatches, gate) if moves else targets
        totals, value_totals, self.proximal = list[dict[str, float]](), list[dict[str, float]](), later.proximal
        for number, indices in enumerate(minibatches):
            stats = self._policy.accumulate(groups, indices, later if number else targets, normalizers[number], gate, moves)
            value_stats = self._critic.accumulate(groups, indices, estimated, value_normalizers[number], gate) if self._critic and estimated else []
            gate.agree(last=True)
            totals.append(self._policy.clip(stats, step, number, moves))
            if comparison is not None and number == 0:
                comparison.judge(Agreement.of(totals[0]), partial(self._policy.logprobs_at, groups, indices[:NUM_EXAMINED], gate))
            if self._critic:
                value_totals.append(self._critic.clip(value_stats, step, number))
                self._critic.trained.update(step)
            self._policy.update(step, moves)
        metrics = self._policy.metrics(add_totals(totals), len(totals)) | known
        return metrics | self._critic.metrics(add_totals(value_totals), len(value_totals)) if self._critic else metrics

    def _prepare(self, groups: list[TrainGroup], proximal: TokenValues | None, advantages: Advantages | None, fresh: TokenMasks | None,
                 gate: StopGate) -> tuple[PolicyTargets, Estimates | None, dict[str, float]]:
        """What the objective needs before the step, and no more, with the metrics that are known by then; all ranks call this together.

        Raises StepAbandoned where asked to stop.
        """
        if self._config.supervised:
            return PolicyTargets([], fresh=fresh), None, {}
        algorithm = self._algorithm
        if proximal is None and algorithm.needs_proximal:
            proximal = self._policy.evaluate(groups, list(range(len(groups))), gate)[0]
        reference = self._reference.logprobs(groups, gate) if self._reference else None
        penalties, metrics = None, {}
        if algorithm.penalizes and reference is not None:
            penalties = reward_penalties(groups, reference, proximal if algorithm.decoupled else None, algorithm)
            metrics["reward_penalty"] = penalty_mean(groups, penalties)
        estimated = self._critic.estimate(groups, gate, penalties) if self._critic else None
        if estimated is not None:
            made, metrics = estimated.advantages, metrics | estimated.metrics
        else:
            made = make_advantages(groups, algorithm, penalties) if advantages is None else per_token(advantages, groups)
        kept = None
        if algorithm.off_policy is OffPolicy.second_moment and proximal is not None:
            kept = second_moment_mask(groups, proximal, made, algorithm.second_moment)
        return PolicyTargets(made, reference, proximal, fresh=fresh, kept=kept), estimated, metrics

    def _check_advantages(self, advantages: Advantages | None) -> None:
        if advantages is not None and (self._config.supervised or self._critic):
            where = "run.kind=supervised" if self._config.supervised else f"algorithm.advantage={self._algorithm.advantage.value}"
            raise ValueError(f"advantages are given with {where}: the critic makes them with gae, and supervised training has none. Give None")

    def _check_whole(self) -> None:
        if not self._whole:
            raise CheckpointError("the engine is partly loaded, as reading a state failed half-way: it can only load another. "
                                  "Call load_state with an older checkpoint, or build a new engine")

    def _check(self, groups: list[TrainGroup]) -> None:
        self._check_whole()
        for group in groups:
            group.check(self.architecture.vocab_size)
