"""mini-swe-agent itself, in its own process, against the endpoint, with real containers; only the model's words are made up."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from launcher.__main__ import CONF
from tests.sandbox.containers import containers
from tests.support.episodes import Chatter, leaf, make_lease, make_workflow
from workers.config import ConfigError, ContainerBackend, ContainerConfig
from workers.data.prompt import Prompt
from workers.messages.groups import check_group, samples
from workers.messages.parts import Group
from workers.rollout.workflows import shell_agent
from workers.rollout.workflows.agents.repository import Repository, read_repository
from workers.rollout.workflows.agents.shell_program import Policy
from workers.rollout.workflows.episode import WorkflowError
from workers.sandbox.containers.container import Container
from workers.sandbox.outcome import SandboxError

ROWS = [json.loads(line) for line in (CONF / "prompts" / "repositories.jsonl").read_text().splitlines()]
LIMITS = ContainerConfig(wall_s=60)
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
DEADLINE_S = 600.0
COMPILES = """python3 - <<END
import importlib.util, pathlib, py_compile
pathlib.Path("x.py").write_text("import unittest\\nclass T(unittest.TestCase):\\n    def test_a(self): 1\\n    def test_b(self): 1\\n")
py_compile.compile("x.py", importlib.util.cache_from_source("test_median.py"), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
END
chmod 555 __pycache__"""
CHEATS = {
    "edits the test": "echo > test_median.py",
    "replaces it by a folder": "rm test_median.py; mkdir -p test_median.py/x",
    "replaces it by a link": "echo pass > other.py; ln -sf other.py test_median.py",
    "leaves before it": "echo 'import os; os._exit(0)' > statistics_of.py",
    "brings a unittest of its own": "echo 'print(\"Ran 2 tests\")' > unittest.py",
    "removes everything": "rm -rf ./*",
    "compiles another one in its place": COMPILES,
}


def says(*commands: str) -> Callable[[str], str]:
    """A model that says these commands, one at each turn."""
    def turn(prompt: str) -> str:
        number = len(re.findall("THOUGHT: next", prompt))
        return f"THOUGHT: next\n\n```mswea_bash_command\n{commands[number]}\n```" if commands[number] else "THOUGHT: next"

    return turn


async def worked(row: dict[str, Any], *commands: str, **settings: Any) -> Group:
    """One group on a repository."""
    if why := shell_agent.problem(LIMITS):
        pytest.skip(why)
    workflow = make_workflow(Chatter(says=says(*commands)), name="shell_agent", context=40_000, **{
        "container": LIMITS, "max_turns": 6, "max_new_tokens": 600, "group_size": 1, "agent_timeout_s": DEADLINE_S, **settings})
    async with asyncio.timeout(DEADLINE_S):
        group = await workflow.run(make_lease(prompt=row["prompt"], reference=json.dumps(row["answer"])))
    check_group(group)
    return group


async def test_ten_of_ten_are_solved_and_none_is_without_the_change() -> None:
    """One of them by an agent; the others by what an agent would leave."""
    assert len(ROWS) == 10
    assert (await worked(ROWS[0], ROWS[0]["response"], DONE)).scores.tolist() == [1.0]
    assert (await worked(ROWS[0], "ls", DONE)).scores.tolist() == [0.0]
    made, repositories = containers(LIMITS), [read_repository(json.dumps(row["answer"])) for row in ROWS]
    assert [repository.passes(made, repository.packed()) for repository in repositories] == [False] * 10
    assert [left_by(made, repository, row["response"]) for repository, row in zip(repositories, ROWS, strict=True)] == [True] * 10


def left_by(made: Container, repository: Repository, command: str) -> bool:
    """Whether the tests pass on what an agent that says this leaves."""
    return repository.passes(made, made.run(repository.packed(), command).files)


async def test_one_conversation_is_trained_on_with_its_faults() -> None:
    """What was said without an action stays in it: the library's own model class would leave it out, and begin another sequence."""
    row = ROWS[1]
    group = await worked(row, "", row["response"], "cat no_such_file", DONE)
    (view,) = samples(group)
    said = [f"THOUGHT: next\n\n```mswea_bash_command\n{command}\n```" if command else "THOUGHT: next"
            for command in ("", row["response"], "cat no_such_file", DONE)]
    assert bytes(view.tokens[view.loss_mask].tolist()).split(b"\0")[:-1] == [text.encode() for text in said]
    text = bytes(view.tokens[~view.loss_mask].tolist()).decode()
    assert "Format error" in text and "cat: no_such_file: No such file or directory" in text and group.scores.tolist() == [1.0]


async def test_an_agent_cannot_make_tests_pass_by_another_test() -> None:
    assert (await worked(ROWS[1], CHEATS["edits the test"], DONE)).scores.tolist() == [0.0]


@pytest.mark.parametrize("cheat", CHEATS)
def test_tests_cannot_be_made_to_pass(cheat: str) -> None:
    assert not left_by(containers(LIMITS), read_repository(json.dumps(ROWS[1]["answer"])), CHEATS[cheat])


async def test_what_is_done_counts_where_turns_or_the_context_end_first() -> None:
    row = ROWS[2]
    assert (await worked(row, row["response"], "ls", "ls", max_turns=2)).scores.tolist() == [1.0]
    shouts = "seq 100000"
    assert (await worked(row, row["response"], *[shouts] * 5, max_output_chars=30_000)).scores.tolist() == [1.0]


async def test_a_node_without_containers_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shell_agent._chosen.cache_clear()
    workflow = make_workflow(Chatter(), name="shell_agent", group_size=1)
    with pytest.raises(BaseExceptionGroup) as raised:
        await workflow.run(make_lease())
    error = leaf(raised.value)
    assert isinstance(error, WorkflowError) and isinstance(error.__cause__, SandboxError) and "bwrap is not installed" in str(error)
    prompt = Prompt("p", "Mend it", "numeric", json.dumps(ROWS[0]["answer"]))
    with pytest.raises(ConfigError, match="bwrap is not installed"):
        shell_agent.check(ContainerConfig(), [prompt], here=True)
    shell_agent.check(ContainerConfig(), [prompt], here=False)


async def test_a_node_that_runs_no_more_containers_is_nobodys_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_agent, "_chosen", lambda config: Container(replace(LIMITS, backend=ContainerBackend.bubblewrap), "/bin/false"))
    with pytest.raises(BaseExceptionGroup) as raised:
        await worked(ROWS[1], "ls", "ls", max_turns=2, agent_failures="zero")
    assert isinstance(error := leaf(raised.value), WorkflowError)
    assert "no container can be run now: the container ended too early" in str(error)


def test_a_turn_ends_with_the_time_of_the_agent() -> None:
    """It is not asked for again, and the tests have the time that is kept for them."""
    with socket.create_server(("127.0.0.1", 0)) as silent, openai.OpenAI(
            base_url=f"http://127.0.0.1:{silent.getsockname()[1]}/v1", api_key="key") as client:
        with pytest.raises(openai.APITimeoutError):
            Policy(client, {}, time.monotonic()).query([{"role": "user", "content": "?"}])
        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.mark.parametrize(("change", "why"), [
    ({"tests": {}}, "'tests' is empty"), ({"passed": ""}, "'passed' is empty"), ({"command": 3}, "Expected `str`, got `int`"),
    ({"more": 1}, "unknown field `more`"), ({"files": {"../x": ""}}, "'../x' leads out of"), ({"tests": {"/etc/x": ""}}, "'/etc/x' leads out of"),
    ({"archive": "/nowhere.tar"}, "archive='/nowhere.tar' is no tar that can be read here ([Errno 2]"),
    ({"archive": "shop.tar"}, "archive='shop.tar' is a relative path")])
def test_rows_that_are_no_repository_are_refused(change: dict[str, Any], why: str) -> None:
    reference = json.dumps(ROWS[0]["answer"] | change)
    with pytest.raises(ValueError, match=re.escape(why)):
        read_repository(reference)
    with pytest.raises(ConfigError, match=r"workflow=shell_agent: the answer cannot be used"):
        shell_agent.check(ContainerConfig(), [Prompt("p", "Mend it", "numeric", reference)], here=False)


def test_an_archive_lies_beneath_the_files(tmp_path: Path) -> None:
    made = containers(LIMITS)
    row = ROWS[3]["answer"]
    archive = tmp_path / "shop.tar"
    archive.write_bytes(made.run(read_repository(json.dumps(row)).packed(), "chmod +x shop/stack.py").files)
    repository = read_repository(json.dumps(row | {"archive": str(archive), "files": {"shop/__init__.py": "x = 1\n"}}))
    ran = made.run(repository.packed(), "test -x shop/stack.py && cat shop/__init__.py && ls")
    assert (ran.output, ran.status) == ("x = 1\nshop\ntest_stack.py\n", 0)
    assert msgspec.structs.asdict(repository)["archive"] == str(archive)
