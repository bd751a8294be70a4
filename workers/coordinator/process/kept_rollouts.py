"""The groups that are kept to be read (docs/rollouts.md): what the state machine records of them, with what is known besides, to RUN/rollouts.

    StepRecord's groups, KeptLogprobs of the trainer;  HeldoutGroup --reference--> workers/metrics/rollout_files.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np

from workers.coordinator.core import Coordinator
from workers.coordinator.groups.group_states import index_of
from workers.coordinator.groups.heldout_evaluation import EvaluationResult
from workers.coordinator.training.step_records import HeldoutGroup, Record, StepRecord
from workers.messages.codec import MessageError
from workers.messages.from_worker import KeptLogprobs
from workers.messages.parts import Message, Role
from workers.metrics.rollout_files import RolloutFiles
from workers.metrics.rollout_table import HELDOUT, TRAIN, Kept
from workers.run.folder import RunFolder


class KeptRollouts:
    """Those of `run`, which goes on from `step` (None: it begins), where the evaluations of the steps `evaluated` are over; nothing where
    rollout.keep=0."""

    def __init__(self, run: RunFolder, core: Coordinator, step: int | None, evaluated: Set[int] = frozenset()) -> None:
        config = core.config
        self._core = core
        self._told: deque[KeptLogprobs] = deque(maxlen=2)  # a step may be computed before the one before it is announced
        self._files = None if config.supervised or not config.rollout.keep else RolloutFiles(
            run.rollouts, Path(config.model.path), config.rollout.keep_mb << 20, step, self._judged(step, evaluated))

    def _judged(self, step: int | None, evaluated: Set[int]) -> dict[int, set[str]]:
        """The groups that have been judged of each evaluation that is not over."""
        judged: dict[int, set[str]] = {} if step is None or step in evaluated else {step: set()}
        evaluation = self._core.evaluation
        if evaluation.active:
            judged[evaluation.step] = {f"e{evaluation.step}.{index}" for index in evaluation.scores}
        return judged

    def told(self, peer: bytes, message: Message | MessageError) -> bool:
        """Whether this is log-probs of the groups that the next step keeps, which only the trainer's word counts of. Nothing is decided by them: they
        are no matter of the state machine's, and not recorded."""
        if not isinstance(message, KeptLogprobs):
            return False
        worker = self._core.registry.workers.get(peer)
        if worker is not None and worker.role is Role.trainer:
            self._told.append(message)
        return True

    def take(self, record: Record) -> None:
        """Have what a record keeps written."""
        if self._files is None:
            return
        if isinstance(record, StepRecord) and record.kept:
            self._files.keep([
                Kept(record.step, TRAIN, group, self._core.office.prompts.train(index_of(group.group_id)).reference, logprobs)
                for group, logprobs in zip(record.kept, self._of(record), strict=True)])
        elif isinstance(record, HeldoutGroup):
            index = int(record.group.group_id.partition(".")[2])
            self._files.keep([Kept(record.step, HELDOUT, record.group, self._core.office.heldout[index].reference)])
        elif isinstance(record, EvaluationResult):
            self._files.keep(())

    def flush(self) -> None:
        """Have what there is of an evaluation written: a checkpoint is made, after which it is not judged again."""
        if self._files is not None:
            self._files.keep(())

    def _of(self, record: StepRecord) -> Sequence[np.ndarray | None]:
        """The log-probs from before the step, by group; None where the trainer has told none."""
        sizes = [group.tokens.size for group in record.kept]
        for told in self._told:
            if told.step == record.step and told.logprobs.size == sum(sizes):
                return [None if np.isnan(row).any() else row for row in np.split(np.asarray(told.logprobs), np.cumsum(sizes)[:-1])]
        return [None] * len(sizes)

    def close(self) -> None:
        """Write what waits."""
        if self._files is not None:
            self._files.close()

