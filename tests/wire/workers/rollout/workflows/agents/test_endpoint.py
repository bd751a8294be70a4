"""Agents by the real openai client, over real HTTP, in the worker and as programs; token by token against a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import msgspec
import numpy as np
import openai
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support import agent_programs
from tests.support.agent_programs import ADD
from tests.support.episodes import PROMPT, Chatter, Judge, leaf, make_lease, make_workflow
from tests.wire import fleet
from tests.wire.fleet import Weights, ended, generated, make_config, make_run, playing, working
from tests.wire.workers.rollout.leases.test_drain import oracle
from workers.config import Server
from workers.messages.from_coordinator import Finish
from workers.messages.from_worker import Goodbye, GroupFinished, GroupParked, Register
from workers.messages.groups import check_group, check_partial, group_episodes, samples
from workers.messages.parts import Group, Version
from workers.rollout.workflows.agents import process_guard
from workers.rollout.workflows.agents.conversation import Chat
from workers.rollout.workflows.agents.endpoint import Endpoint, _endpoints, admitted, shared_endpoint
from workers.rollout.workflows.episode import LLM, Episode, Reward, WorkflowError

DEADLINE_S = 120.0
TOLERANCE = 1e-4
HERE = "tests.support.agent_programs"
PROGRAM = [sys.executable, agent_programs.__file__]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 30}}</tool_call>'
USER: Any = {"role": "user", "content": "12 + 30 ="}

Steps = Callable[[Endpoint, str, Chat], Awaitable[None]]


async def with_endpoint(steps: Steps, chatter: Chatter | None = None, num_episodes: int = 1, alone: bool = True,
                        **settings: Any) -> Group:
    """Run `steps` as an agent of each episode. `alone`: nobody else needs the endpoint."""
    async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
        async with shared_endpoint(4) as endpoint, asyncio.TaskGroup() as tasks:
            chat = Chat(llm, episode.config, tasks)
            async with admitted(endpoint, chat) as key:
                await steps(endpoint, key, chat)
        return 1.0

    settings = {"group_size": num_episodes, "context": 3000, "max_new_tokens": 200, **settings}
    workflow = make_workflow(chatter or Chatter(says=lambda prompt: CALL if "add" in prompt and "42" not in prompt else "so 42"), run=run, **settings)
    async with asyncio.timeout(DEADLINE_S):
        group = await workflow.run(make_lease())
    check_group(group)
    assert bool(_endpoints) != alone, "it is closed with the last episode"
    return group


def client_of(endpoint: Endpoint, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0, timeout=DEADLINE_S)


def said_by_model(group: Group) -> list[bytes]:
    """All that the model said in each sample."""
    return [bytes(view.tokens[view.loss_mask].tolist()) for view in samples(group)]


# -- the official client -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("streams", [False, True])
async def test_tools_with_the_async_client(streams: bool) -> None:
    tools: list[Any] = [{**ADD, "function": {**ADD["function"], "strict": True}}]  # its stream() takes no others

    async def ask(client: AsyncOpenAI, messages: list[Any]) -> Any:
        if not streams:
            return await client.chat.completions.create(model="any", messages=messages, tools=tools, logprobs=True)
        async with client.chat.completions.stream(model="any", messages=messages, tools=tools, stream_options={"include_usage": True}) as stream:
            return await stream.get_final_completion()

    async def steps(endpoint: Endpoint, key: str, chat: Chat) -> None:
        async with client_of(endpoint, key) as client:
            assert [model.id async for model in client.models.list()] == ["policy"] and (await client.models.retrieve("mine")).id == "mine"
            first = await ask(client, [USER])
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls" and first.usage.completion_tokens == len(CALL) + 1
            assert message.content is None and json.loads(message.tool_calls[0].function.arguments) == {"a": 12, "b": 30}
            if not streams:
                assert [entry.token for entry in first.choices[0].logprobs.content] == [f"token_id:{byte}" for byte in CALL.encode() + b"\0"]
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
            last = await ask(client, [USER, message.to_dict() if streams else message, result])
            assert last.choices[0].message.content == "so 42" and last.choices[0].finish_reason == "stop"
            assert await client.post("/reward", body={"reward": 0.5}, cast_to=object) == {"reward": 0.5}
            with pytest.raises(openai.APIStatusError, match="is closed") as refused:
                await ask(client, [USER])
            assert refused.value.status_code == 410 and chat.score == 0.5

    group = await with_endpoint(steps)
    assert said_by_model(group) == [CALL.encode() + b"\0so 42\0"]


async def test_the_blocking_client_and_its_stream() -> None:
    def agent(url: str, key: str) -> None:
        with OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            chunks = list(client.chat.completions.create(model="any", messages=[USER], stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "so 42" and chunks[-1].choices[0].finish_reason == "stop"
            again = client.chat.completions.create(model="any", messages=[USER], max_completion_tokens=2)
            assert again.choices[0].message.content == "so" and again.choices[0].finish_reason == "length" and again.model == "any"

    group = await with_endpoint(lambda endpoint, key, chat: asyncio.to_thread(agent, endpoint.url, key))
    assert said_by_model(group) == [b"so 42\0", b"so"]


async def test_completions_with_the_async_client() -> None:
    async def steps(endpoint: Endpoint, key: str, chat: Chat) -> None:
        async with client_of(endpoint, key) as client:
            first = await client.completions.create(model="any", prompt="12 + 30 =", logprobs=1)
            assert first.choices[0].text == "so 42" and first.choices[0].finish_reason == "stop" and first.usage.completion_tokens == 6
            ids = [int(token.removeprefix("token_id:")) for token in first.choices[0].logprobs.tokens]
            assert bytes(ids) == b"so 42\0"
            stream = await client.completions.create(model="any", prompt=[*b"12 + 30 =", *ids, *b"\nno: "], stream=True, max_tokens=2,
                                                     stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "so" and chunks[-2].choices[0].finish_reason == "length"
            assert chunks[-1].usage.completion_tokens == 2
            with pytest.raises(openai.BadRequestError, match="echo: must be one of False"):
                await client.completions.create(model="any", prompt="a", echo=True)

    assert said_by_model(await with_endpoint(steps, Chatter(says=lambda prompt: "so 42"))) == [b"so 42\0so"]


async def test_errors_are_the_clients_errors() -> None:
    async def steps(endpoint: Endpoint, key: str, chat: Chat) -> None:
        async with client_of(endpoint, "headway-wrong") as client:
            for call in (client.chat.completions.create(model="any", messages=[USER]), client.post("/reward", body={"reward": 1}, cast_to=object)):
                with pytest.raises(openai.AuthenticationError, match="is not that of an episode"):
                    await call
        async with client_of(endpoint, key) as client:
            await client.chat.completions.create(model="any", messages=[USER])
            with pytest.raises(openai.BadRequestError, match="n: must be 1") as refused:
                await client.chat.completions.create(model="any", messages=[USER], n=2)
            assert (refused.value.param, refused.value.code, refused.value.type) == ("n", "unsupported_value", "invalid_request_error")
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * 4000}])
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(openai.NotFoundError, match="There are POST /v1/chat/completions"):
                await client.embeddings.create(model="any", input="x")
            with pytest.raises(openai.BadRequestError, match="a number from 0 to 1"):
                await client.post("/reward", body={"reward": 2}, cast_to=object)
        async with aiohttp.ClientSession() as http:
            for headers in ({}, {"Authorization": f"Basic {key}"}):
                async with http.get(f"{endpoint.url}/models", headers=headers) as response:
                    assert response.status == 401 and (await response.json())["error"]["code"] == "invalid_api_key"
            async with http.get(f"{endpoint.url}/reward", headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == 405 and "error" in await response.json()

    await with_endpoint(steps)


async def test_an_episode_that_has_ended_is_gone_while_others_go_on() -> None:
    async with shared_endpoint(4) as endpoint:
        keys = []

        async def steps(same: Endpoint, key: str, chat: Chat) -> None:
            keys.append(key)
            async with client_of(same, key) as client:
                await client.chat.completions.create(model="any", messages=[USER])

        await with_endpoint(steps, alone=False)
        async with client_of(endpoint, keys[0]) as client:
            with pytest.raises(openai.APIStatusError, match="has ended") as refused:
                await client.models.list()
            assert refused.value.status_code == 410
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{endpoint.url}/models")


async def test_episodes_beside_each_other_have_their_own_conversations() -> None:
    seen: list[tuple[str, str]] = []
    barrier = asyncio.Barrier(6)

    async def steps(endpoint: Endpoint, key: str, chat: Chat) -> None:
        seen.append((endpoint.url, key))
        async with client_of(endpoint, key) as client:
            messages: list[Any] = [USER]
            for _ in range(3):
                await barrier.wait()
                reply = await client.chat.completions.create(model="any", messages=messages)
                messages += [reply.choices[0].message, USER]

    group = await with_endpoint(steps, Chatter(), num_episodes=6)
    assert group_episodes(group).tolist() == list(range(6)) and len({url for url, _ in seen}) == 1 and len({key for _, key in seen}) == 6
    assert len(set(said_by_model(group))) == 6, "each is drawn by a seed of its own"


async def test_a_request_that_is_sent_again_is_not_sampled_again() -> None:
    gate = asyncio.Event()

    class Slow(Chatter):
        async def sample(self, *arguments: Any) -> Any:
            await gate.wait()
            return await super().sample(*arguments)

    async def steps(endpoint: Endpoint, key: str, chat: Chat) -> None:
        async with client_of(endpoint, key) as client:
            lost = asyncio.create_task(client.chat.completions.create(model="any", messages=[USER]))
            while not chat._asked:
                await asyncio.sleep(0.001)
            lost.cancel()
            while not chat._asked[0].gone():
                await asyncio.sleep(0.001)
            again = asyncio.create_task(client.chat.completions.create(model="any", messages=[USER]))
            while chat._asked[0].gone():
                await asyncio.sleep(0.001)
            gate.set()
            assert (await again).choices[0].message.content == "so 42" and chat._asked == []

    chatter = Slow(says=lambda prompt: "so 42")
    assert said_by_model(await with_endpoint(steps, chatter)) == [b"so 42\0"]


# -- the workflow --------------------------------------------------------------------------------------------------------

async def agent_group(judge: Judge | None = None, **settings: Any) -> Group:
    settings = {"group_size": 2, "max_new_tokens": 40, "context": 1000, **settings}
    workflow = make_workflow(Chatter(), judge or Judge(lambda completion: 1.0), name="agent", **settings)
    async with asyncio.timeout(DEADLINE_S):
        group = await workflow.run(make_lease())
    check_group(group)
    assert not _endpoints
    return group


async def test_an_agent_in_the_worker_is_judged_by_its_last_reply(capsys: pytest.CaptureFixture[str]) -> None:
    judge = Judge(lambda completion: 0.75)
    group = await agent_group(judge, agent=f"{HERE}:asks_twice")
    assert group.scores.tolist() == [0.75, 0.75] and group_episodes(group).tolist() == [0, 1] and len(judge.asked) == 2
    assert capsys.readouterr().out.count("sets temperature: it is ignored") == 1
    opening = f"\nuser: {PROMPT}\nassistant:"
    for view in samples(group):
        text = bytes(view.tokens.tolist())
        outside = bytes(view.tokens[~view.loss_mask].tolist()).decode()
        assert outside == "\nuser: Sure?\nassistant:" and outside.encode() in text
    assert bytes(group.prompt.tolist()).decode() == opening


@pytest.mark.parametrize(("agent", "score"), [("returns_half", 0.5), ("lingers", 0.25), ("fills", 1.0)])
async def test_scores_of_agents_in_the_worker(agent: str, score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rollout.workflows.agent.LEAVES_S", 0.5)
    assert set((await agent_group(agent=f"{HERE}:{agent}")).scores.tolist()) == {score}


@pytest.mark.parametrize(("settings", "words"), [
    ({"agent": f"{HERE}:breaks"}, ["the agent raised KeyError: 'no such tool'\n  ", "agent_programs.py, line ", ", in breaks: "]),
    ({"agent": f"{HERE}:silent"}, ["asked the model for nothing: it ended by itself"]), ({"agent": "no.such:agent"}, ["No module named 'no'"]),
    ({"agent": f"{HERE}:waits", "agent_timeout_s": 0.05, "agent_failures": "zero"}, ["nothing: it has not ended in workflow.agent_timeout_s=0.05"]),
    ({"agent_command": [*PROGRAM, "fails"]}, ["the agent exited with status 1; its output ends:\nxx", "xx\nit is broken\n", "agent_failures=zero"]),
    ({"agent_command": [*PROGRAM, "dies"]}, ["the agent was killed by SIGKILL, without output"]),
    ({"agent_command": ["/no/such/program"]}, ["exited with status 127; its output ends:\n/no/such/program: cannot be run"])])
async def test_an_agent_that_fails_fails_its_lease(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await agent_group(group_size=1, **settings)
    error = leaf(failed.value)
    assert isinstance(error, WorkflowError) and all(part in str(error) for part in words) and len(str(error)) < 2000, str(error)
    assert not _endpoints


async def test_an_agent_that_fails_may_have_no_score_instead(capsys: pytest.CaptureFixture[str]) -> None:
    group = await agent_group(agent=f"{HERE}:breaks", agent_failures="zero")
    assert group.scores.tolist() == [0.0, 0.0] and capsys.readouterr().out.count("raised KeyError") == 2


async def test_a_program_is_told_its_task_and_sends_its_reward() -> None:
    group = await agent_group(agent_command=[*PROGRAM, "rewards"], max_agents=1)
    assert group.scores.tolist() == [0.75, 0.75] and bytes(group.prompt.tolist()).decode() == f"\nuser: {PROMPT}42\nassistant:"


async def noted(note: Path) -> list[psutil.Process]:
    async with asyncio.timeout(DEADLINE_S):
        while not note.exists():
            await asyncio.sleep(0.01)
    return [psutil.Process(pid) for pid in json.loads(note.read_text())]


async def gone(processes: list[psutil.Process]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while any(process.is_running() for process in processes):
            await asyncio.sleep(0.01)


async def test_a_program_and_what_it_started_end_with_the_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_NOTE", str(tmp_path / "note"))
    running = asyncio.create_task(agent_group(agent_command=[*PROGRAM, "hangs"], group_size=1))
    processes = await noted(tmp_path / "note")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled() and not any(process.is_running() for process in processes) and not _endpoints


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
async def test_what_ends_with_the_whole_job_has_no_score(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's signals reach every process of a job on some clusters."""
    monkeypatch.setenv("AGENT_NOTE", str(tmp_path / "note"))
    running = asyncio.create_task(agent_group(agent_command=[*PROGRAM, "asks_and_hangs"], group_size=1, agent_failures="zero"))
    processes = await noted(tmp_path / "note")
    guard = processes[0].parent()
    assert guard is not None
    guard.send_signal(number)
    assert processes[0].is_running() and guard.is_running()
    processes[0].send_signal(number)
    with pytest.raises(ExceptionGroup) as failed:
        await running
    told = str(leaf(failed.value))
    assert f"the agent could not work: it exited with status 75; its output ends:\n{number.name} has told all of this job to end" in told
    assert not any(process.is_running() for process in (guard, *processes)) and not _endpoints


async def test_a_program_that_ends_itself_by_such_a_signal_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    group = await agent_group(agent_command=[*PROGRAM, "ends_itself"], group_size=1, agent_failures="zero")
    assert group.scores.tolist() == [0.0] and "was killed by SIGTERM" in capsys.readouterr().out


def test_processes_of_others_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: str) -> TextIO:
        if path == "/proc/1/stat":
            raise PermissionError(path)
        return open(path)

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(process_guard, "open", hidden, raising=False)
    try:
        assert child.pid in process_guard._children()
    finally:
        child.communicate()


async def test_a_program_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    code = ("import asyncio, sys; from workers.rollout.workflows.agents.agent_program import run_program; "
            "asyncio.run(run_program(sys.argv[1:], {}, 'http://127.0.0.1:9/v1', 'key'))")
    environment = {**os.environ, "AGENT_NOTE": str(tmp_path / "note"), "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen([sys.executable, "-c", code, *PROGRAM, "hangs"], env=environment)
    try:
        processes = await noted(tmp_path / "note")
    finally:
        worker.kill()
        worker.wait()
    await gone(processes)


# -- a real engine -------------------------------------------------------------------------------------------------------

async def test_an_agent_goes_on_token_by_token_on_another_worker(tmp_path: Path) -> None:
    """Fourteen turns of 40 tokens; the first worker leaves in the middle. All tokens are those that the engines gave, by Hugging Face's forward."""
    run, weights = make_run(tmp_path / "run"), Weights(tmp_path / "weights")
    config = make_config(weights.models[0], server=Server.embedded, max_new_tokens=40)
    config.workflow.name, config.workflow.agent = "agent", f"{HERE}:asks_often"
    old, new = weights.publish(Version(2, 1), 0), weights.publish(Version(2, 2), 1)
    async with playing(run, 1, old) as play:
        async with working(run, config) as (worker, task):
            await play.until_ready()
            await play.lease(fleet.make_lease("g1"))
            await generated(worker, 200)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (await ended(task)).how == "drained" and not _endpoints
        await play.until(lambda: play.all(Goodbye))
        parked = play.all(GroupParked)[0]  # it is sent again until it is acknowledged
        check_partial(parked.partial)
        assert parked.partial.tokens.size >= 100 and parked.partial.turns is not None
        play.announcement = new
        async with working(run, config) as (_, task):
            await play.until(lambda: len(play.all(Register)) == 2)
            await play.until_ready()
            await play.lease(msgspec.structs.replace(fleet.make_lease("g1", 1), partial=parked.partial))
            await play.until(lambda: play.all(GroupFinished))
            await play.say(Finish(""))
            await ended(task)
    finished = play.all(GroupFinished)[0]
    assert_exact(finished.group, parked.partial.tokens.size, (old.folder, new.folder))


def assert_exact(group: Group, num_kept: int, folders: tuple[str, str]) -> None:
    check_group(group)
    question, glue = "\nuser: 12 + 30 =\nassistant:", "\nuser: no\nassistant:"
    assert group_episodes(group).tolist() == [0, 1, 2] and group.prompt.size == len(question)
    assert sum(int(view.loss_mask[view.steps == 1].sum()) for view in samples(group)) == num_kept, "nothing was sampled twice"
    for view in samples(group):
        assert view.loss_mask.tolist() == ([True] * 40 + [False] * len(glue)) * 13 + [True] * 40
        first = view.steps == 1
        assert not first[int(first.sum()):].any(), "the old weights' tokens come first"
        for folder, which in zip(folders, (first, ~first), strict=True):
            chosen = which & view.loss_mask
            given = oracle(folder, group.prompt.tolist(), view.tokens.tolist(), 0.8)
            assert np.abs(given - view.logprobs)[chosen].max(initial=0) <= TOLERANCE
