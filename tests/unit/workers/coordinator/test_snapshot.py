"""The coordinator's part of a checkpoint: what is written is what is read, and nothing else is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.groups import make_group, make_partial
from workers.coordinator.groups.consumption import Totals
from workers.coordinator.groups.group_states import Finished, Parked, Running
from workers.coordinator.groups.heldout_evaluation import Evaluation
from workers.coordinator.groups.ledger import Ledger
from workers.coordinator.groups.rejections import WINDOW_BATCHES, Rejections
from workers.coordinator.snapshot import (
    Snapshot,
    SnapshotError,
    decode,
    restore_evaluation,
    restore_ledger,
    restore_totals,
    save_evaluation,
    save_ledger,
    save_totals,
)
from workers.messages.codec import pack
from workers.messages.from_worker import Draining
from workers.messages.parts import Purpose

NUMBERS = st.integers(0, 9)
STEPS = st.lists(NUMBERS, min_size=1, max_size=4)
TEXTS = st.text(max_size=9)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Any ledger between two steps."""
    indices = draw(st.permutations(range(12)))
    cuts = sorted(draw(st.lists(st.integers(0, 12), min_size=5, max_size=5)))
    running, parked, finished, retry, set_aside = (indices[first:last] for first, last in zip([0, *cuts[:4]], cuts, strict=True))
    ledger = Ledger(3, draw(st.integers(0, 5)) * 1000, 12, 12 - cuts[4], len(finished) + 12 - cuts[4])
    for index in running:
        attempt = draw(NUMBERS)
        partial = make_partial(f"g{index}", attempt, draw(STEPS)) if draw(st.booleans()) else None
        ledger.running[f"g{index}"] = Running(index, attempt + 1, draw(st.binary(max_size=4)), draw(NUMBERS), partial)
        ledger.attempts[index] = attempt + 1
    for index in parked:
        ledger.parked[f"g{index}"] = Parked(index, draw(NUMBERS), make_partial(f"g{index}", draw(NUMBERS), draw(STEPS)))
    for order, index in enumerate(finished):
        ledger.finished[f"g{index}"] = Finished(make_group(f"g{index}", draw(NUMBERS), draw(STEPS)), draw(NUMBERS), order)
    ledger.retry.update(dict.fromkeys(retry, b""))
    ledger.failures = {index: draw(st.integers(1, 2)) for index in [*running, *retry] if draw(st.booleans())}
    ledger.set_aside, ledger.num_rejected = {index: draw(TEXTS) for index in set_aside}, draw(NUMBERS)
    return ledger


@st.composite
def evaluations(draw: st.DrawFn) -> Evaluation:
    evaluation = Evaluation(4, 3, num_leases=draw(NUMBERS))
    if draw(st.booleans()):
        evaluation.start(draw(NUMBERS))
        for _ in range(draw(st.integers(0, 4))):
            group_id, _, attempt = evaluation.lease(b"worker")
            ending = draw(st.sampled_from(["finish", "fail", "run"]))
            if ending == "finish":
                evaluation.finish(make_group(group_id, attempt, draw(STEPS), purpose=Purpose.evaluation))
            elif ending == "fail":
                evaluation.fail(group_id, attempt, draw(TEXTS), fatal=True)
    return evaluation


@st.composite
def rejections(draw: st.DrawFn) -> Rejections:
    result = Rejections("spread", 1.0, draw(st.integers(1, 2)))
    for score in draw(st.lists(st.none() | st.floats(0, 1), max_size=20)):
        if score is None:
            result.kept(draw(st.floats(0, 1)))
        else:
            result.rejected(score)
        if draw(st.booleans()):
            result.next_step()
    return result


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    totals = Totals(tokens_generated=draw(NUMBERS), num_steps=draw(NUMBERS), num_retries=draw(NUMBERS))
    totals.head_ages.update(draw(st.lists(NUMBERS, max_size=5)))
    return Snapshot(draw(NUMBERS), draw(NUMBERS), save_ledger(draw(ledgers())), save_evaluation(draw(evaluations())), save_totals(totals),
                    draw(st.dictionaries(NUMBERS, NUMBERS, max_size=3)), draw(TEXTS), draw(st.floats(0, 1e9)),
                    draw(st.dictionaries(TEXTS, NUMBERS, max_size=3)), draw(st.none() | rejections().map(Rejections.save)))


def plain(value: object) -> object:
    """`value` with everything that it is made of in the open, so that == compares all of it."""
    if isinstance(value, np.ndarray):
        return type(value).__name__, value.dtype.str, value.tolist()
    if hasattr(value, "__struct_fields__"):
        return type(value).__name__, {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@given(snapshots())
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_what_is_read(snapshot: Snapshot) -> None:
    content = snapshot.encode()
    assert plain(decode(content)) == plain(snapshot)
    assert decode(content).encode() == content


@given(ledgers())
@settings(max_examples=200, deadline=None)
def test_a_restored_ledger_is_the_same(ledger: Ledger) -> None:
    """With all orders: which group is leased next, and which are consumed first."""
    restored = Ledger(3, ledger.first_attempt)
    restore_ledger(restored, save_ledger(ledger))
    assert plain(restored) == plain(ledger)
    for part in ("running", "parked", "finished"):
        assert list(getattr(restored, part)) == list(getattr(ledger, part))


@given(ledgers(), st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_what_is_in_training_is_saved_as_finished(ledger: Ledger, number: int) -> None:
    """Its step is not completed: whoever goes on from there trains on it."""
    expected = plain(save_ledger(ledger))
    taken = list(ledger.finished)[:number]
    ledger.take(taken)
    assert plain(save_ledger(ledger)) == expected and list(ledger.in_training) == taken


@given(ledgers())
@settings(max_examples=50, deadline=None)
def test_a_snapshot_does_not_change_with_what_it_was_taken_of(ledger: Ledger) -> None:
    state = save_ledger(ledger)
    before = plain(state)
    while ledger.parked or ledger.retry:
        ledger.lease(b"later", 99)
    ledger.release(b"later")
    ledger.set_aside[99] = "later"
    ledger.failures[99] = 1
    restored = Ledger(3)
    restore_ledger(restored, state)
    restored.lease(b"later", 99)
    restored.set_aside[98] = "later"
    assert plain(state) == before


@given(evaluations())
@settings(max_examples=100, deadline=None)
def test_a_restored_evaluation_goes_on_with_what_was_not_judged(evaluation: Evaluation) -> None:
    restored = Evaluation(4, 3)
    restore_evaluation(restored, save_evaluation(evaluation))
    for name in ("step", "scores", "rewards", "failed", "steps", "example") if evaluation.active else ("step",):
        assert getattr(restored, name) == getattr(evaluation, name)
    left = [restored.lease(b"other")[1] for _ in range(4) if restored.has_work]
    assert left == ([index for index in range(4) if index not in evaluation.scores and index not in evaluation.failed] if evaluation.active else [])


def test_restored_totals_go_on_counting() -> None:
    totals, restored = Totals(tokens_generated=7, num_steps=3, num_duplicates=2), Totals()
    totals.head_ages.update([0, 2, 2])
    restore_totals(restored, save_totals(totals))
    assert restored == totals and restored.max_staleness == 2
    restored.head_ages.update([5])  # as a Counter does
    assert totals.max_staleness == 2 and restored.max_staleness == 5


@given(rejections(), st.lists(st.none() | st.floats(0, 1), max_size=20))
@settings(max_examples=100, deadline=None)
def test_restored_rejections_go_on_counting(counted: Rejections, later: list[float | None]) -> None:
    """With the share over the same groups, and the figures of the step that was under way."""
    restored = Rejections("spread", 1.0, (counted.window.maxlen or 0) // WINDOW_BATCHES)
    restored.restore(counted.save())
    for score in later:
        for each in (counted, restored):
            each.kept(0.5) if score is None else each.rejected(score)
    assert restored.share == counted.share and list(restored.window) == list(counted.window)
    assert restored.next_step() == counted.next_step()


def test_a_state_of_before_there_were_rejections_can_be_read() -> None:
    """Its ledger and its whole lack the fields."""
    content = msgspec.msgpack.decode(make_snapshot().encode())
    header = msgspec.msgpack.decode(content[0])
    del header["rejections"], header["ledger"]["num_rejected"]
    snapshot = decode(msgspec.msgpack.encode([msgspec.msgpack.encode(header), *content[1:]]))
    assert snapshot.rejections is None and snapshot.ledger.num_rejected == 0 and plain(snapshot) == plain(make_snapshot())


def make_snapshot() -> Snapshot:
    ledger = Ledger(3, 1000)
    ledger.lease(b"worker", 0)
    ledger.lease(b"worker", 0)
    ledger.finish(make_group("g0", 1000))
    return Snapshot(4, 2, save_ledger(ledger), None, save_totals(Totals()), {1: 0, 2: 3}, "", 1.5, {"metrics.jsonl": 10})


@pytest.mark.parametrize("content", [
    b"", b"\0", b"\x90", make_snapshot().encode()[:-1], make_snapshot().encode() + b"\0", pack(Draining("no snapshot"))])
def test_anything_else_is_refused_with_the_remedy(content: bytes) -> None:
    with pytest.raises(SnapshotError, match=rf"of {len(content)} bytes.*older checkpoint"):
        decode(content)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_shortened_snapshot_is_never_taken_for_a_whole_one(data: st.DataObject) -> None:
    content = make_snapshot().encode()
    with pytest.raises(SnapshotError):
        decode(content[: data.draw(st.integers(0, len(content) - 1))])
