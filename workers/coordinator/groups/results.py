"""What workers bring back: finished, rejected, failed and unfinished groups. Pure.

    GroupFinished -> checked -> ledger or evaluation -> Acknowledged      (again for a repeated one, but counted once)
    GroupRejected -> ledger: another prompt takes its place -> Acknowledged;  too many (rejections.py): the run ends
    GroupParked   -> checked -> ledger: the next worker goes on from there
    GroupFailed   -> tried again, or set aside after rollout.max_attempts
"""

from __future__ import annotations

import math

from workers.config import Config
from workers.coordinator.groups.consumption import Totals
from workers.coordinator.groups.heldout_evaluation import Evaluation
from workers.coordinator.groups.ledger import Ledger
from workers.coordinator.groups.lineage import Lineage
from workers.coordinator.groups.rejections import Rejections
from workers.messages.codec import MessageError
from workers.messages.from_coordinator import Acknowledged, Refused
from workers.messages.from_worker import GroupFailed, GroupFinished, GroupParked, GroupRejected
from workers.messages.groups import check_group, check_partial, group_firsts
from workers.messages.parts import Group, Message, Partial, Purpose

MAX_HOPELESS = 4
"""So many groups whose verifier has never given a score, and none before that was finished, end the run."""
Answer = tuple[list[Message], bool, str]
"""Answers to the sender, whether the run got on, and the cause if it must end."""


class Results:
    """Takes results into ledger and evaluation."""

    def __init__(self, config: Config, ledger: Ledger, evaluation: Evaluation, totals: Totals, lineage: Lineage, rejections: Rejections) -> None:
        self.config, self.ledger, self.evaluation, self.totals, self.lineage = config, ledger, evaluation, totals, lineage
        self.rejections = rejections
        self._failures_in_a_row = 0
        self._hopeless_in_a_row = 0.0

    def take(self, message: GroupFinished | GroupRejected | GroupFailed | GroupParked) -> Answer:
        """Take one result."""
        if isinstance(message, GroupFailed):
            return self._failed(message)
        if isinstance(message, GroupRejected):
            return self._rejected(message)
        piece = message.group if isinstance(message, GroupFinished) else message.partial
        try:
            if isinstance(piece, Group):
                check_group(piece)
                return self._finished(piece)
            check_partial(piece)
            return self._parked(piece)
        except MessageError as error:
            answers, progress, cause = self._failed(GroupFailed(piece.group_id, piece.attempt, str(error)))
            return [Refused(str(error)), *answers], progress, cause

    def _finished(self, group: Group) -> Answer:
        rebased = self.lineage.rebase(group)
        assert isinstance(rebased, Group)
        accepted = (self.evaluation if group.purpose is Purpose.evaluation else self.ledger).finish(rebased)
        if accepted:
            self._failures_in_a_row, self._hopeless_in_a_row = 0, -math.inf  # it is hopeless no more
            if group.purpose is Purpose.training:
                self._count(int(group.loss_mask.sum()), group.tokens_interrupted)
                self.rejections.kept(float(group.scores[group_firsts(group)].mean()))
        else:
            self.totals.num_duplicates += 1
        return [Acknowledged(group.group_id, group.attempt, accepted)], accepted, ""

    def _count(self, num_tokens: int, tokens_interrupted: int) -> None:
        self.totals.tokens_generated += num_tokens
        self.totals.tokens_interrupted += tokens_interrupted

    def _rejected(self, message: GroupRejected) -> Answer:
        if not math.isfinite(message.score):
            return self._failed(GroupFailed(message.group_id, message.attempt, f"group {message.group_id}, rejected: its score must be finite"))
        accepted, cause = self.ledger.reject(message.group_id, message.attempt), ""
        if accepted:
            self._failures_in_a_row, self._hopeless_in_a_row = 0, -math.inf  # it is hopeless no more
            self._count(message.num_tokens, message.tokens_interrupted)
            cause = self.rejections.rejected(message.score)
        else:
            self.totals.num_duplicates += 1
        return [Acknowledged(message.group_id, message.attempt, accepted)], accepted, cause

    def _parked(self, partial: Partial) -> Answer:
        rebased = self.lineage.rebase(partial)
        assert isinstance(rebased, Partial)
        accepted = partial.purpose is Purpose.training and self.ledger.park(rebased)
        return [Acknowledged(partial.group_id, partial.attempt, accepted)], False, ""

    def _failed(self, message: GroupFailed) -> Answer:
        taken = self.ledger.fail(message.group_id, message.attempt, message.cause, message.fatal) or self.evaluation.fail(
            message.group_id, message.attempt, message.cause, message.fatal)
        answers: list[Message] = [Acknowledged(message.group_id, message.attempt, taken)]
        if not taken:
            return answers, False, ""
        self.totals.num_retries += 1
        self._failures_in_a_row += 1
        self._hopeless_in_a_row += message.hopeless
        limit = max(8, 2 * self.config.rollout.max_attempts * self.config.trainer.batch_groups)
        if self._hopeless_in_a_row < MAX_HOPELESS and self._failures_in_a_row < limit:
            return answers, False, ""
        return answers, False, f"{self._failures_in_a_row} groups in a row have failed; the last one because: {message.cause}"
