"""The coordinator's part of a checkpoint: ledger, buffer, partial generations, evaluation, totals, positions. Pure: state <-> bytes.

Everything is of one instant, "step v completed": a batch that the trainer has already for a later step counts as not trained on, its
groups as finished. Leases stay with their workers, who outlive the training job and present them to the next coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from workers.coordinator.groups.concurrency import ConcurrencyState
from workers.coordinator.groups.consumption import Totals
from workers.coordinator.groups.group_states import Finished, Parked, Running, index_of
from workers.coordinator.groups.heldout_evaluation import Evaluation
from workers.coordinator.groups.lead import LeadState
from workers.coordinator.groups.ledger import Ledger
from workers.coordinator.groups.rejections import RejectionsState
from workers.messages.codec import MANY_ARRAYS, Decoder, MessageError, buffers, pack
from workers.messages.parts import Group, Message, Partial, Struct

MAX_BYTES = 1 << 40


class SnapshotError(RuntimeError):
    """A coordinator's part of a checkpoint that cannot be read."""


class RunningEntry(Struct, frozen=True):
    """A lease; see `group_states.Running`."""

    index: int
    attempt: int
    worker: bytes
    admitted_at: int
    partial: Partial | None


class ParkedEntry(Struct, frozen=True):
    """See `group_states.Parked`."""

    index: int
    admitted_at: int
    partial: Partial


class FinishedEntry(Struct, frozen=True):
    """See `group_states.Finished`."""

    group: Group
    admitted_at: int
    order: int


class LedgerState(Struct, frozen=True):
    """See `ledger.Ledger`."""

    next_index: int
    num_consumed: int
    num_finished: int
    running: list[RunningEntry]
    parked: list[ParkedEntry]
    finished: list[FinishedEntry]
    retry: list[int]
    failures: dict[int, int]
    set_aside: dict[int, str]
    num_rejected: int = 0


class EvaluationState(Struct, frozen=True):
    """An evaluation that is going on, without its leases; see `heldout_evaluation.Evaluation`."""

    step: int
    scores: dict[int, float]
    rewards: dict[int, float]
    failed: dict[int, str]
    steps: list[int]
    example: str
    samples: dict[int, tuple[list[float], list[str]]] = {}
    texts: dict[int, str] = {}


class TotalsState(Struct, frozen=True):
    """See `consumption.Totals`."""

    head_ages: dict[int, int]
    tokens_generated: int
    tokens_interrupted: int
    tokens_trained: int
    num_steps: int
    num_evaluations: int
    num_duplicates: int
    num_retries: int


class Snapshot(Message, frozen=True):
    """All of it. `positions`: bytes of each metrics file that belong to this state; `seconds`: time trained so far; `rejections`, `concurrency`,
    `lead`: None in states of runs that knew none."""

    step: int
    epoch: int
    ledger: LedgerState
    evaluation: EvaluationState | None
    totals: TotalsState
    forks: dict[int, int]
    early_reason: str
    seconds: float
    positions: dict[str, int]
    rejections: RejectionsState | None = None
    concurrency: ConcurrencyState | None = None
    lead: LeadState | None = None

    def encode(self) -> bytes:
        """As bytes; `decode` is the inverse."""
        return pack(self)

    def buffers(self) -> list[bytes | memoryview]:
        """The same in parts, which are no copies of the groups' tokens: those never change."""
        return buffers(self)


def decode(content: bytes) -> Snapshot:
    """The snapshot in `content`. Raises `SnapshotError`."""
    try:
        snapshot = Decoder(Snapshot, MAX_BYTES, MANY_ARRAYS).unpack(content)
    except MessageError as error:
        raise SnapshotError(f"a coordinator's state of {len(content)} bytes: cannot be read ({error}). Resume from an older checkpoint") from error
    assert isinstance(snapshot, Snapshot)
    return snapshot


def save_ledger(ledger: Ledger) -> LedgerState:
    """The ledger's state; what is in training is saved as finished."""
    finished = sorted([*ledger.finished.values(), *ledger.in_training.values()], key=lambda entry: entry.order)
    return LedgerState(
        ledger.next_index, ledger.num_consumed, ledger.num_finished,
        [RunningEntry(lease.index, lease.attempt, lease.worker, lease.admitted_at, lease.partial) for lease in ledger.running.values()],
        [ParkedEntry(parked.index, parked.admitted_at, parked.partial) for parked in ledger.parked.values()],
        [FinishedEntry(entry.group, entry.admitted_at, entry.order) for entry in finished],
        list(ledger.retry), dict(ledger.failures), dict(ledger.set_aside), ledger.num_rejected)


def restore_ledger(ledger: Ledger, state: LedgerState) -> None:
    """Fill a new ledger."""
    ledger.next_index, ledger.num_consumed = state.next_index, state.num_consumed
    ledger.num_finished, ledger.num_rejected = state.num_finished, state.num_rejected
    ledger.running.update({f"g{entry.index}": Running(entry.index, entry.attempt, entry.worker, entry.admitted_at, entry.partial)
                           for entry in state.running})
    ledger.attempts = {entry.index: entry.attempt for entry in state.running}
    ledger.parked.update({f"g{entry.index}": Parked(entry.index, entry.admitted_at, entry.partial) for entry in state.parked})
    ledger.finished.update({entry.group.group_id: Finished(entry.group, entry.admitted_at, entry.order) for entry in state.finished})
    ledger.retry, ledger.failures, ledger.set_aside = dict.fromkeys(state.retry, b""), dict(state.failures), dict(state.set_aside)


def leave_out(ledger: Ledger, check: Callable[[Group | Partial], None]) -> list[str]:
    """Have groups sampled again that `check` refuses (`MessageError`), however they came into the checkpoint: training would fail by them in every
    incarnation. Returns what is to be said."""
    notices = []
    pieces: list[tuple[str, Group | Partial | None]] = [(group_id, entry.group) for group_id, entry in ledger.finished.items()]
    pieces += [(group_id, entry.partial) for part in (ledger.running, ledger.parked) for group_id, entry in part.items()]
    for group_id, piece in pieces:
        try:
            if piece is not None:
                check(piece)
        except MessageError as error:
            notices.append(f"{error}. It stands in the checkpoint; it is left out, and sampled again")
            if group_id in ledger.running:
                ledger.running[group_id].partial = None
            else:
                ledger.finished.pop(group_id, None)
                ledger.parked.pop(group_id, None)
                ledger.retry[index_of(group_id)] = b""
    return notices


def save_evaluation(evaluation: Evaluation) -> EvaluationState | None:
    """The evaluation that is going on, or None."""
    if not evaluation.active:
        return None
    return EvaluationState(evaluation.step, dict(evaluation.scores), dict(evaluation.rewards), dict(evaluation.failed),
                           sorted(evaluation.steps), evaluation.example, dict(evaluation.samples), dict(evaluation.texts))


def restore_evaluation(evaluation: Evaluation, state: EvaluationState | None) -> None:
    """Go on with an evaluation: what was judged stays, the rest is leased again."""
    if state is None:
        return
    evaluation.start(state.step)
    evaluation.scores, evaluation.rewards, evaluation.failed = dict(state.scores), dict(state.rewards), dict(state.failed)
    evaluation.steps, evaluation.example = set(state.steps), state.example
    # A state of a run that knew none: each prompt had one sample.
    evaluation.samples = {index: ([score], [""]) for index, score in state.scores.items()} | dict(state.samples)
    evaluation.texts = dict(state.texts)
    evaluation.skip(evaluation.scores.keys() | evaluation.failed.keys())


def save_totals(totals: Totals) -> TotalsState:
    """The totals so far."""
    return TotalsState(**{name: getattr(totals, name) for name in TotalsState.__struct_fields__})


def restore_totals(totals: Totals, state: TotalsState) -> None:
    """Go on counting."""
    for name in TotalsState.__struct_fields__:
        setattr(totals, name, getattr(state, name))
    totals.head_ages = Counter(state.head_ages)
