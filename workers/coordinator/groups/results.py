"""What workers bring back: finished, rejected, failed and unfinished groups. Pure.

    of a lease that its sender does not hold -> Acknowledged (not accepted): a repeated one has been counted, and another's is none of its business
    GroupFinished -> within the run's bounds (bounds.py) -> ledger or evaluation -> Acknowledged
    GroupRejected -> the same -> ledger: another prompt takes its place -> Acknowledged;  too many (rejections.py): the run ends
    GroupParked   -> the same -> ledger: the next worker goes on from there
    GroupFailed, or out of bounds (Refused) -> tried again, or set aside after rollout.max_attempts
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from workers.config import Config
from workers.coordinator.groups.bounds import Bounds
from workers.coordinator.groups.consumption import Totals
from workers.coordinator.groups.heldout_evaluation import Evaluation
from workers.coordinator.groups.ledger import Ledger
from workers.coordinator.groups.lineage import Lineage
from workers.coordinator.groups.rejections import Rejections
from workers.messages.codec import MessageError
from workers.messages.from_coordinator import Acknowledged, Refused
from workers.messages.from_worker import GroupFailed, GroupFinished, GroupParked, GroupRejected
from workers.messages.groups import group_firsts
from workers.messages.parts import Group, Message, Partial, Purpose, Version

MAX_HOPELESS = 4
"""So many groups whose verifier has never given a score, and none before that was finished, end the run."""
MAX_CAUSE = 4000
"""[characters] of a failure's cause that are kept."""
Result = GroupFinished | GroupRejected | GroupFailed | GroupParked


class Answer(NamedTuple):
    """What is said to the sender, whether the run got on, the cause if it must end, why the result was refused ('': it was not), and the failure of
    a group that has been taken."""

    messages: list[Message]
    progress: bool = False
    cause: str = ""
    refused: str = ""
    failure: GroupFailed | None = None


class Results:
    """Takes results into ledger and evaluation. `newest`: gives the newest weights that a worker may have."""

    def __init__(self, config: Config, ledger: Ledger, evaluation: Evaluation, totals: Totals, lineage: Lineage, rejections: Rejections,
                 newest: Callable[[], Version]) -> None:
        self.config, self.ledger, self.evaluation, self.totals, self.lineage = config, ledger, evaluation, totals, lineage
        self.rejections, self.newest, self.bounds = rejections, newest, Bounds.of(config)
        self._failures_in_a_row = 0
        self._hopeless_in_a_row = 0.0

    def take(self, message: Result, peer: bytes | None) -> Answer:
        """Take one result of worker `peer`; None: it stood in the run folder."""
        named = message.group if isinstance(message, GroupFinished) else message.partial if isinstance(message, GroupParked) else message
        if peer is not None and (owner := self._owner(named.group_id, named.attempt)) != peer:
            self.totals.num_duplicates += isinstance(message, GroupFinished | GroupRejected)
            why = f"group {named.group_id}, attempt {named.attempt}: it is leased to another worker" if owner else ""
            return Answer([Acknowledged(named.group_id, named.attempt, False)], refused=why)
        try:
            match message:
                case GroupFinished():
                    self.check(message.group)
                    return self._finished(message.group)
                case GroupParked():
                    self.check(message.partial)
                    return self._parked(message.partial)
                case GroupRejected():
                    self.bounds.check_rejected(message)
                    return self._rejected(message)
                case GroupFailed():
                    return self._failed(message)
        except MessageError as error:
            answer = self._failed(GroupFailed(named.group_id, named.attempt, str(error)))
            return answer._replace(messages=[Refused(str(error)), *answer.messages], refused=str(error))

    def check(self, piece: Group | Partial) -> None:
        """Raise `MessageError` unless `piece` is one of this run, as far as it is known now."""
        self.bounds.check(piece, self.newest())

    def _owner(self, group_id: str, attempt: int) -> bytes:
        """The worker with this lease; b'' where it does not run, or with nobody."""
        return self.evaluation.running.owner(group_id, attempt) or self.ledger.running.owner(group_id, attempt)

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
        return Answer([Acknowledged(group.group_id, group.attempt, accepted)], accepted)

    def _count(self, num_tokens: int, tokens_interrupted: int) -> None:
        self.totals.tokens_generated += num_tokens
        self.totals.tokens_interrupted += tokens_interrupted

    def _rejected(self, message: GroupRejected) -> Answer:
        accepted, cause = self.ledger.reject(message.group_id, message.attempt), ""
        if accepted:
            self._failures_in_a_row, self._hopeless_in_a_row = 0, -math.inf  # it is hopeless no more
            self._count(message.num_tokens, message.tokens_interrupted)
            cause = self.rejections.rejected(message.score)
        else:
            self.totals.num_duplicates += 1
        return Answer([Acknowledged(message.group_id, message.attempt, accepted)], accepted, cause)

    def _parked(self, partial: Partial) -> Answer:
        rebased = self.lineage.rebase(partial)
        assert isinstance(rebased, Partial)
        accepted = partial.purpose is Purpose.training and self.ledger.park(rebased)
        return Answer([Acknowledged(partial.group_id, partial.attempt, accepted)])

    def _failed(self, message: GroupFailed) -> Answer:
        failure = msgspec.structs.replace(message, cause=message.cause[:MAX_CAUSE])
        taken = any(part.fail(failure.group_id, failure.attempt, failure.cause, failure.fatal) for part in (self.ledger, self.evaluation))
        self.totals.num_retries += taken
        return Answer([Acknowledged(failure.group_id, failure.attempt, taken)], failure=failure if taken else None)

    def count(self, failure: GroupFailed, again: bool) -> str:
        """Count a failure that is no single worker's; returns the cause where there are too many in a row, which ends the run, else ''. `again`: it
        is one more of a worker that is not alone, which says nothing more of the verifier."""
        self._failures_in_a_row += 1
        self._hopeless_in_a_row += failure.hopeless and not again
        limit = max(8, 2 * self.config.rollout.max_attempts * self.config.trainer.batch_groups)
        if self._hopeless_in_a_row < MAX_HOPELESS and self._failures_in_a_row < limit:
            return ""
        return f"{self._failures_in_a_row} groups in a row have failed; the last one because: {failure.cause}"
