"""An agent that edits a repository and runs its tests: mini-swe-agent, whose shell commands go into containers (docs/shell_agent.md).

    agent.run --> agents/shell_program.py, a program for each episode --commands, tests--> sandbox/containers/
                      +--HTTP--> the endpoint, and the tests' verdict as the episode's score
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from workers.config import ConfigError, ContainerConfig
from workers.data.prompt import Prompt
from workers.rollout.workflows import agent
from workers.rollout.workflows.agents.repository import read_repository
from workers.rollout.workflows.episode import LLM, Episode, Reward
from workers.sandbox.containers.container import GRACE_S, Container
from workers.sandbox.containers.container_choice import choose
from workers.sandbox.outcome import SandboxError

PROGRAM = "workers.rollout.workflows.agents.shell_program"
TESTS = 2
"""So many times the time of a command is kept from the agent, for its last one and the tests."""


async def run(episode: Episode, llm: LLM, reward: Reward) -> float:
    """The tests' verdict: 1 or 0."""
    config = episode.config
    container = await asyncio.to_thread(_chosen, msgspec.json.encode(config.container))
    wall_s = config.container.wall_s
    settings = {"container": container.config, "program": container.program, "max_turns": config.max_turns,
                "max_output_chars": config.max_output_chars, "seconds": max(wall_s, config.agent_timeout_s - TESTS * (wall_s + GRACE_S))}
    command = [sys.executable, "-m", PROGRAM, msgspec.json.encode(settings).decode()]
    return await agent.run(replace(episode, config=replace(config, agent_command=command)), llm, reward)


@functools.cache
def _chosen(config: bytes) -> Container:
    """The containers of this worker, tried once. Raises `SandboxError`."""
    return choose(msgspec.json.decode(config, type=ContainerConfig))


def problem(config: ContainerConfig) -> str:
    """Why this machine cannot run the workflow, in one line; '' if it can."""
    if missing := [name for name in ("minisweagent", "openai", "dotenv", "platformdirs") if importlib.util.find_spec(name) is None]:
        return (f"workflow=shell_agent needs {', '.join(missing)} in {sys.prefix}. Install them: pip install 'headway[shell]'; "
                "pip install --no-deps mini-swe-agent==2.4.6")
    try:
        choose(config)
    except SandboxError as error:
        return str(error)
    return ""


def check(config: ContainerConfig, prompts: Iterable[Prompt], *, here: bool) -> None:
    """Whether this machine (`here`: it is to run the workflow) can, and each prompt has a repository. Raises `ConfigError`."""
    if here and (why := problem(config)):
        raise ConfigError(why)
    for prompt in prompts:
        try:
            read_repository(prompt.reference)
        except ValueError as error:
            raise ConfigError(f"{prompt.where}: workflow=shell_agent: the answer cannot be used: {error}") from error
