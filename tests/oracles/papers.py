"""Each algorithm's advantages and loss for a whole minibatch, in plain torch on padded rows, written from its paper.

What all share, but for PPO, is AReaL's setting (arXiv 2505.24298, Eq. 5): old tokens have a weight w = pi_prox / pi_behav, and the papers' old policy
is the proximal one. A response whose tokens are all masked counts nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.oracles import advantages as estimators
from tests.oracles.padded import Padded, Rows, rows_of
from workers.algorithms.advantages import EPSILON
from workers.config import Advantage, AlgorithmConfig, Config
from workers.trainer.batch.group import TrainGroup

Advantages = Callable[[list[TrainGroup], Rows, AlgorithmConfig], Rows]
Loss = Callable[[Padded, Config], Tensor]


@dataclass(frozen=True)
class Paper:
    """How rewards become advantages of all tokens, given log(pi_prox / pi_ref) of each; and what is minimised."""

    advantages: Advantages
    loss: Loss


def per_response(estimator: Callable[[list[list[float]]], list[list[float]]], penalized: bool = False) -> Advantages:
    """Each response's advantage for all of its tokens; `penalized`: of rewards less beta times the sum of the divergence over the response."""
    def estimate(groups: list[TrainGroup], divergences: Rows, algorithm: AlgorithmConfig) -> Rows:
        gaps = iter(zip(divergences, rows_of(groups, "loss_mask"), strict=True))
        rewards = []
        for group in groups:
            sums = [sum(gap for gap, used in zip(*next(gaps), strict=True) if used) for _ in group.responses]
            beta = algorithm.kl_weight if penalized else 0.0
            rewards.append([float(reward) - beta * total for reward, total in zip(group.rewards, sums, strict=True)])
        flat = [value for row in estimator(rewards) for value in row]
        return [[value] * len(mask) for value, mask in zip(flat, rows_of(groups, "loss_mask"), strict=True)]

    return estimate


def reinforce_pp(groups: list[TrainGroup], divergences: Rows, algorithm: AlgorithmConfig) -> Rows:
    rewards = [float(reward) for group in groups for reward in group.rewards]
    masks = [mask.tolist() for mask in rows_of(groups, "loss_mask")]
    return estimators.reinforce_pp(rewards, divergences, masks, algorithm.kl_weight, EPSILON)


def distilled(groups: list[TrainGroup], divergences: Rows, algorithm: AlgorithmConfig) -> Rows:
    """On-policy distillation, arXiv 2306.13649, Section 3, with the reverse KL: its gradient is that of a reward of -log(student / teacher) at each
    sampled token, for that token alone; beside rewards where these have advantages."""
    rows = GROUP_NORM(groups, divergences, algorithm) if algorithm.advantage is Advantage.group_norm else [[0.0] * len(row) for row in divergences]
    return [[own - algorithm.kl_weight * gap for own, gap in zip(*pair, strict=True)] for pair in zip(rows, divergences, strict=True)]


def token_mean(values: Tensor, p: Padded) -> Tensor:
    """DAPO, Eq. 8."""
    return values[p.mask].sum() / p.mask.sum()


def sequence_mean(values: Tensor, p: Padded) -> Tensor:
    """GRPO, Eq. 3."""
    there = p.lengths > 0
    return (torch.where(p.mask, values, 0.0).sum(1)[there] / p.lengths[there]).sum() / there.sum()


def fixed_length(values: Tensor, p: Padded, length: int) -> Tensor:
    """Dr. GRPO, Listing 1."""
    return values[p.mask].sum() / length / (p.lengths > 0).sum()


def weight(p: Padded) -> Tensor:
    return (p.proximal - p.behavior).exp()


def dropped_above(weights: Tensor, cap: float) -> Tensor:
    return torch.where(weights <= cap, weights, 0.0)


def clipped(ratio: Tensor, p: Padded, low: float, high: float) -> Tensor:
    """PPO, Eq. 7."""
    return torch.minimum(ratio * p.advantages, torch.clamp(ratio, 1 - low, 1 + high) * p.advantages)


def ppo(p: Padded, setup: Config) -> Tensor:
    return -token_mean(clipped((p.current - p.behavior).exp(), p, setup.algorithm.clip_epsilon, setup.algorithm.clip_epsilon), p)


def ppo_with_entropy_and_dual_clip(p: Padded, setup: Config) -> Tensor:
    """PPO, Eq. 9; dual clip (arXiv 1912.09729), Eq. 5."""
    algorithm = setup.algorithm
    gains = clipped((p.current - p.behavior).exp(), p, algorithm.clip_epsilon, algorithm.clip_epsilon)
    gains = torch.where(p.advantages < 0, torch.maximum(gains, algorithm.dual_clip * p.advantages), gains)
    return -token_mean(gains + algorithm.entropy_weight * p.entropy, p)


def decoupled_gains(p: Padded, setup: Config) -> Tensor:
    """AReaL, Eq. 5, with what is above the cap left out."""
    epsilon = setup.algorithm.clip_epsilon
    return dropped_above(weight(p), setup.algorithm.behavior_cap) * clipped((p.current - p.proximal).exp(), p, epsilon, epsilon)


def decoupled_ppo(p: Padded, setup: Config) -> Tensor:
    return -token_mean(decoupled_gains(p, setup), p)


def decoupled_ppo_with_k2(p: Padded, setup: Config) -> Tensor:
    return -token_mean(decoupled_gains(p, setup) - setup.algorithm.kl_weight * (p.current - p.reference) ** 2 / 2, p)


def grpo(p: Padded, setup: Config) -> Tensor:
    """GRPO, Eqs. 3 and 4."""
    gap = p.reference - p.current
    return -sequence_mean(decoupled_gains(p, setup) - setup.algorithm.kl_weight * (gap.exp() - gap - 1), p)


def dr_grpo(p: Padded, setup: Config) -> Tensor:
    return -fixed_length(decoupled_gains(p, setup), p, setup.workflow.max_new_tokens)


def dapo(p: Padded, setup: Config) -> Tensor:
    """DAPO, Eqs. 8 to 10: 0.2 and 0.28."""
    return -token_mean(dropped_above(weight(p), setup.algorithm.behavior_cap) * clipped((p.current - p.proximal).exp(), p, 0.2, 0.28), p)


def rloo(p: Padded, setup: Config) -> Tensor:
    """RLOO, Eq. 6: the whole response's log-prob times its advantage. Its gradient, with truncated weights pi_theta / pi_behav at pi_prox."""
    truncated = weight(p).clamp(max=setup.algorithm.behavior_cap)
    return -fixed_length(truncated * (p.current - p.proximal).exp() * p.advantages, p, setup.workflow.max_new_tokens)


def gspo(p: Padded, setup: Config) -> Tensor:
    """GSPO, Eqs. 5 to 7, with a response's ratio as the geometric mean that it is, gradient and all; 3e-4 and 4e-4."""
    there = p.lengths > 0
    lengths = p.lengths[there]
    ratio = ((p.current - p.proximal) * p.mask)[there].sum(1).div(lengths).exp()
    of_old = ((p.proximal - p.behavior) * p.mask)[there].sum(1).div(lengths).exp()
    advantage = (p.advantages * p.mask)[there].sum(1) / lengths
    gains = torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
    return -(dropped_above(of_old, setup.algorithm.behavior_cap) * gains).mean()


def cispo(p: Padded, setup: Config) -> Tensor:
    """CISPO, Eqs. 4 and 5, with no lower bound."""
    bounded = (p.current - p.proximal).exp().detach().clamp(max=1 + setup.algorithm.clip_epsilon_high)
    return -token_mean(dropped_above(weight(p), setup.algorithm.behavior_cap) * bounded * p.advantages * p.current, p)


def sapo(p: Padded, setup: Config) -> Tensor:
    """SAPO, Eqs. 5 and 6: 1.0 and 1.05."""
    tau = 1.0 + 0.05 * (p.advantages <= 0)
    gate = torch.sigmoid(tau * ((p.current - p.proximal).exp() - 1)) * 4 / tau
    return -sequence_mean(dropped_above(weight(p), setup.algorithm.behavior_cap) * gate * p.advantages, p)


def m2po(p: Padded, setup: Config) -> Tensor:
    """M2PO, Eq. 7: the ratio to the behaviour policy times the mask of Algorithm 1, nothing clipped."""
    return -token_mean(p.kept * (p.current - p.behavior).exp() * p.advantages, p)


def icepop(p: Padded, setup: Config) -> Tensor:
    """IcePop (Ring-1T, arXiv 2510.18855): [0.5, 5], each response's mean."""
    weights = weight(p)
    weights = torch.where((weights >= 0.5) & (weights <= 5.0), weights, 0.0)
    return -sequence_mean(weights * clipped((p.current - p.proximal).exp(), p, 0.2, 0.2), p)


def tis(p: Padded, setup: Config) -> Tensor:
    return -token_mean(weight(p).clamp(max=2.0) * clipped((p.current - p.proximal).exp(), p, 0.2, 0.2), p)


def tis_of_responses(p: Padded, setup: Config) -> Tensor:
    weights = ((p.proximal - p.behavior) * p.mask).sum(1, keepdim=True).exp().clamp(max=2.0)
    return -token_mean(weights * clipped((p.current - p.proximal).exp(), p, 0.2, 0.2), p)


def loglinear(p: Padded, setup: Config) -> Tensor:
    """A-3PO: AReaL's objective around log pi_prox ~ log pi_behav + alpha (log pi - log pi_behav), alpha = age / (age + 1)."""
    if bool((p.current == p.proximal).all()):
        return decoupled_ppo(p, setup)  # the weights have not moved yet
    centre = p.behavior + p.age / (p.age + 1) * (p.current.detach() - p.behavior)
    return decoupled_ppo(Padded(**{**vars(p), "proximal": centre}), setup)


def grpo_advantages(rewards: list[list[float]]) -> list[list[float]]:
    return estimators.grpo(rewards, EPSILON)


GROUP_NORM = per_response(grpo_advantages)
PAPERS: dict[str, Paper] = {
    "ppo": Paper(GROUP_NORM, ppo),
    "ppo-entropy-dual": Paper(GROUP_NORM, ppo_with_entropy_and_dual_clip),
    "decoupled_ppo": Paper(GROUP_NORM, decoupled_ppo),
    "decoupled_ppo-batch-k2": Paper(per_response(lambda rewards: estimators.batch_norm(rewards, EPSILON)), decoupled_ppo_with_k2),
    "decoupled_ppo_loglinear": Paper(GROUP_NORM, loglinear),
    "grpo": Paper(GROUP_NORM, grpo),
    "dr_grpo": Paper(per_response(estimators.dr_grpo), dr_grpo),
    "dapo": Paper(GROUP_NORM, dapo),
    "rloo": Paper(per_response(estimators.rloo, penalized=True), dr_grpo),
    "rloo-paper": Paper(per_response(estimators.rloo, penalized=True), rloo),
    "reinforce_pp": Paper(reinforce_pp, decoupled_ppo),
    "reinforce_pp-baseline": Paper(per_response(lambda rewards: estimators.reinforce_pp_baseline(rewards, EPSILON)), decoupled_ppo),
    "gspo": Paper(GROUP_NORM, gspo),
    "cispo": Paper(GROUP_NORM, cispo),
    "sapo": Paper(GROUP_NORM, sapo),
    "m2po": Paper(GROUP_NORM, m2po),
    "icepop": Paper(GROUP_NORM, icepop),
    "tis": Paper(GROUP_NORM, tis),
    "distillation": Paper(distilled, decoupled_ppo),
    "distillation-rewards": Paper(distilled, decoupled_ppo),
    "tis-sequence": Paper(GROUP_NORM, tis_of_responses),
}
"""By the names of conf/algorithm/*.yaml, with `-` and a word behind it for a variant. `rloo` has PPO's trust region around the paper's objective,
and so Dr. GRPO's loss of other advantages."""


def published(algorithm: AlgorithmConfig, name: str) -> dict[str, tuple[float, float]]:
    """What a paper gives as its setting, beside what the file says."""
    papers = {
        "decoupled_ppo": {"clip_epsilon": 0.2}, "dapo": {"clip_epsilon": 0.2, "clip_epsilon_high": 0.28}, "grpo": {"kl_weight": 0.04},
        "gspo": {"clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4}, "sapo": {"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05},
        "m2po": {"second_moment": 0.04}, "icepop": {"behavior_floor": 0.5, "behavior_cap": 5.0}, "cispo": {"clip_epsilon": 1.0}}
    return {key: (value, float(np.float64(getattr(algorithm, key)))) for key, value in papers.get(name, {}).items()}
