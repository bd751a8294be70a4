"""What an evaluation writes of a prompt, and when it gives up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.episodes import PROMPT, Chatter, Judge, make_workflow
from workers.config import Config, RolloutConfig, RunConfig, WorkflowConfig
from workers.data.prompt import Prompt
from workers.evaluation.judge import MAX_FAILURES, Judging
from workers.messages.parts import Lease
from workers.slurm.termination import WorkerEnded

CONTEXT = 200


class Engines:
    """Nothing runs on them."""

    def release(self, lease: Lease) -> None:
        """It ran nowhere."""


def judging(prompts: list[str], chatter: Chatter, judge: Judge, **workflow: Any) -> Judging:
    made = make_workflow(chatter, judge, context=CONTEXT, **{"max_new_tokens": 60, "group_size": 1, **workflow})
    config = Config(run=RunConfig(seed=1), rollout=RolloutConfig(max_attempts=1), workflow=WorkflowConfig(stop=["</python>"]))
    return Judging(config, [Prompt(f"p{at}", text, "numeric", "42") for at, text in enumerate(prompts)], made, Engines(), chatter)  # type: ignore[arg-type]


def test_the_text_that_was_judged_is_written() -> None:
    def says(prompt: str) -> str:
        return "so 42" if "42\n```\n" in prompt else "<python>12+30</python>"

    judge = Judge(lambda completion: float(completion == "so 42"), lambda code: str(eval(code)))
    line = json.loads(asyncio.run(judging([PROMPT], Chatter(says=says), judge, name="python_tool", max_turns=3).judge(0)))
    [sample] = line["samples"]
    assert sample["response"] == "so 42" and sample["score"] == 1.0


def test_prompts_that_fail_at_once_do_not_end_what_others_have_begun() -> None:
    """Their failures come in a row only because the others take longer."""
    prompts = [PROMPT if at % 4 else "x" * CONTEXT for at in range(4 * (MAX_FAILURES + 2))]

    async def judged() -> list[dict]:
        one = judging(prompts, Chatter(says=lambda prompt: "42"), Judge())
        return [json.loads(line) for line in await asyncio.gather(*(one.judge(at) for at in range(len(prompts))))]

    lines = asyncio.run(judged())
    assert [line["index"] for line in lines if "failed" in line] == list(range(0, len(prompts), 4))


def test_where_all_fail_it_is_not_the_prompts() -> None:
    one = judging(["x" * CONTEXT] * MAX_FAILURES, Chatter(), Judge())
    for at in range(MAX_FAILURES - 1):
        assert "failed" in json.loads(asyncio.run(one.judge(at)))
    with pytest.raises(WorkerEnded, match="8 prompts in a row could not be judged; the last one because: prompt"):
        asyncio.run(one.judge(MAX_FAILURES - 1))
