"""mini-swe-agent on one repository: `python -m workers.rollout.workflows.agents.shell_program SETTINGS`, with the task on stdin (agent_program.py).

    DefaultAgent --messages--> Policy --openai--> the worker's endpoint                 outside: it has the key
         |  ^--- output ------ Shell --command--> a container over the repository's files, each command in one of its own
         +-- ended --> tests, as they were, in a last container --> POST /v1/reward

The agent, its prompts and the way actions are read are the library's (config/mini_textbased.yaml). Policy stands for its class LitellmModel: that
imports LiteLLM, which takes 3 s of computing for each episode, and drops what the model said where no action was found in it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import msgspec
import openai
import yaml

from workers.config import ContainerConfig
from workers.rollout.workflows.agents.process_guard import NODE_FAILED
from workers.rollout.workflows.agents.repository import read_repository
from workers.sandbox.containers.container import Container
from workers.sandbox.outcome import SandboxError, shortened

with tempfile.TemporaryDirectory() as folder:  # the library makes a folder for its own settings, and would read a .env there
    os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": folder}
    from minisweagent import package_dir
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.exceptions import FormatError
    from minisweagent.models.utils.actions_text import format_observation_messages, parse_regex_actions

ACTION = r"```mswea_bash_command\s*\n(.*?)\n```"
"""What LitellmTextbasedModel reads actions by."""


class Settings(msgspec.Struct):
    """What workflow.* says to the program. `program`: what makes containers."""

    container: ContainerConfig
    program: str
    max_turns: int
    max_output_chars: int
    seconds: float


class Policy:
    """The library's protocol of a model, which is asked until `deadline`, by time.monotonic()."""

    config = None

    def __init__(self, client: openai.OpenAI, templates: dict[str, str], deadline: float) -> None:
        self._client, self._templates, self._deadline = client.with_options(max_retries=0), templates, deadline

    def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
        """The next message. Raises `FormatError` with what was said and what is wrong, APITimeoutError, and what the endpoint refuses."""
        said = [{"role": message["role"], "content": message["content"]} for message in messages]
        left = max(1.0, self._deadline - time.monotonic())
        choice = self._client.chat.completions.create(model="policy", messages=said, timeout=left).choices[0]  # type: ignore[arg-type]
        reply = {"role": "assistant", "content": choice.message.content or ""}
        try:
            actions = parse_regex_actions(reply["content"], action_regex=ACTION, format_error_template=self._templates["format_error_template"],
                                          template_kwargs={"finish_reason": choice.finish_reason})
        except FormatError as error:
            raise FormatError(reply, *error.messages) from error
        return reply | {"extra": {"actions": actions}}

    def format_message(self, **kwargs: Any) -> dict[str, Any]:
        """A message as it is."""
        return kwargs

    def format_observation_messages(self, message: dict, outputs: list[dict], template_vars: dict | None = None) -> list[dict]:
        """What commands gave, as the model reads it."""
        return format_observation_messages(outputs, observation_template=self._templates["observation_template"], template_vars=template_vars)

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """None."""
        return {}

    def serialize(self) -> dict:
        """Nothing to keep: trajectories are the worker's."""
        return {}


class Shell(LocalEnvironment):
    """The library's environment, but for where commands are run. `files`: the repository as it is now, a tar."""

    def __init__(self, container: Container, files: bytes, max_output_chars: int) -> None:
        super().__init__()
        self._container, self.files, self._max_output_chars = container, files, max_output_chars

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run one command. Raises `Submitted` where it says that the work is done."""
        ran = self._container.run(self.files, action["command"])
        self.files = ran.files
        output = {"output": shortened(ran.output, self._max_output_chars), "returncode": ran.status, "exception_info": ran.failure}
        self._check_finished(output)
        return output


def main(settings: Settings, task: dict[str, Any]) -> None:
    """Let the agent work, and tell the worker its score. Raises `SandboxError` and `OSError` where the node runs no containers."""
    deadline = time.monotonic() + settings.seconds
    repository, container = read_repository(task["reference"]), Container(settings.container, settings.program)
    shell = Shell(container, repository.packed(), settings.max_output_chars)
    library = yaml.safe_load((package_dir / "config" / "mini_textbased.yaml").read_text("utf-8"))
    limits = {"step_limit": settings.max_turns, "cost_limit": 0.0, "wall_time_limit_seconds": max(1, int(settings.seconds))}
    with openai.OpenAI() as client:
        agent = DefaultAgent(Policy(client, library["model"], deadline), shell, **(library["agent"] | limits))
        try:
            agent.run(task["prompt"])
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
        except openai.APITimeoutError:
            print("the agent's time was over before its answer was there; what it had done until then is judged", flush=True)
        client.post("/reward", body={"reward": float(repository.passes(container, shell.files))}, cast_to=object)


if __name__ == "__main__":
    try:
        main(msgspec.json.decode(sys.argv[1], type=Settings), json.loads(sys.stdin.readline()))
    except (SandboxError, OSError) as error:
        print(error)
        sys.exit(NODE_FAILED)
