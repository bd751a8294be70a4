"""The model may run Python: what its program prints comes back, and it goes on.

    prompt -> answer with a program -> sandbox -> output -> answer ... until one has no program: that is judged

A program stands in a fenced block (```python) or between <python> and </python> (which may be the stop string that ended the turn); the last one
of a turn is run. The output is not trained on.
"""

from __future__ import annotations

import re

from workers.rollout.workflows.episode import LLM, Episode, Reward
from workers.sandbox.outcome import shortened

_PROGRAM = re.compile(r"```(?:python|py)[ \t]*\r?\n(.*?)```|<python>(.*?)(?:</python>|\Z)", re.DOTALL | re.IGNORECASE)


async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
    """The score of the last answer. The last turn there may be is judged as it is."""
    reply = await llm.generate()
    for _ in range(episode.config.max_turns - 1):
        code = program(reply.text)
        if code is None:
            break
        answer = await llm.generate(shown(await episode.tools.python(code), episode.config.max_output_chars))
        if not answer.tokens:
            break  # no room for another turn
        reply = answer
    return await reward(reply)


def program(text: str) -> str | None:
    """The last program in `text`, None where there is none."""
    found = list(_PROGRAM.finditer(text))
    return next(code for code in found[-1].groups() if code is not None) if found else None


def shown(output: str, max_chars: int) -> str:
    """A program's output as the model sees it."""
    return f"\n```output\n{shortened(output, max_chars).rstrip()}\n```\n"
