"""Any agent: it talks with the model by an OpenAI-compatible endpoint, and what the model says there is trained on, token for token.

    workflow.agent          function(task, base_url, api_key), async, in the worker      --+--> endpoint --> this episode's conversations
    workflow.agent_command  a program: task on stdin, OPENAI_BASE_URL, OPENAI_API_KEY    --+
    workflow.env            an environment of the verifiers library, in its process      --+

    score:  POST /v1/reward  >  the number that the function returns, or the environment  >  the verifier's, of the last reply

An episode ends with its agent, or soon after its reward; at workflow.agent_timeout_s at the latest, but for the turns then under way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from workers.config import ConfigError, WorkflowConfig
from workers.rollout.workflows.agents.agent_program import NodeFailed, ProgramFailed, run_program
from workers.rollout.workflows.agents.conversation import Chat
from workers.rollout.workflows.agents.endpoint import admitted, shared_endpoint
from workers.rollout.workflows.agents.environment_process import score_of, shared_environment
from workers.rollout.workflows.episode import LLM, Episode, Reward, WorkflowError
from workers.rollout.workflows.rendering import TextFormat, question
from workers.run.user_code import first, import_function, told

LEAVES_S, ENDS_S = 10.0, 60.0
"""So long an agent may go on after its reward; and take to end when it is cancelled."""


async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
    """The score that the agent was given."""
    config = episode.config
    async with shared_endpoint(config.max_agents) as endpoint, endpoint.slots, asyncio.TaskGroup() as tasks:
        chat = Chat(llm, config, tasks)
        async with admitted(endpoint, chat) as key:
            task = task_of(episode, llm._model.text)
            returned, failure = await _outcome(_working(config, task, endpoint.url, key), chat, config.agent_timeout_s)
    if chat.score is not None:
        return chat.score
    if chat.last is None:
        raise WorkflowError(f"the agent asked the model for nothing: it {failure or 'ended by itself'}")
    if failure and (config.env or not chat.full):
        if config.agent_failures == "error":
            raise WorkflowError(f"the agent {failure}\nworkflow.agent_failures=zero gives such an episode a score of 0")
        print(f"warning: an agent {failure}\nIts episode has a score of 0 (workflow.agent_failures=zero)", flush=True)
        return 0.0
    return await reward(chat.last) if returned is None else returned


def task_of(episode: Episode, text: TextFormat) -> dict[str, Any]:
    """What an agent is told of its episode. `prompt`: the question as it stands in the data set."""
    return {"prompt": question(episode.prompt, text), "reference": episode.reference, "verifier": episode.verifier,
            "purpose": episode.purpose.value, "index": episode.index, "seed": episode.seed}


async def _working(config: WorkflowConfig, task: dict[str, Any], url: str, key: str) -> Any:
    """Run the agent; returns what it returns."""
    if config.env:
        environment = await shared_environment(config)
        return score_of(await environment.play(json.loads(task["reference"]), url, key), config)
    if config.agent_command:
        return await run_program(config.agent_command, task, url, key)
    return await load_agent(config.agent)(task, url, key)


def load_agent(path: str) -> Any:
    """The function that workflow.agent names. Raises `ConfigError`."""
    function = import_function(path, "workflow.agent")
    if not asyncio.iscoroutinefunction(function):
        raise ConfigError(f"workflow.agent={path!r}: it is no 'async def {path.split(':')[1]}(task, base_url, api_key)'. "
                          "Make it async; an agent that is not async is a program of its own (workflow.agent_command)")
    return function


async def _outcome(work: Coroutine[Any, Any, Any], chat: Chat, timeout_s: float) -> tuple[Any, str]:
    """What the agent returned, and how it failed: '' if it did not. Raises `WorkflowError` where it cannot be ended."""
    working, closed = asyncio.create_task(work), asyncio.create_task(chat.closed.wait())
    try:
        await asyncio.wait([working, closed], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if closed.done():
            await asyncio.wait([working], timeout=LEAVES_S)
        in_time = working.done()
    finally:
        closed.cancel()
        working.cancel()
        await asyncio.wait([working, closed], timeout=ENDS_S)
    if not working.done():
        raise WorkflowError(f"the agent does not end when it is cancelled: {work}. Let asyncio.CancelledError pass")
    if not in_time:
        return None, f"has not ended in workflow.agent_timeout_s={timeout_s:g}, and was ended"
    if working.cancelled():
        return None, "was cancelled by itself"
    error = working.exception()
    return (working.result(), "") if error is None else (None, _failure(error))


def _failure(error: BaseException) -> str:
    error = first(error)
    if isinstance(error, NodeFailed):
        raise WorkflowError(f"the agent could not work: it {error}")
    if isinstance(error, ProgramFailed):
        return str(error)
    if isinstance(error, ConfigError) or not isinstance(error, Exception):
        raise error
    return f"raised {told(error)}"
