"""Judges prompts, many at once: each is a lease of the workflow, as in a run, and becomes one line of a chunk's file.

    prompt --workflow--> a group of k episodes: engines, verifiers --> {"index", "samples": [{"response", "score", "answer", "tokens"}]}
                 |
                 +-- failed rollout.max_attempts times --> {"index", "failed": why}
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from workers.config import Config
from workers.data.prompt import Prompt
from workers.messages.groups import group_episodes, group_firsts, samples
from workers.messages.parts import Group, Lease, Purpose
from workers.reward.pool.pool import VerifierError
from workers.rollout.engines.client import BadRequest, EngineError
from workers.rollout.engines.engine import BEGINNING
from workers.rollout.engines.engine_pool import Engines
from workers.rollout.engines.sampler import Sampler
from workers.rollout.workflows.episode import WorkflowError
from workers.rollout.workflows.workflow import Workflow
from workers.run.processes import first_cause
from workers.slurm.termination import WorkerEnded

MAX_FAILURES = 8
"""So many prompts in a row that failed for good, and all those that run beside them, mean that it is not the prompts."""


class Judging:
    """Judges prompts of `prompts` by index."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], workflow: Workflow, engines: Engines, sampler: Sampler) -> None:
        self._config, self._prompts = config, prompts
        self._workflow, self._engines, self._sampler = workflow, engines, sampler
        self._failures = self._running = 0
        self.tokens_generated = 0

    async def judge(self, index: int) -> bytes:
        """The line of prompt `index`. Raises `WorkerEnded` where one prompt after the other fails."""
        cause = ""
        for attempt in range(self._config.rollout.max_attempts):
            lease = self._lease(index, attempt)
            fatal = False
            self._running += 1
            try:
                record = self._workflow.begin(lease)
                group = await self._workflow.run(lease, record)
            except* BadRequest as errors:
                cause, fatal = first_cause(errors), True
            except* (EngineError, VerifierError, WorkflowError) as errors:
                cause = first_cause(errors)
            else:
                self._failures = 0
                return self._line(index, group, [episode.judged for episode in record.episodes])
            finally:
                self._running -= 1
                self._engines.release(lease)
            if fatal:
                break
        self._failures += 1
        if self._failures >= MAX_FAILURES + self._running:  # those that fail at once come before others that were begun with them
            raise WorkerEnded(f"{self._failures} prompts in a row could not be judged; the last one because: {cause}")
        return json.dumps({"index": index, "failed": cause}).encode()

    def _lease(self, index: int, attempt: int) -> Lease:
        prompt = self._prompts[index]
        seed = (self._config.run.seed * 1_000_003 + index) * 64
        return Lease(f"e0.{index}", attempt, Purpose.evaluation, BEGINNING, prompt.id, prompt.text, prompt.verifier, prompt.reference, seed % 2**31)

    def _line(self, index: int, group: Group, texts: Sequence[str]) -> bytes:
        """`texts`: what each episode had judged, '' where its workflow judges by itself."""
        sequences, episodes, stop = samples(group), group_episodes(group), tuple(self._config.workflow.stop)
        self.tokens_generated += int(group.loss_mask.sum())
        judged = [{"response": texts[number] or self._sampler.text(sequences[first].tokens.tolist(), stop), "score": float(group.scores[first]),
                   "answer": group.answers[number],
                   "tokens": sum(int(one.loss_mask.sum()) for one, episode in zip(sequences, episodes, strict=True) if episode == number)}
                  for number, first in enumerate(group_firsts(group))]
        return json.dumps({"index": index, "samples": judged}).encode()
