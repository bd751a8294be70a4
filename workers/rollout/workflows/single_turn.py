"""One prompt, n responses, one reward each. Each response is judged while its siblings are still being generated.

    lease -> prompt tokens -> n x (engine -> text -> reward pool) -> Group
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import groupby

from workers.config import RewardConfig, WorkflowConfig
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.types import Group, Lease, Purpose, Version
from workers.reward.pool import RewardPool, scale
from workers.rollout.engine_client import BadRequest, SamplingParams
from workers.rollout.sampler import Sample, Sampler


@dataclass(frozen=True)
class Judged:
    """A sample, its text, its score in [0, 1], and how long each part took."""

    sample: Sample
    text: str
    score: float
    generation_s: float
    reward_s: float


class SingleTurn:
    """Runs leases; safe to run many at once."""

    def __init__(self, sampler: Sampler, rewards: RewardPool, workflow: WorkflowConfig, reward: RewardConfig, context_length: int) -> None:
        self._sampler, self._rewards = sampler, rewards
        self._workflow, self._reward, self._context_length = workflow, reward, context_length

    def num_samples(self, lease: Lease) -> int:
        """How many responses a lease asks for."""
        return 1 if lease.purpose is Purpose.evaluation else self._workflow.group_size

    async def run(self, lease: Lease) -> Group:
        """Generate and judge one group. Raises `EngineError`, `BadRequest` or `VerifierError`; the first one cancels the rest."""
        prompt = self._sampler.encode(lease.prompt)
        room = self._context_length - len(prompt)
        if not prompt or room < self._workflow.max_new_tokens:
            raise BadRequest(f"prompt {lease.prompt_id} has {len(prompt)} tokens: must have at least 1 and leave workflow.max_new_tokens="
                             f"{self._workflow.max_new_tokens} of engine.context_length={self._context_length}")
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._judged(lease, prompt, index)) for index in range(self.num_samples(lease))]
        return _group(lease, prompt, [task.result() for task in running], self._reward)

    async def _judged(self, lease: Lease, prompt: list[int], index: int) -> Judged:
        workflow, greedy = self._workflow, lease.purpose is Purpose.evaluation
        params = SamplingParams(workflow.max_new_tokens, 0.0 if greedy else workflow.temperature, 1.0 if greedy else workflow.top_p,
                                -1 if greedy else workflow.top_k, tuple(workflow.stop))
        started = time.monotonic()
        rid = f"{lease.group_id:>16}.{lease.attempt:06d}.{index:06d}"  # of one length, because servers abort by prefix
        sample = await self._sampler.sample(rid, prompt, params, (lease.seed * 1009 + index) % 2**31)
        generated = time.monotonic()
        text = self._sampler.text(sample.tokens, params.stop)
        score = await self._rewards.score(lease.prompt, text, lease.reference, lease.verifier)
        return Judged(sample, text, score, generated - started, time.monotonic() - generated)


def _group(lease: Lease, prompt: list[int], judged: list[Judged], reward: RewardConfig) -> Group:
    tokens = [token for entry in judged for token in entry.sample.tokens]
    versions = [version for entry in judged for version in entry.sample.versions]
    runs: list[tuple[Version, int]] = [(version, len(list(group))) for version, group in groupby(versions)]
    return Group(
        group_id=lease.group_id, attempt=lease.attempt, purpose=lease.purpose, prompt_id=lease.prompt_id,
        prompt=Int32.of(prompt), lengths=Int32.of([len(entry.sample.tokens) for entry in judged]), tokens=Int32.of(tokens),
        logprobs=Float32.of([logprob for entry in judged for logprob in entry.sample.logprobs]),
        loss_mask=Bool.of([True] * len(tokens)),
        rewards=Float32.of([scale(entry.score, reward) for entry in judged]), scores=Float32.of([entry.score for entry in judged]),
        epochs=Int32.of([version.epoch for version, _ in runs]), steps=Int32.of([version.step for version, _ in runs]),
        run_lengths=Int32.of([length for _, length in runs]),
        num_interruptions=sum(entry.sample.num_interruptions for entry in judged),
        tokens_interrupted=sum(entry.sample.tokens_interrupted for entry in judged),
        generation_s=max(entry.generation_s for entry in judged), reward_s=max(entry.reward_s for entry in judged),
        first_text=judged[0].text[:200])
