"""avg@k, pass@k and maj@k over prompts, with confidence intervals. Pure.

    scores [prompts][k], answers [prompts][k] --each prompt--> a value in [0, 1] --mean over prompts, Wilson--> Estimate

A prompt is the unit of all intervals: prompts are drawn independently, the samples of one prompt are not (arXiv 2411.00640, section 2.2).
A sample counts as right for pass@k if it has full marks, a score of 1; avg@k and maj@k take scores as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

RIGHT = 1.0


@dataclass(frozen=True)
class Judged:
    """What was made of one prompt: the score in [0, 1] of each of its samples, and the answer that was found in each ('': none)."""

    scores: Sequence[float]
    answers: Sequence[str] = ()


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and the interval that holds it with the confidence that was asked for."""

    mean: float
    low: float
    high: float


def avg_at_k(scores: Sequence[float]) -> float:
    """The mean score of a prompt's samples: an unbiased estimate of the score of one."""
    return float(np.mean(scores))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """An unbiased estimate of the probability that at least one of `k` samples is right, from `num_samples` of which `num_right` are.

    1 - C(n - c, k) / C(n, k), as a product (arXiv 2107.03374, equation 1). Raises `ValueError` unless 1 <= k <= num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples: k must be from 1 to the number of samples. Sample more, or use a smaller k")
    if num_samples - num_right < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_right + 1, num_samples + 1)))


def maj_at_k(judged: Judged) -> float | None:
    """The score of the answer that most of a prompt's samples agree on (self-consistency, arXiv 2203.11171): the mean score of the samples
    that gave it. Samples without an answer have no vote.

    Where several answers have the most votes, the mean over them: what a fair draw among them gives on average. None where no
    sample has an answer.
    """
    votes: dict[str, list[float]] = {}
    for score, answer in zip(judged.scores, judged.answers, strict=True):
        if answer:
            votes.setdefault(answer, []).append(score)
    most = max(map(len, votes.values()), default=0)
    winners = [float(np.mean(scores)) for scores in votes.values() if len(scores) == most]
    return float(np.mean(winners)) if winners else None


def estimate(values: Sequence[float], confidence: float = 0.95, num_samples: int = 1) -> Estimate:
    """The mean of `values`, one in [0, 1] for each prompt, each made of `num_samples` samples, with Wilson's score interval for as many
    yes-or-no prompts as would tell as much: n * m (1 - m) / s^2, the effective sample size of surveys (Kish 1965, section 8.2), where m is the mean
    and s^2 the variance over prompts.

    Of values that are 0 or 1, n of them: it is Wilson's interval. It never leaves [0, 1], and has a width where all values are alike;
    n * num_samples is the most that it takes, all samples for independent. Raises `ValueError` without values.
    """
    array = np.asarray(values, np.float64)
    if not array.size:
        raise ValueError("an estimate of no prompts: at least one must have been judged")
    mean, number = float(np.clip(array.mean(), 0.0, 1.0)), float(array.size)
    spread, most = float(array.var()), mean * (1.0 - mean)
    if most > 0.0:
        number = min(number * num_samples, number * most / spread) if spread > 0.0 else number * num_samples
    z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    middle, half = (mean + z2 / (2 * number)) / (1 + z2 / number), np.sqrt(z2 * (most + z2 / (4 * number)) / number) / (1 + z2 / number)
    return Estimate(mean, float(min(mean, max(0.0, middle - half))), float(max(mean, min(1.0, middle + half))))


def figures(judged: Sequence[Judged], ks: Sequence[int], confidence: float) -> dict[str, Any]:
    """All figures as they are written to evaluation.json and evaluations.jsonl, over prompts with equally many samples each.

    `num_samples`; `avg`; `pass` by k; `maj`, None where no sample of any prompt has an answer (a prompt without one then counts 0). Estimates are
    {"mean", "low", "high"}. Raises `ValueError` where nothing was judged.
    """
    number = len(judged[0].scores) if judged else 0

    def told(values: Sequence[float]) -> dict[str, float]:
        return asdict(estimate(values, confidence, number))

    right = [(len(one.scores), int(np.sum(np.asarray(one.scores) >= RIGHT))) for one in judged]
    majority = [maj_at_k(one) if one.answers else None for one in judged]
    return {
        "num_samples": number, "confidence": confidence, "avg": told([avg_at_k(one.scores) for one in judged]),
        "pass": {str(k): told([pass_at_k(size, count, k) for size, count in right]) for k in ks},
        "maj": told([value or 0.0 for value in majority]) if any(value is not None for value in majority) else None}
