"""Several answers, which the model itself judges; the first one that it finds right is the episode's.

    prompt -> answer 1 -> workflow.judge -> "no"
           -> answer 2 -> workflow.judge -> "yes"  --> its score is the episode's
           -> ...                                       none was found right: the first answer's

All answers and judgements of an episode share its score: judgements are trained by what they choose (workflow.train_judge).
"""

from __future__ import annotations

import asyncio
import re

from workers.rollout.workflows.agents.chat_messages import THOUGHT
from workers.rollout.workflows.episode import LLM, Conversation, Episode, Reply, Reward

_YES = re.compile(r"\W*yes\b", re.IGNORECASE)


async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
    """The score of the chosen answer."""
    conversations: list[Conversation] = [llm, *(llm.fork() for _ in range(episode.config.num_answers - 1))]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_judged(conversation, episode)) for conversation in conversations]
    answers = [task.result() for task in running]
    chosen = next((reply for reply, right in answers if right), answers[0][0])
    return await reward(chosen)


async def _judged(conversation: Conversation, episode: Episode) -> tuple[Reply, bool]:
    """An answer, and whether the model finds it right."""
    reply = await conversation.generate()
    judging = conversation.fork()
    judging.trained = episode.config.train_judge
    verdict = await judging.generate(episode.config.judge)
    return reply, bool(_YES.match(verdict.text.rpartition(THOUGHT)[2]))
