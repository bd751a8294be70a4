"""One prompt, n responses, one reward each. Each response is judged while its siblings are still being generated.

    lease -> prompt tokens -> n x (engine -> text -> reward pool) -> Group

A lease may bring what another worker has generated of it: samples go on from there, and finished ones are only judged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from workers.config import RewardConfig, WorkflowConfig
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.types import Group, Lease, Purpose
from workers.reward.pool import RewardPool, scale
from workers.rollout.engine_client import BadRequest, SamplingParams
from workers.rollout.partials import PartialError, flatten, restore
from workers.rollout.sampler import Sample, Sampler


class Halted(Exception):
    """Generation was halted before the group was finished; what there is of it stands in its samples."""


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

    def begin(self, lease: Lease) -> list[Sample]:
        """The samples that `run` adds to: empty ones, or those of the lease's partial. One that does not fit is ignored with a warning."""
        num_samples = self.num_samples(lease)
        try:
            return restore(lease, num_samples, self._workflow.max_new_tokens)
        except PartialError as error:
            print(f"warning: {error}. It is ignored: the group starts from nothing", flush=True)
            return [Sample() for _ in range(num_samples)]

    async def run(self, lease: Lease, samples: Sequence[Sample] | None = None) -> Group:
        """Generate and judge one group. `samples`: what `begin` gave, which grow as tokens come.

        Raises `EngineError`, `BadRequest` or `VerifierError`; the first one cancels the rest. Raises `Halted` after `Sampler.halt`.
        """
        samples = self.begin(lease) if samples is None else samples
        prompt = self._sampler.encode(lease.prompt)
        room = self._context_length - len(prompt)
        if not prompt or room < self._workflow.max_new_tokens:
            raise BadRequest(f"prompt {lease.prompt_id} has {len(prompt)} tokens: must have at least 1 and leave workflow.max_new_tokens="
                             f"{self._workflow.max_new_tokens} of engine.context_length={self._context_length}")
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._judged(lease, prompt, index, sample)) for index, sample in enumerate(samples)]
        judged = [entry for task in running if (entry := task.result()) is not None]
        if len(judged) < len(samples):
            raise Halted
        return _group(lease, prompt, judged, self._reward)

    async def _judged(self, lease: Lease, prompt: list[int], index: int, sample: Sample) -> Judged | None:
        """Finish and judge one sample; None where generation was halted before its end."""
        workflow, greedy = self._workflow, lease.purpose is Purpose.evaluation
        params = SamplingParams(workflow.max_new_tokens, 0.0 if greedy else workflow.temperature, 1.0 if greedy else workflow.top_p,
                                -1 if greedy else workflow.top_k, tuple(workflow.stop))
        started = time.monotonic()
        rid = f"{lease.group_id:>16}.{lease.attempt:06d}.{index:06d}"  # of one length, because servers abort by prefix
        await self._sampler.sample(lease, rid, prompt, params, (lease.seed * 1009 + index) % 2**31, sample)
        if not sample.finished:
            return None
        generated = time.monotonic()
        text = self._sampler.text(sample.tokens, params.stop)
        score = await self._rewards.score(lease.prompt, text, lease.reference, lease.verifier)
        return Judged(sample, text, score, generated - started, time.monotonic() - generated)


def _group(lease: Lease, prompt: list[int], judged: list[Judged], reward: RewardConfig) -> Group:
    lengths, tokens, logprobs, epochs, steps, run_lengths = flatten([entry.sample for entry in judged])
    return Group(
        group_id=lease.group_id, attempt=lease.attempt, purpose=lease.purpose, prompt_id=lease.prompt_id,
        prompt=Int32.of(prompt), lengths=lengths, tokens=tokens, logprobs=logprobs, loss_mask=Bool.of([True] * tokens.size),
        rewards=Float32.of([scale(entry.score, reward) for entry in judged]), scores=Float32.of([entry.score for entry in judged]),
        epochs=epochs, steps=steps, run_lengths=run_lengths,
        num_interruptions=sum(entry.sample.num_interruptions for entry in judged),
        tokens_interrupted=sum(entry.sample.tokens_interrupted for entry in judged),
        generation_s=max(entry.generation_s for entry in judged), reward_s=max(entry.reward_s for entry in judged),
        first_text=judged[0].text[:200])
