"""The built-in workflows, those of users, their config, and groups of several episodes."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.support.episodes import PROMPT, Chatter, Judge, assert_routed, make_lease, make_workflow
from tests.support.groups import make_group
from workers.algorithms.advantages import by_episode, group_norm
from workers.config import ConfigError, ContainerBackend, ContainerConfig, WorkflowConfig
from workers.config.workflow import WORKFLOWS
from workers.messages.arrays import Float32, Int32
from workers.messages.codec import MessageError
from workers.messages.groups import check_group, group_episodes, group_firsts, samples
from workers.messages.parts import Group, Purpose
from workers.rollout.workflows.python_tool import program, shown
from workers.rollout.workflows.workflow import load

END = "\0"


def run(chatter: Chatter, rewards: Judge, purpose: Purpose = Purpose.training, **config: Any) -> Group:
    workflow = make_workflow(chatter, rewards, context=1000, **{"max_new_tokens": 60, "group_size": 1, **config})
    group = asyncio.run(workflow.run(make_lease(purpose=purpose)))
    check_group(group)
    assert_routed(group)
    return group


def texts(group: Group) -> list[str]:
    """What stands in each sample, with what the model did not say in brackets."""
    found = []
    for view in samples(group):
        marked, before = "", True
        for token, said in zip(view.tokens.tolist(), view.loss_mask.tolist(), strict=True):
            marked += ("" if said == before else "]" if said else "[") + chr(token)
            before = said
        found.append(marked)
    return found


def counting(prompt: str) -> str:
    """Answers one more at each turn."""
    return str(40 + prompt.count("wrong"))


def right(completion: str) -> float:
    return float(completion == "42")


def test_an_episode_that_has_come_to_its_end_is_live_no_more() -> None:
    """Long before the group has: its place is another's."""
    async def scenario() -> list[int]:
        seen, workflow = list[int](), make_workflow(Chatter(ends_in=30), Judge(), context=1000, max_new_tokens=200, group_size=6)
        lease = make_lease()
        record = workflow.begin(lease)
        running = asyncio.create_task(workflow.run(lease, record))
        while not running.done():
            seen.append(record.num_live)
            await asyncio.sleep(0)
        await running
        return [*seen, record.num_live]

    seen = asyncio.run(scenario())
    assert seen[0] == 6 and seen[-1] == 0 and seen == sorted(seen, reverse=True) and len(set(seen)) > 3


@pytest.mark.parametrize(("turns", "score", "said"), [(1, 0.0, "40\0"), (2, 0.0, "40\0[wrong]41\0"), (3, 0.25, "40\0[wrong]41\0[wrong]42\0"),
                                                      (9, 0.25, "40\0[wrong]41\0[wrong]42\0")])
def test_multi_turn_tries_again_until_it_is_right(turns: int, score: float, said: str) -> None:
    config: dict[str, Any] = {"name": "multi_turn", "max_turns": turns, "turn_discount": 0.5, "feedback": "wrong"}
    group = run(Chatter(says=counting), Judge(right), **config)
    assert texts(group) == [said] and group.scores.tolist() == [score] and group.first_text == "40"
    held_out = run(Chatter(says=counting), Judge(right), Purpose.evaluation, **config)
    assert held_out.scores.tolist() == [float(score > 0)], "a held-out answer counts whole"


def test_multi_turn_ends_where_there_is_no_room() -> None:
    judge = Judge(right)
    workflow = make_workflow(Chatter(says=counting), judge, context=22, max_new_tokens=4, group_size=1,
                             name="multi_turn", max_turns=9, feedback="wrong")
    group = asyncio.run(workflow.run(make_lease()))
    assert texts(group) == ["40\0[wrong]41\0"] and group.scores.tolist() == [0.0] and len(judge.asked) == 2


@pytest.mark.parametrize(("text", "found"), [
    ("no program", None), ("```\n1\n```", None), ("```python\nprint(1)\n```", "print(1)\n"), ("<python>2</python>", "2"), ("<python>\n3", "\n3"),
    ("```py\na\n``` and then ```Python\nb\n``` so", "b\n"), ("```python\na\n```\n<python>b</python>", "b"), ("```python\nunfinished", None)])
def test_the_last_program_of_a_turn_is_found(text: str, found: str | None) -> None:
    assert program(text) == found


@given(st.text(max_size=40), st.integers(1, 30))
def test_output_is_shown_in_part(output: str, limit: int) -> None:
    text = shown(output, limit)
    assert text.startswith("\n```output\n") and text.endswith("\n```\n")
    if len(output) > limit:
        assert f"... {len(output) - limit} characters left out ..." in text and output[: limit - limit // 2] in text
    else:
        assert text == f"\n```output\n{output.rstrip()}\n```\n"


def test_python_tool_goes_on_from_what_a_program_prints() -> None:
    def says(prompt: str) -> str:
        return "so 42" if "42\n```\n" in prompt else "<python>12+30</python>"

    judge = Judge(lambda completion: float(completion == "so 42"), lambda code: str(eval(code)))
    group = run(Chatter(says=says), judge, name="python_tool", max_turns=3)
    assert texts(group) == ["<python>12+30</python>\0[\n```output\n42\n```\n]so 42\0"] and group.scores.tolist() == [1.0]
    group = run(Chatter(says=says), judge, name="python_tool", max_turns=1)
    assert texts(group) == ["<python>12+30</python>\0"] and group.scores.tolist() == [0.0], "what the last turn says is judged as it is"


@pytest.mark.parametrize("trained", [True, False])
def test_self_verification_takes_the_first_answer_that_is_found_right(trained: bool) -> None:
    answers = iter(["40", "41", "42", "43"])

    def says(prompt: str) -> str:
        if prompt == PROMPT:
            return next(answers)
        return "<think>yes or no</think> Yes!" if "42" in prompt.removeprefix(PROMPT) else "<think>no</think>no, yes is wrong"

    judge = Judge(right)
    group = run(Chatter(says=says), judge, name="self_verification", judge="?", train_judge=trained)
    assert [completion for _, completion, _, _ in judge.asked] == ["42"] and set(group.scores.tolist()) == {1.0}
    assert set(group_episodes(group).tolist()) == {0}
    judged = {"[40\0?]<think>no</think>no, yes is wrong\0", "[42\0?]<think>yes or no</think> Yes!\0"}
    expected = {"40\0", "41\0", "42\0", "43\0"} | (judged if trained else set())
    assert expected <= set(texts(group)) and len(texts(group)) == (8 if trained else 4)
    answers = iter(["40", "41", "43", "44"])
    group = run(Chatter(says=says), judge, name="self_verification", judge="?", train_judge=trained)
    assert judge.asked[-1][1] == "40" and set(group.scores.tolist()) == {0.0}, "none was found right"


# -- which workflow ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_built_in_workflow_is_there(name: str) -> None:
    WorkflowConfig(name=name, agent="a:b" if name == "agent" else "", env="e" if name == "verifiers" else "").check()
    assert asyncio.iscoroutinefunction(load(name))


@pytest.mark.parametrize(("changes", "words"), [
    ({"name": "multi_turns"}, "Did you mean multi_turn?"), ({"name": "my.module"}, "must be one of single_turn, "),
    ({"name": "x:y:z"}, "must be one of"),
    ({"max_turns": 4}, "must be left at its default with workflow.name=single_turn. It only counts for multi_turn and python_tool and shell_agent "),
    ({"name": "python_tool", "turn_discount": 0.5}, "only counts for multi_turn and functions of your own"),
    ({"name": "multi_turn", "options": {"a": 1}}, "only counts for functions of your own"), ({"name": "multi_turn", "max_turns": 0}, "at least 1"),
    ({"name": "multi_turn", "turn_discount": 0.0}, "greater than 0"), ({"name": "multi_turn", "feedback": ""}, "must not be empty"),
    ({"name": "self_verification", "num_answers": 1}, "at least 2"), ({"name": "self_verification", "judge": ""}, "must not be empty"),
    ({"name": "python_tool", "max_output_chars": 0}, "at least 1"),
    ({"name": "agent", "agent": "a:b", "container": ContainerConfig(disk_mb=3)}, "only counts for shell_agent and functions of your own"),
    ({"name": "shell_agent", "agent": "a:b"}, "only counts for agent and"), ({"name": "shell_agent", "max_agents": 0}, "at least 1"),
    ({"name": "shell_agent", "agent_timeout_s": 90}, "must be more than 3 times workflow.container.wall_s=30"),
    ({"name": "shell_agent", "container": ContainerConfig(num_processes=1)}, "workflow.container.num_processes=1: must be from 8 to"),
    ({"name": "shell_agent", "container": ContainerConfig(image="here.sif")}, "must be an absolute path"),
    ({"name": "shell_agent", "container": ContainerConfig(backend=ContainerBackend.apptainer)}, "must be given with workflow.container.backend=")])
def test_a_config_that_cannot_work_or_counts_for_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        WorkflowConfig(**changes).check()


def test_functions_of_ones_own_may_read_every_key() -> None:
    WorkflowConfig(name="my.module:run", max_turns=9, options={"level": 2}, num_answers=7, train_judge=False).check()


@pytest.mark.parametrize(("name", "words"), [
    ("no.such.module:run", "cannot be imported (No module named 'no'). Put its folder on PYTHONPATH"),
    ("tests.support.groups:run", "module tests.support.groups has no function 'run'. Correct the import path"),
    ("tests.support.groups:make_group", "it is no 'async def make_group(episode, llm, reward)'. Make it async")])
def test_a_function_that_is_not_there_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(name)


# -- episodes of several samples -----------------------------------------------------------------------------------------

def grouped(episodes: list[int] | None, rewards: list[float]) -> Group:
    group = make_group("g1", steps=[0] * len(rewards), rewards=rewards)
    return Group(**{**{name: getattr(group, name) for name in group.__struct_fields__},
                    "episodes": None if episodes is None else Int32.of(np.array(episodes, np.int32))})


@pytest.mark.parametrize(("episodes", "rewards", "words"), [
    ([0, 0], [1.0, 2.0, 3.0], "one item a sample"), ([1, 1, 2], [1.0, 1.0, 2.0], "ascend from 0"), ([0, 2, 2], [1.0, 2.0, 2.0], "without a gap"),
    ([0, 1, 0], [1.0, 1.0, 1.0], "ascend"), ([0, 0, 1], [1.0, 2.0, 2.0], "the same reward"), ([0, -1, -1], [1.0, 2.0, 2.0], "ascend")])
def test_episodes_that_do_not_fit_are_refused(episodes: list[int], rewards: list[float], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        check_group(grouped(episodes, rewards))


def test_scores_of_an_episode_are_equal_too() -> None:
    group = grouped([0, 0], [1.0, 1.0])
    with pytest.raises(MessageError, match="the same reward and the same score"):
        check_group(Group(**{**{name: getattr(group, name) for name in group.__struct_fields__}, "scores": Float32.of([0.5, 0.75])}))


def test_every_sample_is_an_episode_unless_said() -> None:
    group = grouped(None, [1.0, 2.0, 3.0])
    check_group(group)
    assert group_episodes(group).tolist() == group_firsts(group).tolist() == [0, 1, 2]
    group = grouped([0, 0, 1, 2, 2], [1.0, 1.0, 2.0, 3.0, 3.0])
    check_group(group)
    assert group_firsts(group).tolist() == [0, 2, 3]


@given(npst.arrays(np.float32, st.integers(1, 8), elements=st.floats(-5, 5, width=32)), st.data())
def test_an_episode_counts_once_however_many_samples_it_has(rewards: np.ndarray, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=len(rewards), max_size=len(rewards)))
    episodes = torch.from_numpy(np.repeat(np.arange(len(rewards)), counts))
    expected = group_norm(torch.from_numpy(rewards))
    assert torch.equal(by_episode(group_norm, torch.from_numpy(rewards)[episodes], episodes), expected[episodes])


def test_episodes_and_rewards_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="both must be"):
        by_episode(group_norm, torch.ones(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one response"):
        by_episode(group_norm, torch.ones(0), torch.zeros(0, dtype=torch.int64))
