"""Answers until one is right: a wrong one is told so, and the model tries again.

    prompt -> answer -> verifier: wrong -> workflow.feedback -> answer -> ... at most workflow.max_turns answers

In training an answer that is right at turn t has its score times workflow.turn_discount ** (t - 1), so that an earlier one is worth more.
"""

from __future__ import annotations

from workers.messages.parts import Purpose
from workers.rollout.workflows.episode import LLM, Episode, Reward

RIGHT = 1.0


async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
    """The score of the last answer, discounted."""
    config = episode.config
    discount = config.turn_discount if episode.purpose is Purpose.training else 1.0
    reply = await llm.generate()
    score, turn = await reward(reply), 0
    while score < RIGHT and turn + 1 < config.max_turns:
        reply = await llm.generate(config.feedback)
        if not reply.tokens:
            break  # no room for another turn
        score, turn = await reward(reply), turn + 1
    return score * discount**turn
