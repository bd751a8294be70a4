"""Runs leases: every episode of a group is one call of the workflow's function, and all of them run beside each other.

    lease --begin--> record: empty, or what another worker has generated of it
      |
      +-- run --> n x function(episode, llm, reward) --> scores + record --> sequences.py: Group
                       |             |        |
                       |          engines   reward pool          each episode is judged while the others are still being generated
                       +-- halted: what there is stands in the record, from which it is given back (partials.py)
"""

from __future__ import annotations

import asyncio
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import msgspec

from workers.config import ConfigError, EvaluationConfig, RewardConfig, WorkflowConfig
from workers.config.workflow import WORKFLOWS
from workers.messages.parts import Group, Lease, Purpose
from workers.reward.rewards import Rewards
from workers.reward.verifiers.answers import extract
from workers.reward.verifiers.registry import composed
from workers.rollout.engines.client import BadRequest
from workers.rollout.engines.sampler import Samples
from workers.rollout.workflows.episode import LLM, Halted, Run, WorkflowError
from workers.rollout.workflows.episode_session import Session
from workers.rollout.workflows.partials import PartialError, restore
from workers.rollout.workflows.rendering import PlainText, TextFormat
from workers.rollout.workflows.sequences import Finished, assemble
from workers.rollout.workflows.transcript import EpisodeRecord, GroupRecord
from workers.run.user_code import import_function, told


def load(name: str) -> Run:
    """Import the function of workflow `name`. Raises `ConfigError` if it cannot be, or there is none."""
    path = WORKFLOWS.get(name, name)
    function = import_function(path, "workflow.name")
    if not asyncio.iscoroutinefunction(function):
        raise ConfigError(f"workflow.name={name!r}: it is no 'async def {path.split(':')[1]}(episode, llm, reward)'. Make it async")
    return cast(Run, function)


TOKEN_BYTES = 24
"""Of a token in a message: itself, log-prob, mask, and at worst a version of its own."""


@dataclass(frozen=True)
class Parts:
    """What workflows work with: engines, reward pool, config, and how turns become text. `texts`: of parts of a mixture, whose names begin the ids of
    their prompts."""

    sampler: Samples
    rewards: Rewards
    workflow: WorkflowConfig
    reward: RewardConfig
    context_length: int
    text: TextFormat = field(default_factory=PlainText)
    max_message_bytes: int = 256 << 20
    heldout: EvaluationConfig = field(default_factory=EvaluationConfig)
    texts: Mapping[str, TextFormat] = field(default_factory=dict)


class Workflow:
    """Runs leases by the function `run` (None: the configured one); safe to run many at once. Raises `ConfigError` where there is none."""

    def __init__(self, parts: Parts, run: Run | None = None) -> None:
        self._parts, self._config = parts, parts.workflow
        self._run = load(parts.workflow.name) if run is None else run

    def num_episodes(self, lease: Lease) -> int:
        """How many episodes a lease asks for."""
        return self._parts.heldout.num_samples if lease.purpose is Purpose.evaluation else self._config.group_size

    def begin(self, lease: Lease) -> GroupRecord:
        """The record that `run` adds to: an empty one, or that of the lease's partial. One that does not fit is ignored with a warning."""
        number, prompt = self.num_episodes(lease), self._parts.sampler.encode(lease.prompt)
        try:
            return GroupRecord(prompt, restore(lease, prompt, number, self._config.max_new_tokens))
        except PartialError as error:
            print(f"warning: {error}. It is ignored: the group starts from nothing", flush=True)
            return GroupRecord(prompt, [EpisodeRecord() for _ in range(number)])

    async def run(self, lease: Lease, record: GroupRecord | None = None) -> Group:
        """Run the episodes of one group. `record`: what `begin` gave, which grows as tokens come.

        Raises `EngineError`, `BadRequest`, `VerifierError` or `WorkflowError`; the first one cancels the rest. Raises `Halted` after `Sampler.halt`.
        """
        record = self.begin(lease) if record is None else record
        parts, prompt = self._parts, record.prompt
        if lease.purpose is Purpose.training:  # held-out prompts are judged by the verifier alone
            lease = msgspec.structs.replace(lease, verifier=composed(lease.verifier, parts.reward.parts))
        if not prompt or parts.context_length - len(prompt) < self._config.max_new_tokens:
            raise BadRequest(f"prompt {lease.prompt_id} has {len(prompt)} tokens: must have at least 1 and leave workflow.max_new_tokens="
                             f"{self._config.max_new_tokens} of engine.context_length={parts.context_length}")
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._finish(self._session(lease, index, episode), prompt)) for index, episode in enumerate(record.episodes)]
        finished = [entry for task in running if (entry := task.result()) is not None]
        if len(finished) < len(running):
            raise Halted
        group = assemble(lease, finished, self._config, parts.reward)
        if TOKEN_BYTES * group.tokens.size + (0 if group.routing is None else group.routing.size) > parts.max_message_bytes:
            raise WorkflowError(f"workflow {self._config.name}: a group of {group.lengths.size} sequences with {group.tokens.size} tokens is over "
                                "transport.max_message_mb. Raise that, or have fewer conversations")
        return group

    def _session(self, lease: Lease, index: int, record: EpisodeRecord) -> Session:
        parts = self._parts
        text = parts.texts.get(lease.prompt_id.partition("/")[0], parts.text)
        return Session(lease, index, record, parts.sampler, parts.rewards, self._config, text, parts.context_length,
                       parts.heldout)

    async def _finish(self, session: Session, prompt: list[int]) -> Finished | None:
        """Run one episode to its end; None where generation was halted before."""
        try:
            score: object = await self._run(session.episode, LLM(session, self._config, prompt), session.reward)
        except (Exception, asyncio.CancelledError) as error:  # a user's function may raise anything: the lease fails and says where
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the lease is given up
            if session.failure is None:
                raise WorkflowError(f"workflow {self._config.name} raised {told(error)}") from error
        finally:
            session.record.over = True
        if isinstance(session.failure, Halted):
            return None
        if session.failure is not None:
            raise session.failure
        if session.num_under_way or not all(sample.finished for sample in session.record.samples):
            raise WorkflowError(f"workflow {self._config.name} returned while a turn of the model was still being sampled, or after one was "
                                "cancelled. Await every generate to its end")
        self._warn_of_unused(session)
        session.record.judged = session.judged[1]
        answer = extract(*session.judged) if session.lease.purpose is Purpose.evaluation else ""
        return Finished(session.record, self._checked(score), session.generation_s, session.reward_s, session.first_text, answer,
                        session.part_scores)

    def _checked(self, score: object) -> float:
        value = float(score) if isinstance(score, numbers.Real) else -1.0
        if not 0.0 <= value <= 1.0:
            raise WorkflowError(f"workflow {self._config.name} returned {score!r:.100}: it must return the episode's score, a number from 0 to 1")
        return value

    def _warn_of_unused(self, session: Session) -> None:
        if unused := session.record.num_unused:
            print(f"warning: group {session.lease.group_id}, episode {session.index}: {unused} recorded turns were not asked for again and are lost: "
                  f"workflow {self._config.name} does not do the same when it is run again", flush=True)
