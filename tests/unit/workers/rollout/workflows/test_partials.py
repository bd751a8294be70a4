"""Samples to partials and back, and the results that a worker keeps."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.groups import make_group
from workers.messages.arrays import Bool, Float32, Int32, Uint8
from workers.messages.codec import encode, from_workers
from workers.messages.from_worker import GroupFailed, GroupFinished, GroupParked
from workers.messages.groups import check_partial
from workers.messages.parts import Lease, Message, Partial, Purpose, Turns, Version
from workers.rollout.engines.sampler import Sample
from workers.rollout.leases import outbox as results_module
from workers.rollout.leases.outbox import Results
from workers.rollout.workflows.partials import PartialError, park, restore
from workers.rollout.workflows.transcript import Dialogue, EpisodeRecord, GroupRecord
from workers.run.folder import RunFolder

OLD, NEW = Version(1, 4), Version(2, 3)


def make_lease(**changes: Any) -> Lease:
    return Lease(**{"group_id": "g7", "attempt": 1, "purpose": Purpose.training, "version": OLD, "prompt_id": "p", "prompt": "?",
                    "verifier": "numeric", "reference": "1", "seed": 5, **changes})


PROMPT = [1, 2]


def make_samples() -> list[Sample]:
    return [Sample([3, 4, 5], [-0.1, -0.2, -0.3], [OLD, OLD, NEW]), Sample(), Sample([6], [-1.0], [NEW], finished=True),
            Sample([7, 8, 9, 1], [-0.5] * 4, [NEW] * 4)]


def record_of(samples: list[Sample]) -> GroupRecord:
    """Episodes of one answer each."""
    return GroupRecord(PROMPT, [EpisodeRecord([(PROMPT, sample)]) for sample in samples])


def restored(lease: Lease, number: int = 4, limit: int = 4) -> list[Sample]:
    """The samples that answers to the prompt go on with."""
    return [record.begin(Dialogue(), PROMPT, PROMPT, limit) for record in restore(lease, PROMPT, number, limit)]


def test_samples_survive_the_way_to_another_worker() -> None:
    parked = GroupParked(park(make_lease(), record_of(make_samples())))
    check_partial(parked.partial)
    assert (parked.partial.epochs.tolist(), parked.partial.steps.tolist(), parked.partial.run_lengths.tolist()) == ([1, 2], [4, 3], [2, 6])
    arrived = from_workers(1 << 20).decode(encode(parked))
    assert isinstance(arrived, GroupParked)
    samples = restored(make_lease(attempt=2, partial=arrived.partial))
    for before, after in zip(make_samples(), samples, strict=True):
        assert after.tokens == before.tokens and after.versions == before.versions
        assert after.logprobs == Float32.of(before.logprobs).tolist()
    assert [sample.finished for sample in samples] == [False, False, True, True], "one of the greatest length is finished, too"
    assert [(sample.num_interruptions, sample.tokens_interrupted) for sample in samples] == [(1, 3), (0, 0), (0, 0), (0, 0)]


def test_routing_of_finished_samples_goes_along() -> None:
    """Of those that end their conversation so far: of what is gone on with, the next server tells it."""
    samples = make_samples()
    samples[0].routing, samples[2].routing = bytes(2 * 4), bytes([9, 8, 7, 6])  # two bytes a token: prompt and sample but its last token
    partial = park(make_lease(), record_of(samples))
    assert partial.routing is not None and partial.routing.tobytes() == samples[2].routing
    assert [sample.routing for sample in restored(make_lease(attempt=2, partial=partial))] == [b"", b"", samples[2].routing, b""]
    plain = msgspec.structs.replace(partial, turns=None)
    assert [sample.routing for sample in restored(make_lease(attempt=2, partial=plain))] == [b"", b"", samples[2].routing, b""]
    with pytest.raises(PartialError, match="3 bytes of routing: must be as many for each of 2 tokens"):
        restored(make_lease(attempt=2, partial=msgspec.structs.replace(partial, routing=Uint8.of(partial.routing[:3]))))
    assert park(make_lease(), record_of(make_samples())).routing is None


def test_nothing_is_a_partial_too() -> None:
    partial = park(make_lease(), record_of([Sample(), Sample()]))
    check_partial(partial)
    assert partial.lengths.tolist() == [0, 0] and partial.tokens.size == partial.run_lengths.size == 0
    assert restored(make_lease(partial=partial), 2, 8) == restored(make_lease(), 2, 8) == [Sample(), Sample()]


@pytest.mark.parametrize("over", [True, False])
def test_every_turn_has_its_routing_however_often_it_is_given_back(over: bool) -> None:
    """Two bytes a token. Of a conversation that of its last finished turn travels; `over`: that is its last one. The second time, the first turn has
    been asked for again, and the others have not."""
    turns = [Sample([3], [-1.0], [OLD], finished=True), Sample([4, 5], [-1.0] * 2, [OLD] * 2, finished=True),
             Sample([6], [-1.0], [NEW], finished=over)]
    befores = [PROMPT, [*PROMPT, 3, 9], [*PROMPT, 3, 9, 4, 5, 9]]
    whole = bytes(range(2 * 7))
    for before, sample in zip(befores, turns, strict=True):
        sample.routing = whole[: 2 * (len(before) + len(sample.tokens) - 1)] if sample.finished else b""
    record, dialogue = EpisodeRecord(list(zip(befores, turns, strict=True))), Dialogue()
    for before, outside in zip(befores, (PROMPT, [9], [9]), strict=True):
        record.begin(dialogue, before, outside, 4)
    partial = park(make_lease(), GroupRecord(PROMPT, [record]))
    for attempt in (2, 3):
        assert partial.routing is not None
        (again,) = restore(make_lease(attempt=attempt, partial=partial), PROMPT, 1, 4)
        assert again.begin(Dialogue(), PROMPT, PROMPT, 4).routing == turns[0].routing
        partial = park(make_lease(attempt=attempt), GroupRecord(PROMPT, [again]))
    (again,) = restore(make_lease(attempt=4, partial=partial), PROMPT, 1, 4)
    assert [again.begin(Dialogue(), before, before, 4).routing for before in befores] == [sample.routing for sample in turns]


def replaced_turns(**changes: list[int]) -> Turns:
    """The turns of `make_samples`, with other values."""
    good = park(make_lease(), record_of(make_samples())).turns
    assert good is not None
    return msgspec.structs.replace(good, **{name: Int32.of(np.array(values, np.int32)) for name, values in changes.items()})


@pytest.mark.parametrize(("changes", "words"), [
    ({"group_id": "g8"}, "must be of group g7 and for training"), ({"group_id": "e1.7", "purpose": Purpose.evaluation}, "must be of group g7"),
    ({"tokens": Int32.of([1, 2])}, "tokens and logprobs"), ({"logprobs": Float32.of([float("nan")] * 8)}, "finite"),
    ({"run_lengths": Int32.of([2, 7])}, "version runs"), ({"steps": Int32.of([4])}, "version runs"), ({"steps": Int32.of([-1, 3])}, "negative"),
    ({"lengths": Int32.of([3, 5])}, "finished must have one item"), ({"lengths": Int32.of([3, -1, 2, 4])}, "lengths must not be negative"),
    ({"lengths": Int32.of([2, 0, 1, 5])}, "at most workflow.max_new_tokens=4"),
    ({"lengths": Int32.of([3, 1, 4]), "finished": Bool.of([False] * 3), "turns": None}, "must have 4 samples"),
    ({"finished": Bool.of([False, True, False, False])}, "a finished sample must have a token"),
    ({"turns": replaced_turns(episodes=[0, 1, 2, 4])}, "episodes below 4"), ({"turns": replaced_turns(episodes=[0, 1, 2])}, "one item a sample"),
    ({"turns": replaced_turns(conversations=[0, 0, -1, 0])}, "must not be negative"),
    ({"turns": replaced_turns(outside=[5])}, "sum(outside_lengths)"),
    ({"turns": replaced_turns(outside_lengths=[0, 1, 0, -1])}, "sum(outside_lengths)")])
def test_a_partial_that_does_not_fit_its_lease_is_refused(changes: dict[str, Any], words: str) -> None:
    good = park(make_lease(), record_of(make_samples()))
    partial = Partial(**{**{name: getattr(good, name) for name in good.__struct_fields__}, **changes})
    with pytest.raises(PartialError, match=re.escape(words)):
        restore(make_lease(attempt=2, partial=partial), PROMPT, 4, 4)


class Wire:
    """A way to a coordinator that may be away."""

    def __init__(self) -> None:
        self.in_touch = True
        self.sent: list[Message] = []
        self.news = asyncio.Event()

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.news.set()

    async def until(self, num_sent: int) -> None:
        async with asyncio.timeout(120):
            while len(self.sent) < num_sent:
                self.news.clear()
                await self.news.wait()


async def test_results_are_sent_when_there_is_a_coordinator_and_again_until_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "RESEND_S", 0.02)
    monkeypatch.setattr(results_module, "LOOK_S", 0.01)
    wire = Wire()
    wire.in_touch = False
    results = Results(wire)
    delivering = asyncio.create_task(results.deliver())
    message = GroupFinished(make_group("g7", 1))
    results.add(make_lease(), message)
    assert not await results.delivered(10), "without a coordinator nobody waits"
    assert wire.sent == [] and len(results) == 1 and ("g7", 1) in results and results.held()[0].version == OLD
    wire.in_touch = True
    await wire.until(3)
    waiting = asyncio.create_task(results.delivered(10))
    results.acknowledged(("g7", 0))
    assert ("g7", 1) in results, "of another attempt"
    results.acknowledged(("g7", 1))
    assert await waiting and results.held() == [] and set(map(type, wire.sent)) == {GroupFinished}
    delivering.cancel()


async def test_a_new_coordinator_gets_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "RESEND_S", 600.0)  # nothing is sent again for another reason
    wire = Wire()
    results = Results(wire)
    delivering = asyncio.create_task(results.deliver())
    results.add(make_lease(), GroupFailed("g7", 1, "why"))
    results.add(make_lease(group_id="g8"), GroupFinished(make_group("g8", 1)))
    await wire.until(2)
    results.send_again()
    await wire.until(4)
    assert wire.sent[:2] == wire.sent[2:]
    delivering.cancel()


async def test_what_was_not_taken_can_be_read_back_from_files(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    results = Results(Wire())
    results.add(make_lease(), GroupParked(park(make_lease(), record_of(make_samples()))))
    results.add(make_lease(group_id="g8"), GroupFinished(make_group("g8", 1)))
    results.add(make_lease(group_id="g9"), GroupFailed("g9", 1, "why"))
    assert not await results.delivered(0.01), "nobody delivers, and the wait is bounded"
    assert results.spill(run) == 2 and len(results) == 0
    assert sorted(path.name for path in run.partials.iterdir()) == ["g7.1.msgpack", "g8.1.msgpack"], "a failure is not kept"
    decoder = from_workers(1 << 20)
    parked, finished = (decoder.unpack((run.partials / name).read_bytes()) for name in ("g7.1.msgpack", "g8.1.msgpack"))
    assert isinstance(parked, GroupParked) and parked.partial.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 1]
    assert isinstance(finished, GroupFinished) and finished.group.group_id == "g8"
