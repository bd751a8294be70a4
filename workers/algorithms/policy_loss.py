"""The policy's loss, put together from small parts, as a sum over tokens with statistics that add up.

Three policies meet in it: the behaviour policy sampled the tokens (possibly several versions in one response; the per-token log-probs recorded at
sampling time are all that is needed, AReaL, Proposition 1), the proximal policy centres the trust region, and the current policy is being trained:

    log-probs --ratios.py--> u = pi / pi_prox          --surrogates.py--> objective S(u, A)
              --corrections.py--> w = pi_prox / pi_behav, bounded         |
              --divergences.py--> KL(pi, pi_ref)                          v
    J = sum_t  a_t ( w_t S(u_t, A_t)  -  kl_weight KL_t  +  entropy_weight H_t ) / normalizer        a: aggregation.py

With the defaults this is decoupled PPO (AReaL, arXiv 2505.24298, Eq. 5). The sum is divided by the normaliser that the caller gives, that of the
whole minibatch, so micro-batches only have to be added, whatever their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workers.algorithms import surrogates
from workers.algorithms.aggregation import Aggregation, token_weights
from workers.algorithms.corrections import behavior_weights, bounded
from workers.algorithms.divergences import Estimator, divergence
from workers.algorithms.loss_statistics import Stats, gap_sums, weight_sums
from workers.algorithms.ratios import Level, Responses, importance_ratio

Surrogate = Literal["clip", "cispo", "sapo", "none"]


@dataclass(frozen=True)
class Objective:
    """The choices that make up a policy's loss; docs/algorithms.md has their formulas.

    `decoupled` False: the proximal policy is the behaviour policy and w = 1. `clip_low`, `clip_high`: the ratio's bounds are 1 - low and 1 + high;
    `dual_clip` 0: none. `weight_low`, `weight_high`: the bounds of w, outside of which it is 0 or, with `clamp_weights`, the nearer bound.
    `kl_weight` and `entropy_weight` 0: no such term.
    """

    decoupled: bool = True
    ratio: Level = "token"
    surrogate: Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    weight_level: Level = "token"
    weight_low: float = 0.0
    weight_high: float = 5.0
    clamp_weights: bool = False
    kl_weight: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_weight: float = 0.0
    aggregation: Aggregation = "token_mean"


@dataclass(frozen=True)
class TokenInputs:
    """What N tokens bring to the loss, floating point [N] each: log-probs, of which `current` has a gradient; `advantages`.

    `mask` bool [N]: the tokens that are trained on. `reference`: log-probs of the reference policy. `entropy`: that of the current policy where the
    token was chosen, in nats, with gradient. `kept` bool [N]: False drops a token as a weight outside its bounds does. `responses`: needed for
    the means of sequences (`sequence_mean`), and for weights of sequences.
    """

    current: Tensor
    proximal: Tensor
    behavior: Tensor
    advantages: Tensor
    mask: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None
    kept: Tensor | None = None
    responses: Responses | None = None


def policy_loss(inputs: TokenInputs, objective: Objective, *, normalizer: float) -> tuple[Tensor, Stats]:
    """Minus J of the top of this file: a scalar, and sums over tokens for `loss_statistics.merge_stats`.

    A token that is dropped for its weight stays in the denominator. What the mask leaves out contributes exactly zero to loss, gradient and
    statistics, whatever values stand there. Raises ValueError where a choice needs `responses`, `reference` or `entropy` that are not given.
    """
    mask = inputs.mask
    current, behavior, advantages = (_masked(part, mask) for part in (inputs.current, inputs.behavior, inputs.advantages))
    proximal = _masked(inputs.proximal, mask).detach() if objective.decoupled else behavior
    ratio = importance_ratio(current, proximal, objective.ratio, inputs.responses)
    gains, clipped = _surrogate(objective, ratio, current, advantages)
    raw_weights = behavior_weights(proximal, behavior, objective.weight_level if objective.decoupled else "token", inputs.responses)
    weights, dropped = bounded(raw_weights, objective.weight_low, objective.weight_high, objective.clamp_weights)
    if inputs.kept is not None:
        weights, dropped = torch.where(inputs.kept, weights, 0.0), dropped | ~inputs.kept
    per_token = weights * gains
    stats: Stats = {}
    if inputs.reference is not None:
        reference = _masked(inputs.reference, mask)
        stats["kl_reference"] = divergence("k3", current.detach(), reference).sum()
    if objective.kl_weight:
        per_token = per_token - objective.kl_weight * divergence(objective.kl_estimator, current, _given(inputs.reference, "reference", mask))
    if objective.entropy_weight:
        per_token = per_token + objective.entropy_weight * _given(inputs.entropy, "entropy", mask)
    loss = -_aggregated(per_token, objective.aggregation, inputs) / normalizer
    with torch.no_grad():
        stats |= {"loss": loss.detach(), "clipped": (clipped & mask).sum(), "capped": (dropped & mask).sum()}
        stats |= weight_sums(raw_weights, mask) | gap_sums(current.detach(), proximal, behavior)
    return loss, stats


def _surrogate(objective: Objective, ratio: Tensor, current: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    match objective.surrogate:
        case "clip":
            return surrogates.clipped(ratio, advantages, objective.clip_low, objective.clip_high, objective.dual_clip)
        case "cispo":
            return surrogates.cispo(ratio, current, advantages, objective.clip_low, objective.clip_high)
        case "sapo":
            return surrogates.sapo(ratio, advantages, objective.tau_positive, objective.tau_negative)
        case "none":
            return surrogates.unclipped(ratio, advantages)


def _aggregated(values: Tensor, aggregation: Aggregation, inputs: TokenInputs) -> Tensor:
    """The weighted sum over the tokens that count."""
    values = torch.where(inputs.mask, values, 0.0)
    if aggregation != "sequence_mean":
        return values.sum()
    if inputs.responses is None:
        raise ValueError("a mean over responses needs to know which response each token is of. Give `responses`")
    return (values * token_weights(aggregation, inputs.responses)).sum()


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)


def _given(values: Tensor | None, name: str, mask: Tensor) -> Tensor:
    if values is None:
        raise ValueError(f"the objective has a term of `{name}`, which is not given. Give it, or set the term's weight to 0")
    return _masked(values, mask)
