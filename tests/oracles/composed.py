"""The whole loss and its gradient, token by token, from the references: what `policy_loss.Objective` says should come out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tests.oracles import policy, reductions
from tests.oracles.cases import Case
from workers.algorithms.policy_loss import Objective

FIXED_LENGTH = 16
DIVERGENCES = {"k1": reductions.k1, "k2": reductions.k2, "k3": reductions.k3}


@dataclass(frozen=True)
class Found:
    """The loss, and its derivatives with respect to every token's current log-prob and entropy: rows, 0 where the mask is False."""

    loss: float
    by_logprob: list[list[float]]
    by_entropy: list[list[float]]


def normalizer(case: Case, aggregation: str) -> float:
    """What a sum over tokens is divided by. Of responses, those count that have actions, which in the papers all have."""
    responses = sum(length > 0 for length in case.lengths)
    return {"token_mean": sum(case.lengths), "sequence_mean": responses, "fixed_length": responses * FIXED_LENGTH}[aggregation] or 1


def ratios(level: str, current: list[float], old: list[float], mask: list[bool]) -> list[float]:
    match level:
        case "token":
            return policy.token_ratios(current, old, mask)
        case "geometric":
            return [policy.sequence_ratio(current, old, mask)] * len(mask)
        case _:
            return [policy.sequence_weight(current, old, mask)] * len(mask)


def surrogate(objective: Objective, ratio: float, logprob: float, advantage: float) -> tuple[float, float]:
    """The value, and its derivative with respect to the token's log-prob, by which the ratio is multiplied."""
    match objective.surrogate:
        case "cispo":
            return policy.cispo(ratio, advantage, logprob, objective.clip_low, objective.clip_high)
        case "sapo":
            value, slope = policy.sapo(ratio, advantage, objective.tau_positive, objective.tau_negative)
        case "none":
            value, slope = ratio * advantage, advantage
        case _ if objective.dual_clip:
            value, slope = policy.dual_clip(ratio, advantage, objective.clip_low, objective.clip_high, objective.dual_clip)
        case _:
            value, slope = policy.ppo(ratio, advantage, objective.clip_low, objective.clip_high)
    return value, slope * ratio


def correction(objective: Objective, weight: float, kept: bool) -> float:
    """Truncated importance sampling with both bounds, or IcePop, which without a lower bound is masked importance sampling."""
    if not kept:
        return 0.0
    if objective.clamp_weights:
        return max(policy.truncated(weight, objective.weight_high), objective.weight_low)
    return policy.icepop(weight, objective.weight_low, objective.weight_high)


def composed(case: Case, objective: Objective) -> Found:
    """J = sum of a ( w S(u, A) - kl_weight KL + entropy_weight H ), negative and normalised, for the whole batch."""
    losses, by_logprob, by_entropy, total = [], [], [], normalizer(case, objective.aggregation)
    for row, mask in enumerate(case.masks):
        current, behavior = case.current[row], case.behavior[row]
        old = case.proximal[row] if objective.decoupled else behavior
        scale = 1 / sum(mask) if objective.aggregation == "sequence_mean" and any(mask) else 1.0
        moved = ratios(objective.ratio, current, old, mask)
        weights = ratios(objective.weight_level, old, behavior, mask) if objective.decoupled else [1.0] * len(mask)
        slopes, bonuses = [0.0] * len(mask), [0.0] * len(mask)
        for token, used in enumerate(mask):
            if not used:
                continue
            weight = correction(objective, weights[token], case.kept[row][token])
            value, slope = surrogate(objective, moved[token], current[token], case.advantages[row][token])
            divergence, pull = DIVERGENCES[objective.kl_estimator](current[token], case.reference[row][token])
            gain = weight * value - objective.kl_weight * divergence + objective.entropy_weight * case.entropy[row][token]
            losses.append(-scale * gain / total)
            slopes[token] = -scale * (weight * slope - objective.kl_weight * pull) / total
            bonuses[token] = -scale * objective.entropy_weight / total
        by_logprob.append(slopes)
        by_entropy.append(bonuses)
    return Found(math.fsum(losses), by_logprob, by_entropy)
