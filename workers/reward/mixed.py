"""A weighted sum of verifiers, judged part by part: those of reward processes there, the judge beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from workers.config.judge import JUDGE
from workers.config.reward import REWARD_MODEL
from workers.reward.judges.judge_client import JudgeError
from workers.reward.pool.pool import VerifierError
from workers.reward.rewards import Rewards
from workers.reward.verifiers.registry import parts, weighted_sum


async def score_parts(rewards: Rewards, prompt: str, completion: str, reference: str, verifier: str, strict: bool,
                      question: Callable[[], str] | None = None) -> tuple[float, dict[str, float]]:
    """The score in [0, 1], and that of every part by its name. `strict`: nothing stands in for a judge that gives none.
    `question`: of a rendered prompt the user's message, which a reward model has a template of its own for; only then is it asked for.

    Raises `ConfigError` if there is no such verifier, and `VerifierError` if a part has no score; all others have come to their end then.
    """
    weights = parts(verifier)

    async def score(part: str) -> float:
        if part != JUDGE:
            return await rewards.score(question() if question and part == REWARD_MODEL else prompt, completion, reference, part)
        try:
            return await rewards.judge.score(prompt, completion, reference, strict)
        except JudgeError as error:
            raise VerifierError(str(error), hopeless=error.hopeless) from error

    # One that has failed cancels none: that would kill the processes of the others.
    outcomes = await asyncio.gather(*map(score, weights), return_exceptions=True)
    scores = {}
    for part, outcome in zip(weights, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise outcome
        scores[part] = outcome
    return scores[verifier] if verifier in scores else weighted_sum((weights[part], value) for part, value in scores.items()), scores
