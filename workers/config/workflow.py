"""Config of the workflow: how the samples of one prompt come about, and which groups are trained on."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Any

from workers.config.container import ContainerConfig
from workers.config.rules import IMPORT_PATH, require

WORKFLOWS = {name: f"workers.rollout.workflows.{name}:run" for name in (
    "single_turn", "multi_turn", "python_tool", "self_verification", "agent", "shell_agent")}
WORKFLOWS["verifiers"] = WORKFLOWS["agent"]
"""The built-in workflows, and where their functions are."""

TOOL_FORMATS = ("auto", "hermes", "llama3", "qwen_xml", "mistral")

_ONLY_FOR = {
    "max_turns": ("multi_turn", "python_tool", "shell_agent"),
    "turn_discount": ("multi_turn",),
    "feedback": ("multi_turn",),
    "max_output_chars": ("python_tool", "shell_agent"),
    "num_answers": ("self_verification",),
    "judge": ("self_verification",),
    "train_judge": ("self_verification",),
    "agent": ("agent",),
    "agent_command": ("agent",),
    "agent_timeout_s": ("agent", "shell_agent", "verifiers"),
    "max_agents": ("agent", "shell_agent", "verifiers"),
    "agent_failures": ("agent", "shell_agent", "verifiers"),
    "container": ("shell_agent",),
    "env": ("verifiers",),
    "env_args": ("verifiers",),
    "env_rewards": ("verifiers",),
    "env_python": ("verifiers",),
    "tool_format": ("agent", "verifiers"),
    "options": (),
}


@dataclass
class WorkflowConfig:
    """How one group of samples is generated.

    `name`: a built-in workflow, or the import path "package.module:function" of yours. `max_new_tokens` bounds one turn, engine.context_length
    the prompt with all turns. An episode has at most `max_turns` turns; one that is right at turn t has a score of `turn_discount` ** (t - 1), in
    training. `feedback`: what a wrong answer is told. `max_output_chars`: so much of a program's output is shown. `num_answers` are judged, one by
    one, by the question `judge`, and the judgements are trained on too with `train_judge`. `options`: for your own function.

    `agent`: the import path of an async function, or `agent_command`: a program and its arguments, that is an agent (docs/agents.md). Each of them
    may take `agent_timeout_s` seconds, and a worker runs `max_agents` at once. `agent_failures`: the lease of one that fails fails too (error),
    or its episode has a score of 0 (zero). `tool_format`: how the model writes calls of tools; auto: as its chat template shows them.

    `env`: an environment of the verifiers library, with its settings `env_args`, which the Python `env_python` runs (docs/environments.md). Its
    rewards, from the least to the greatest of `env_rewards`, become scores from 0 to 1.

    The log-probs that are recorded, and that training reckons with, are those of the distribution at `temperature`, before any
    cut by `top_p` or `top_k` (as in SGLang): leave those two at 1 and -1 for training that is exact.

    `keep`: which finished groups are trained on: all; those whose rewards are not all equal (spread: dynamic sampling, arXiv 2503.14476,
    section 3.2); or those for which a function of yours, "package.module:function", says so by their scores and lengths. The others are
    replaced by groups of the next prompts. A run in which more than the share `max_rejected` of the groups of 8 batches was rejected ends (1: never).
    """

    name: str = "single_turn"  # how a sample comes about: a built-in workflow, or package.module:function; docs/workflows.md
    group_size: int = 8  # [samples] of each prompt
    max_new_tokens: int = 16  # [tokens] of one answer
    temperature: float = 1.0  # of training samples
    top_p: float = 1.0  # nucleus cut of training samples; 1: none
    top_k: int = -1  # cut to the likeliest tokens; -1: none
    stop: list[str] = field(default_factory=list)  # texts at which an answer ends
    max_turns: int = 3  # of an episode
    turn_discount: float = 1.0  # factor of the score for each further turn
    feedback: str = "That is not correct. Try again."  # what a wrong answer is told
    max_output_chars: int = 2000  # [characters] of a program's output that are shown
    num_answers: int = 4  # that the model judges itself
    judge: str = "Is the answer above correct? Reply with yes or no."  # the question by which it does
    train_judge: bool = True  # judgements are trained on too
    agent: str = ""  # package.module:function of an agent; docs/agents.md
    agent_command: list[str] = field(default_factory=list)  # or a program and its arguments
    agent_timeout_s: float = 600.0  # for one episode of an agent
    max_agents: int = 64  # of a worker at once
    agent_failures: str = "error"  # an agent that fails: an error, or a score of 0 (zero)
    container: ContainerConfig = field(default_factory=ContainerConfig)  # of the commands of shell_agent; docs/shell_agent.md
    tool_format: str = "auto"  # of calls in what the model says: auto, hermes, llama3, qwen_xml or mistral
    env: str = ""  # an environment of the verifiers library; docs/environments.md
    env_args: dict[str, Any] = field(default_factory=dict)  # its settings, as the library's --env.KEY
    env_rewards: list[float] = field(default_factory=lambda: [0.0, 1.0])  # its least and its greatest reward
    env_python: str = ""  # the Python that has the library; empty: the run's
    options: dict[str, str | int | float | bool] = field(default_factory=dict)  # for a workflow of your own, as NAME: VALUE
    keep: str = "all"  # which groups are trained on: all, spread, or package.module:function
    max_rejected: float = 0.95  # share of rejected groups above which the run ends

    @property
    def scores_itself(self) -> bool:
        """Whether its episodes have scores of their own, and no verifier is asked."""
        return self.name in ("shell_agent", "verifiers")

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        self._check_name()
        if self.name == "agent":
            self._check_program()
        if self.name == "verifiers":
            self._check_env()
        if self.name in ("agent", "shell_agent", "verifiers"):
            self._check_agent()
        self.container.check()
        require(self.name != "shell_agent" or self.agent_timeout_s > 3 * self.container.wall_s, "workflow.agent_timeout_s", self.agent_timeout_s,
                f"must be more than 3 times workflow.container.wall_s={self.container.wall_s:g}", "The tests need their time too")
        require(self.max_turns >= 1, "workflow.max_turns", self.max_turns, "must be at least 1", "1 is a single answer")
        require(0 < self.turn_discount <= 1, "workflow.turn_discount", self.turn_discount, "must be greater than 0 and at most 1", "1 is none")
        require(bool(self.feedback), "workflow.feedback", self.feedback, "must not be empty", "It begins the next turn")
        require(bool(self.judge), "workflow.judge", self.judge, "must not be empty", "It asks for a judgement")
        require(1 <= self.max_output_chars <= 100_000, "workflow.max_output_chars", self.max_output_chars, "must be at least 1, at most 100000",
                "2000 are usual")
        require(self.num_answers >= 2, "workflow.num_answers", self.num_answers, "must be at least 2", "There is nothing to choose from one")
        require(self.group_size >= 1, "workflow.group_size", self.group_size, "must be at least 1",
                "Group-normalised advantages need 2 or more")
        require(self.max_new_tokens >= 1, "workflow.max_new_tokens", self.max_new_tokens, "must be at least 1", "Give the longest answer")
        require(self.temperature > 0, "workflow.temperature", self.temperature, "must be greater than 0",
                "Training samples need a distribution; evaluation is greedy by itself")
        require(0 < self.top_p <= 1, "workflow.top_p", self.top_p, "must be in (0, 1]", "Use 1 for no nucleus cut")
        require(all(self.stop), "workflow.stop", self.stop, "must not hold an empty string", "Leave it out")
        require(self.top_k == -1 or self.top_k >= 1, "workflow.top_k", self.top_k, "must be -1 or at least 1", "Use -1 for no cut")
        require(self.keep in ("all", "spread") or IMPORT_PATH.fullmatch(self.keep) is not None, "workflow.keep", self.keep,
                "must be all, spread, or the import path 'package.module:function' of your own", "Use all to train on every group")
        require(self.keep != "spread" or self.group_size >= 2, "workflow.group_size", self.group_size, "must be 2 or more with workflow.keep=spread",
                "One reward alone has no spread: every group would be rejected")
        require(0 < self.max_rejected <= 1, "workflow.max_rejected", self.max_rejected, "must be greater than 0 and at most 1",
                "It is a share of groups; 1 goes on however many are rejected")

    def _check_program(self) -> None:
        """Check the keys of workflow.name=agent."""
        require(bool(self.agent) != bool(self.agent_command), "workflow.agent", self.agent, "must be given, or else workflow.agent_command, not both",
                "Give 'package.module:function', or a program with its arguments")
        require(not self.agent or IMPORT_PATH.fullmatch(self.agent) is not None, "workflow.agent", self.agent,
                "must be the import path 'package.module:function' of an async function", "Write the module's dots, a colon, and the function's name")
        require(not self.agent_command or bool(self.agent_command[0]), "workflow.agent_command", self.agent_command, "must begin with a program",
                "For example [python, my_agent.py]")

    def _check_agent(self) -> None:
        """Check the keys of all agents."""
        require(self.tool_format in TOOL_FORMATS, "workflow.tool_format", self.tool_format, f"must be one of {', '.join(TOOL_FORMATS)}",
                "auto goes by the model's chat template")
        require(0 < self.agent_timeout_s < float("inf"), "workflow.agent_timeout_s", self.agent_timeout_s, "must be greater than 0, and finite",
                "It is in seconds")
        require(self.max_agents >= 1, "workflow.max_agents", self.max_agents, "must be at least 1", "Agents run beside each other")
        require(self.agent_failures in ("error", "zero"), "workflow.agent_failures", self.agent_failures, "must be error or zero",
                "zero gives an episode whose agent failed a score of 0")

    def _check_env(self) -> None:
        """Check the keys of workflow.name=verifiers."""
        require(bool(self.env), "workflow.env", self.env, "must name an environment of the verifiers library", "See docs/environments.md")
        require(len(self.env_rewards) == 2 and -math.inf < self.env_rewards[0] < self.env_rewards[-1] < math.inf, "workflow.env_rewards",
                self.env_rewards, "must be two numbers, the second greater than the first", "[0, 1] takes rewards as they are")

    def _check_name(self) -> None:
        """Check that there may be such a workflow, and that no key is set which it does not read."""
        if self.name not in WORKFLOWS:
            near = difflib.get_close_matches(self.name, WORKFLOWS, n=1)
            require(IMPORT_PATH.fullmatch(self.name) is not None, "workflow.name", self.name,
                    f"must be one of {', '.join(WORKFLOWS)}, or the import path 'package.module:function' of your own",
                    f"Did you mean {near[0]}?" if near else "Write the module's dots, a colon, and the function's name")
            return
        unset = WorkflowConfig()
        for key, readers in _ONLY_FOR.items():
            default = getattr(unset, key)
            require(self.name in readers or getattr(self, key) == default, f"workflow.{key}", getattr(self, key),
                    f"must be left at its default with workflow.name={self.name}",
                    f"It only counts for {' and '.join(readers)}{' and ' if readers else ''}functions of your own")
