"""An environment of the `verifiers` library, open to a rollout worker: one process for many episodes.

    python environment_program.py tasks ENVIRONMENT MAX   --stdout--> its tasks, a row of a data set each
    python environment_program.py serve ENVIRONMENT       {"call": 3, "task": ..., "url": ..., "key": ...} --stdin--> an episode at the endpoint `url`
                                                          {"call": 3, "reward": 0.5} or {"error": ...}  <--stdout--
                                                          {"call": 3, "cancel": true} --stdin--> it is given up

ENVIRONMENT is JSON: {"env": NAME, "args": {...}}. It imports nothing of ours: workflow.env_python, which runs it, may be another environment than the
worker's. The library's API is that of 0.4 (https://github.com/PrimeIntellect-ai/verifiers): a taskset, whose tasks agents play and score.
"""

import asyncio
import functools
import itertools
import json
import os
import ssl
import sys
import types
from contextlib import AsyncExitStack
from typing import Any

try:
    import verifiers.v1 as vf
except ImportError as missing:
    sys.exit(f"{sys.executable} cannot import verifiers.v1 ({missing}). Install it there (pip install 'headway[verifiers]', or "
             "'verifiers>=0.4,<0.5'), or name a Python that has it by workflow.env_python")

from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]
"""The library makes an HTTP client for each episode, and each would read the certificates again: half of an episode's time."""
CHAT = "headway_chat"
MAX_LINE_BYTES = 256 << 20


class ChatConfig(HarnessConfig):
    """Of `Chat`: nothing of its own."""


class Chat(Harness[ChatConfig]):
    """A chat with the task's tools, in this process; the library's own starts a program for every episode."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any) -> ProgramResult:
        """Ask, call tools and ask again, until the model calls none or has no room."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0) as client, AsyncExitStack() as stack:
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                try:
                    completion = await client.chat.completions.create(model=ctx.model, messages=messages, **({"tools": tools} if tools else {}))
                except APIStatusError as error:
                    if not is_context_overflow(error):
                        raise
                    break
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    said = await _called(connections, places, call.function)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
                if not message.tool_calls:
                    break
        return ProgramResult(0, "", "")


async def _called(connections: Any, places: Any, function: Any) -> Any:
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON ({error})"
    return await call_mcp(connections, places, function.name, arguments) if function.name in places else f"error: unknown tool {function.name!r}"


def loaded(name: str, args: dict[str, Any]) -> tuple[Any, str]:
    """The environment, and its agent that is trained. Raises ValueError where there is not just one, and whatever the environment raises."""
    config = resolve_env_config({**args, "taskset": {**args.get("taskset", {}), "id": name}})
    agents = agent_config_fields(config)
    trained = [role for role, agent in agents.items() if agent.client is None]
    if len(trained) != 1:
        raise ValueError(f"of its agents {', '.join(agents)} only one can be trained: give each of the others a model of its own, "
                         "workflow.env_args.AGENT.client.base_url=URL")
    changes = {}
    for role, agent in agents.items():
        changes[role] = agent.model_copy(update={
            **({} if "runtime" in agent.model_fields_set else {"runtime": SubprocessConfig()}),
            **({} if agent.harness is not None or default_harness_id(name) != "bash" else {"harness": ChatConfig(id=CHAT)})})
    return load_environment(config.model_copy(update=changes)), trained[0]


def write_tasks(environment: Any, number: int, out: Any) -> None:
    """At most `number` of the tasks, as rows of a data set: what a task asks, and the task itself as what the episode needs."""
    for place, task in enumerate(itertools.islice(environment.taskset, number)):
        data = task.data
        prompt = data.prompt_text or data.name or data.id or f"task {place}"
        out.write(json.dumps({"prompt": prompt, "id": f"{place}", "answer": data.model_dump(mode="json", exclude_defaults=True)}) + "\n")


class Episodes:
    """Those that a worker asks for. `answer`: takes what is to be told."""

    def __init__(self, environment: Any, role: str, answer: Any) -> None:
        self._environment, self._role, self._answer = environment, role, answer
        self._running: dict[int, asyncio.Task[None]] = {}

    def take(self, line: bytes) -> None:
        """Begin an episode, or give it up."""
        asked = json.loads(line)
        number = asked["call"]
        if not asked.get("cancel"):
            self._running[number] = asyncio.create_task(self._run(number, asked))
        elif number in self._running:
            self._running[number].cancel()

    async def _run(self, number: int, asked: dict[str, Any]) -> None:
        variable = f"HEADWAY_API_KEY_{number}"  # the library takes keys from the environment; one so named it hands on to no program
        os.environ[variable] = asked["key"]
        told: dict[str, Any]
        try:
            told = {"reward": await self._played(asked["task"], EvalClientConfig(base_url=asked["url"], api_key_var=variable))}
        except asyncio.CancelledError:
            told = {"error": "was given up"}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment may raise anything: the worker is told
            told = {"error": f"raised {type(error).__name__}: {error}"[:2000]}
        finally:
            del os.environ[variable], self._running[number]
        self._answer({"call": number, **told})

    async def _played(self, task: dict[str, Any], client: EvalClientConfig) -> float:
        environment = self._environment
        kind = type(environment.taskset).task_type()
        (slot,) = environment.slots(kind(kind.data_type().model_validate(task), environment.config.taskset.task))
        episode = await environment.run_slot(slot, ModelContext(model="policy", client=client, sampling=SamplingConfig()))
        traces = [trace for trace in episode.traces if trace.agent.name in (self._role, "", None)]
        failures = [error for failed in (episode, *episode.traces) for error in failed.errors]
        if not episode.ok or failures:
            raise RuntimeError(f"{failures[-1].type}: {failures[-1].message}" if failures else "the episode is not ok, and says no error")
        if len(traces) != 1:
            raise RuntimeError(f"its agent {self._role} ran {len(traces)} times in one episode; just once can be trained")
        return float(traces[0].reward)


async def serve(environment: Any, role: str, out: Any) -> None:
    """Episodes, until the standard input is closed."""
    def answer(told: dict[str, Any]) -> None:
        out.write(json.dumps(told) + "\n")
        out.flush()

    async with environment.serving():
        lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        episodes = Episodes(environment, role, answer)
        answer({"ready": True})
        while line := await lines.readline():
            episodes.take(line)


def main(what: str, spec: str, *numbers: str) -> None:
    """All of it. What the environment prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = types.ModuleType(CHAT)
    module.__dict__.update(__all__=["Chat"], Chat=Chat)
    sys.modules[CHAT] = module
    named = json.loads(spec)
    try:
        environment, role = loaded(named["env"], named["args"])
        if what == "tasks":
            write_tasks(environment, int(numbers[0]), out)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment may raise anything
        sys.exit(f"environment {named['env']!r}: {type(error).__name__}: {error}")
    if what == "serve":
        asyncio.run(serve(environment, role, out))


if __name__ == "__main__":
    assert vf
    main(*sys.argv[1:])
