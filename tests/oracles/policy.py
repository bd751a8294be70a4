"""Ratios, surrogates and corrections from the papers, token by token, each with its gradient as the paper states it.

A surrogate is what is maximised. Its second number is the derivative with respect to the token's own log-prob, log pi_theta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[float]
Mask = Sequence[bool]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def token_ratios(current: Row, old: Row, mask: Mask) -> list[float]:
    """PPO (arXiv 1707.06347), section 3: r_t = pi(a_t) / pi_old(a_t). What is no action has 1."""
    return [math.exp(now - before) if used else 1.0 for now, before, used in zip(current, old, mask, strict=True)]


def sequence_ratio(current: Row, old: Row, mask: Mask) -> float:
    """GSPO (arXiv 2507.18071), Eq. 7: s = (pi(y) / pi_old(y))^(1/|y|), with |y| the number of actions; of no action 1."""
    gaps = [now - before for now, before, used in zip(current, old, mask, strict=True) if used]
    return math.exp(math.fsum(gaps) / len(gaps)) if gaps else 1.0


def gspo_gradient(ratio: float, slope: float, mask: Mask) -> list[float]:
    """GSPO (arXiv 2507.18071), Eq. 10: with f(s) a response's objective and `slope` = f'(s), d f / d log pi_t = f'(s) s / |y| for every action."""
    count = sum(mask)
    return [slope * ratio / count if used else 0.0 for used in mask]


def gspo_token_gradient(ratio: float, slopes: Row, mask: Mask) -> list[float]:
    """GSPO-token (arXiv 2507.18071), Eq. 14: s_t = sg[s] pi_t / sg[pi_t] has the value s and d s_t / d log pi_t = s: no action moves another's."""
    return [slope * ratio if used else 0.0 for slope, used in zip(slopes, mask, strict=True)]


def ppo(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """PPO (arXiv 1707.06347), Eq. 7: min(r A, clip(r, 1 - low, 1 + high) A); low = high there, DAPO (arXiv 2503.14476), Eq. 8, has high > low.

    Returns the value and its derivative with respect to the ratio: A, or 0 where the clipped term is the smaller one.
    """
    plain, clipped = ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage
    return (plain, advantage) if plain <= clipped else (clipped, 0.0)


def dual_clip(ratio: float, advantage: float, low: float, high: float, bound: float) -> tuple[float, float]:
    """Dual-clip PPO (arXiv 1912.09729), Eq. 5: where A < 0, max(min(r A, clip(r) A), c A). Value and derivative with respect to the ratio."""
    value, slope = ppo(ratio, advantage, low, high)
    if advantage < 0 and value < bound * advantage:
        return bound * advantage, 0.0
    return value, slope


def cispo(ratio: float, advantage: float, logprob: float, low: float, high: float) -> tuple[float, float]:
    """CISPO (MiniMax-M1, arXiv 2506.13585), Eqs. 4 and 5: sg(clip(r, 1 - low, 1 + high)) A log pi. Value and derivative with respect to log pi."""
    weight = clip(ratio, 1 - low, 1 + high)
    return weight * advantage * logprob, weight * advantage


def sapo(ratio: float, advantage: float, positive: float, negative: float) -> tuple[float, float]:
    """SAPO (arXiv 2511.20347), Eqs. 5 and 6: f(r) A with f(r) = sigmoid(tau (r - 1)) 4 / tau; tau is `positive` where A > 0, else `negative`.

    The derivative with respect to the ratio is 4 p (1 - p) A with p = sigmoid(tau (r - 1)), Eq. 8: at r = 1 it is A.
    """
    tau = positive if advantage > 0 else negative
    point = tau * (ratio - 1)
    gate = 1 / (1 + math.exp(-point)) if point >= 0 else math.exp(point) / (1 + math.exp(point))
    rest = 1 / (1 + math.exp(point)) if point < 700 else 0.0
    return gate * 4 / tau * advantage, 4 * gate * rest * advantage


def decoupled_weights(proximal: Row, behavior: Row, mask: Mask) -> list[float]:
    """AReaL (arXiv 2505.24298), Eq. 5: w_t = pi_prox / pi_behav. What is no action has 0."""
    return [math.exp(centre - sampled) if used else 0.0 for centre, sampled, used in zip(proximal, behavior, mask, strict=True)]


def sequence_weight(proximal: Row, behavior: Row, mask: Mask) -> float:
    """The weight of a whole response, the product over its actions (Liu et al., "When Speed Kills Stability", 2025, Seq-TIS)."""
    return math.exp(math.fsum(centre - sampled for centre, sampled, used in zip(proximal, behavior, mask, strict=True) if used))


def geometric_weight(proximal: Row, behavior: Row, mask: Mask) -> float:
    """The geometric mean of a response's token weights."""
    return sequence_ratio(proximal, behavior, mask)


def truncated(weight: float, cap: float) -> float:
    """Truncated importance sampling (Ionides 2008; for engine and trainer Yao et al. 2025): min(w, C)."""
    return min(weight, cap)


def masked(weight: float, cap: float) -> float:
    """Masked importance sampling (Liu et al. 2025): w where w <= C, else 0."""
    return weight if weight <= cap else 0.0


def icepop(weight: float, low: float, high: float) -> float:
    """IcePop (Ring-1T, arXiv 2510.18855), M(k): k where alpha <= k <= beta, else 0."""
    return weight if low <= weight <= high else 0.0


def m2po(log_ratios: Sequence[Row], advantages: Sequence[Row], masks: Sequence[Mask], threshold: float) -> list[list[bool]]:
    """M2PO (arXiv 2510.01161), Algorithm 1, over all tokens of a batch: which ones are kept.

    While the mean of M2 = (log r)^2 over the trust-region tokens is above the threshold, the one with the largest M2 is left out. Trust-region tokens
    are those that PPO could clip: A > 0 and r > 1, or A < 0 and r < 1.
    """
    kept = [list(mask) for mask in masks]
    region = {(row, token): log_ratios[row][token] ** 2 for row, mask in enumerate(masks) for token, used in enumerate(mask)
              if used and advantages[row][token] * log_ratios[row][token] > 0}
    while region and math.fsum(region.values()) / len(region) > threshold:
        row, token = max(region, key=lambda place: region[place])
        kept[row][token] = False
        del region[row, token]
    return kept
