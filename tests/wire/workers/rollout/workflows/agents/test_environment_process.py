"""Environments of the verifiers library in a process of their own, over real HTTP and pipes, with a model that is played."""

from __future__ import annotations

import asyncio
import json
import re
import venv
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.episodes import Chatter, leaf, make_lease, make_workflow
from tests.support.processes import command_line
from workers.config import Config, ConfigError, DataConfig, DataKind, RewardConfig, WorkflowConfig
from workers.config.generation import ModelConfig
from workers.data.prompts import open_prompts
from workers.messages.groups import check_group, group_episodes, samples
from workers.messages.parts import Group
from workers.rollout.workflows.agents import environment_process
from workers.rollout.workflows.agents.environment_process import bring_tasks, score_of, shared_environment
from workers.rollout.workflows.episode import WorkflowError
from workers.run.folder import RunFolder

ENVIRONMENTS = Path(__file__).parents[5] / "support" / "environments"
DEADLINE_S = 300.0
CALL = '<tool_call>{"name": "dictionary_look_up", "arguments": {"word": "sea"}}</tool_call>'


@pytest.fixture(autouse=True)
def findable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environments of the tests can be imported; what the library keeps at home is kept elsewhere."""
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    monkeypatch.setenv("HOME", str(tmp_path))


async def group_of(env: str, task: dict[str, Any], says: Callable[[str], str], **settings: Any) -> Group:
    settings = {"group_size": 2, "context": 4000, "max_new_tokens": 200, "env": env, **settings}
    workflow = make_workflow(Chatter(says=says), name="verifiers", **settings)
    async with asyncio.timeout(DEADLINE_S):
        group = await workflow.run(make_lease(reference=json.dumps({"idx": 0, **task})))
    check_group(group)
    return group


def played(steps: Callable[[], Awaitable[None]]) -> None:
    """Run `steps` on an event loop of their own; nothing that they started is left behind it."""
    asyncio.run(steps())
    assert not [child for child in psutil.Process().children(recursive=True) if "environment_program" in " ".join(command_line(child))]


def digits(prompt: str) -> str:
    return "79x"


def test_an_environment_of_one_turn_scores_its_episodes() -> None:
    async def steps() -> None:
        task = {"prompt": "70=", "digit": "7", "system_prompt": "Be near."}
        group = await group_of("first_digit", task, digits, group_size=8)
        process = await shared_environment(WorkflowConfig(name="verifiers", env="first_digit"))
        expected = (1 + 7 / 9 + 0) / 3
        assert group.scores.tolist() == pytest.approx([expected] * 8) and group_episodes(group).tolist() == list(range(8))
        assert bytes(group.prompt.tolist()).decode() == "\nsystem: Be near.\nuser: 70=\nassistant:"
        assert {bytes(view.tokens.tolist()) for view in samples(group)} == {b"79x\0"}
        scaled = await group_of("first_digit", task, digits, env_rewards=[-1.0, 1.0], max_agents=1)
        assert scaled.scores.tolist() == pytest.approx([(1 + expected) / 2] * 2)
        assert await shared_environment(WorkflowConfig(name="verifiers", env="first_digit")) is process, "it serves all of them"
    played(steps)


def test_an_environment_with_a_tool_is_one_sequence() -> None:
    async def steps() -> None:
        group = await group_of("lookup", {"prompt": "sea"}, lambda prompt: "it is mer" if "\nmer\n" in prompt else CALL, group_size=1)
        (view,) = samples(group)
        assert group.scores.tolist() == [1.0] and "# Tools" in bytes(group.prompt.tolist()).decode()
        assert bytes(view.tokens[view.loss_mask].tolist()) == f"{CALL}\0it is mer\0".encode()
        assert bytes(view.tokens[~view.loss_mask].tolist()) == b"\nuser: <tool_response>\nmer\n</tool_response>\nassistant:"
    played(steps)


def test_what_goes_wrong_in_an_environment_fails_its_lease_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_process, "GIVEN_UP_S", 0.5)

    async def failure(does: str, **settings: Any) -> str:
        with pytest.raises(ExceptionGroup) as failed:
            await group_of("unsteady", {"prompt": "?", "does": does}, digits, group_size=1, **settings)
        error = leaf(failed.value)
        assert isinstance(error, WorkflowError)
        return str(error)

    async def steps() -> None:
        assert (await group_of("unsteady", {"prompt": "?", "does": "1"}, digits)).scores.tolist() == [1.0, 1.0]
        assert "no such answer" in await failure("breaks")
        assert "gave a reward of 2.5: outside workflow.env_rewards=[0, 1]" in await failure("2.5", agent_failures="zero")
        assert (await group_of("unsteady", {"prompt": "?", "does": "breaks"}, digits, agent_failures="zero")).scores.tolist() == [0.0, 0.0]
        assert "not ended in workflow.agent_timeout_s=5" in await failure("hangs", agent_timeout_s=5.0)
        assert (await group_of("unsteady", {"prompt": "?", "does": "0"}, digits)).scores.tolist() == [0.0, 0.0], "by another process"
        assert "the process that ran it has ended" in await failure("ends")
        assert (await group_of("unsteady", {"prompt": "?", "does": "0.5"}, digits)).scores.tolist() == [0.5, 0.5]
        await group_of("unsteady", {"prompt": "?", "does": "1"}, lambda prompt: "x" * 900, context=400)  # the model has no room: judged all the same
    played(steps)


# -- before a run --------------------------------------------------------------------------------------------------------

def brought(folder: Path, env: str, **changes: Any) -> Config:
    config = Config(model=ModelConfig(path="model"), workflow=WorkflowConfig(name="verifiers", env=env, **changes),
                    data=DataConfig(kind=DataKind.verifiers, num_heldout=2))
    bring_tasks(config, RunFolder(folder))
    return config


def test_its_tasks_become_the_data_set(tmp_path: Path) -> None:
    config = brought(tmp_path, "first_digit", env_args={"taskset": {"num_tasks": 5}})
    config.check()
    source = open_prompts(config.data, RewardConfig(), 1)
    prompts = [*source.preview(9), *source.heldout()]
    assert sorted(prompt.text for prompt in prompts) == [f"0{number}=" for number in range(5)] and len(source.heldout()) == 2
    assert {json.loads(prompt.reference)["digit"] for prompt in prompts} == {"0"}


@pytest.mark.long  # but for the cut, as above
def test_of_endless_tasks_some_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_process, "MAX_TASKS", 7)
    config = brought(tmp_path, "unsteady")
    rows = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]
    assert [row["id"] for row in rows] == [str(number) for number in range(7)] and rows[0]["prompt"] == "a task without a question"


@pytest.mark.parametrize(("env", "changes", "words"), [
    ("no-such-env", {}, "workflow.env='no-such-env': environment 'no-such-env': ModuleNotFoundError: taskset 'no-such-env' not found"),
    pytest.param("first_digit", {"env_args": {"taskset": {"nothing": 1}}}, "nothing", marks=pytest.mark.long),
    ("first_digit", {"env_python": "/no/such/python"}, "workflow.env_python='/no/such/python': cannot be run (No such file or directory)")])
def test_an_environment_that_cannot_be_loaded_is_refused(env: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        brought(tmp_path, env, **changes)


def test_a_python_without_the_library_is_told(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    words = r"bare/bin/python cannot import verifiers.v1 .*pip install 'headway\[verifiers\]'.* by workflow.env_python"
    with pytest.raises(ConfigError, match=words):
        brought(tmp_path, "first_digit", env_python=str(tmp_path / "bare" / "bin" / "python"))


@pytest.mark.parametrize(("changes", "words"), [
    ({"env": ""}, "workflow.env='': must name an environment"), ({"env_rewards": [1.0, 0.0]}, "the second greater"),
    ({"env_rewards": [0.0]}, "two numbers"), ({"env_rewards": [0.0, float("inf")]}, "two numbers"), ({"agent": "a:b"}, "only counts for agent"),
    ({"name": "agent", "agent": "a:b"}, "only counts for verifiers"), ({"tool_format": "xml"}, "must be one of auto, hermes")])
def test_a_config_that_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        WorkflowConfig(**{"name": "verifiers", "env": "e", **changes}).check()


def test_prompts_and_workflow_go_together() -> None:
    for workflow, data in ((WorkflowConfig(name="verifiers", env="e"), DataConfig()), (WorkflowConfig(), DataConfig(kind=DataKind.verifiers))):
        with pytest.raises(ConfigError, match="does not go with workflow.name"):
            Config(model=ModelConfig(path="model"), workflow=workflow, data=data).check()


def test_scores_are_between_the_bounds() -> None:
    config = WorkflowConfig(name="verifiers", env="e", env_rewards=[-2.0, 2.0])
    assert [score_of(reward, config) for reward in (-2.0, 0.0, 2.0)] == [0.0, 0.5, 1.0]
    for reward in (2.1, float("nan")):
        with pytest.raises(ConfigError, match="outside workflow.env_rewards"):
            score_of(reward, config)
