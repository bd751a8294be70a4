"""One prompt, one response, one reward."""

from __future__ import annotations

from workers.rollout.workflows.episode import LLM, Episode, Reward


async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
    """The score of one answer."""
    return await reward(await llm.generate())
