"""What is recorded of any history of a run is replayed to the same decisions and the same states, and what was changed in it is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.groups import make_group
from tests.support.small_run import Notes, Prompts, World, make_config
from tests.unit.workers.coordinator.test_restarts import EVENTS, Play
from workers.config import Bound, RouterReplay, RoutingShape
from workers.coordinator.core import Coordinator
from workers.coordinator.groups.group_states import index_of
from workers.coordinator.recording import contents, journal
from workers.coordinator.recording.auditing import Auditor
from workers.coordinator.recording.contents import PieceArrived, checksum, recorded
from workers.coordinator.recording.frozen_state import StateError, digests, freeze, thaw
from workers.coordinator.recording.inputs import AnyInput, Arrived, Outcome, advance
from workers.coordinator.recording.journal import Entry, JournalError, Point, Record
from workers.coordinator.recording.replaying import Difference, Replay
from workers.coordinator.training.step_records import StepRecord
from workers.messages.arrays import Bool, Float32, Int32, Uint8
from workers.messages.from_coordinator import Refused
from workers.messages.from_worker import GroupFinished, Register, StepFinished
from workers.messages.parts import Role, Version


def written(record: Record) -> bytes:
    """As it stands in a file."""
    [content] = journal.records(journal.frame([record]))
    return content


class Kept(Notes):
    """A journal in memory: its parts, the oldest first; a new one where the state was changed by hand. A point after every input."""

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = []
        self.epoch = self.number = 0

    def begin(self, core: Coordinator, now: float) -> None:
        self.number = 0 if core.epoch != self.epoch else self.number + 1  # as if an input were missing
        self.epoch = core.epoch
        config = msgspec.json.encode(core.config)
        self.parts.append([written(journal.start(core, "code", config, len(self.parts), self.number + 1, now, now, now))])

    def note(self, core: Coordinator, given: AnyInput, outcome: Outcome) -> None:
        self.number += 1
        self.parts[-1] += [written(journal.entry(given, outcome, [])), written(Point(self.number, digests(freeze(core))))]


def replayed(parts: list[list[bytes]], auditor: Auditor | None = None) -> Replay:
    replay = Replay("code")
    for part in parts:
        for step in replay.play(part):
            if auditor is not None:
                auditor.look(step)
    return replay


@given(eta=st.integers(0, 3), batch=st.integers(1, 3), bound=st.sampled_from(Bound), num_steps=st.integers(1, 5), every=st.integers(0, 2),
       concurrency=st.sampled_from([2, 16, "auto"]), capacity=st.sampled_from([1, 3]), prefetch=st.booleans(), num_shares=st.integers(1, 3),
       events=EVENTS)
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
def test_every_history_is_replayed_to_the_same_states(eta: int, batch: int, bound: Bound, num_steps: int, every: int, concurrency: int | str,
                                                      capacity: int, prefetch: bool, num_shares: int, events: list[tuple[str, int]]) -> None:
    kept, auditor = Kept(), Auditor()
    play = Play(World(make_config(eta, batch, bound, num_steps, every, concurrency, prefetch), capacity, num_shares=num_shares, notes=kept))
    for name, number in events:
        play.happen(name, number)
    if play.world.ended is None:
        play.world.go_to_the_end()
    replay = replayed(kept.parts, auditor)
    assert replay.core is not None and replay.num_points == replay.num_inputs > 0 and not auditor.findings
    assert play.world.core is not None and freeze(replay.core) == freeze(play.world.core)


def recorded_run() -> Kept:
    """Three steps without trouble."""
    kept = Kept()
    World(make_config(1, 2, Bound.hard, 3), notes=kept).go_to_the_end()
    return kept


def test_the_first_difference_of_a_changed_journal_is_shown() -> None:
    """One score of one group is another one: its place, and what was decided otherwise."""
    [part] = recorded_run().parts
    place = next(number for number, record in enumerate(part) if isinstance(entry := journal.decode(record), Entry)
                 and isinstance(entry.given, Arrived) and isinstance(entry.given.message, StepFinished) and number > 50)
    entry = journal.decode(part[place])
    assert isinstance(entry, Entry) and isinstance(entry.given, Arrived) and isinstance(entry.given.message, StepFinished)
    version = entry.given.message.announcement.version
    other = msgspec.structs.replace(entry.given.message.announcement, version=Version(version.epoch, version.step + 1))
    given = msgspec.structs.replace(entry.given, message=msgspec.structs.replace(entry.given.message, announcement=other))
    part[place] = written(msgspec.structs.replace(entry, given=given))
    number = sum(isinstance(journal.decode(record), Entry) for record in part[:place + 1])
    with pytest.raises(Difference, match=rf"incarnation 1, input {number} \(StepFinished.*then VersionAnnounced.*now Refused.*the next one is"):
        replayed([part])


def test_a_changed_state_is_another_one() -> None:
    [part] = recorded_run().parts
    place = next(number for number, record in enumerate(part) if isinstance(journal.decode(record), Point))
    point = journal.decode(part[place])
    assert isinstance(point, Point)
    part[place] = written(msgspec.structs.replace(point, digests=point.digests | {"ledger": b"another!"}))
    with pytest.raises(Difference, match="input 1: the state is another one: ledger"):
        replayed([part])


def test_a_part_that_begins_in_the_midst_of_a_run_is_replayed_alone() -> None:
    kept = Kept()
    world = World(make_config(1, 2, Bound.hard, 3), notes=kept)
    for _ in range(6):
        world.talk()
        world.work()
    assert world.core is not None and world.core.training.in_training
    kept.begin(world.core, world.now)
    world.go_to_the_end()
    assert world.core is not None and freeze(replayed(kept.parts[1:]).core) == freeze(world.core)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [
    {"tokens": Int32.of([3, -1])}, {"tokens": Int32.of([3, 10])}, {"logprobs": Float32.of([3e38, 0])},
    {"logprobs": Float32.of([-0.5, float("nan")])}, {"logprobs": Float32.of([float("-inf"), -1])},
    {"prompt": Int32.of([])}, {"prompt": Int32.of([-2, 1])}, {"loss_mask": Bool.of([True])}, {"rewards": Float32.of([1.0])},
    {"lengths": Int32.of([1, 2])}, {"episodes": Int32.of([0, 2])}, {"answers": ["a", "b", "c"]}, {"run_lengths": Int32.of([2, 0])}])
def test_a_refused_group_is_refused_again_for_the_same_reason(changes: dict) -> None:
    config = make_config(1, 2, Bound.hard, 3)
    config.model.vocab_size = 10
    kept, core = Kept(), Coordinator(config, Prompts(), 1, 0.0)
    advance(core, Arrived(1.0, b"w", Register(Role.rollout, "node", 1)))
    core.ledger.lease(b"w", 0)
    kept.begin(core, 1.0)
    group = msgspec.structs.replace(make_group("g0", 1000, [0, 0]), **changes)
    happens = Arrived(2.0, b"w", GroupFinished(group))
    outcome = advance(core, happens)
    kept.note(core, happens, outcome)
    assert any(isinstance(message, Refused) for _, message in outcome.sent)
    assert replayed(kept.parts).num_points == 1


@pytest.mark.parametrize(("experts", "taken"), [([1, 3], True), ([3, 3], False), ([1, 4], False)])
def test_what_experts_were_chosen_is_judged_once(experts: list[int], taken: bool) -> None:
    """A replayed group has a stand-in for its routing, of which nothing could be said, and so has a state."""
    config = make_config(1, 2, Bound.hard, 3)
    config.algorithm.router_replay, config.model.routing = RouterReplay.rollout, RoutingShape(1, 0, 2, 4)
    kept, core = Kept(), Coordinator(config, Prompts(), 1, 0.0)
    advance(core, Arrived(1.0, b"w", Register(Role.rollout, "node", 1)))
    core.ledger.lease(b"w", 0)
    kept.begin(core, 1.0)
    group = make_group("g0", 1000, [0, 0])
    num_tokens = group.prompt.size * group.lengths.size + group.tokens.size - group.lengths.size
    happens = Arrived(2.0, b"w", GroupFinished(msgspec.structs.replace(group, routing=Uint8.of(np.array(experts * num_tokens, np.uint8)))))
    outcome = advance(core, happens)
    kept.note(core, happens, outcome)
    kept.begin(core, 3.0)
    assert any(isinstance(message, Refused) for _, message in outcome.sent) is not taken
    again = replayed(kept.parts)
    assert again.num_points == 1 and again.core is not None and freeze(again.core) == freeze(core)


def test_neither_tokens_nor_texts_are_kept() -> None:
    group = msgspec.structs.replace(make_group("g0", 0, [0] * 40), tokens=Int32.of([77777] * 40), first_text="secret words", answers=["secret"] * 40)
    for refused in (False, True):
        given = recorded(Arrived(0.0, b"w", GroupFinished(group)), refused)
        content = msgspec.msgpack.encode(given)
        assert b"secret" not in content and content.count(msgspec.msgpack.encode(77777)) <= 2
        back = contents.replayed(msgspec.msgpack.decode(content, type=PieceArrived))
        assert isinstance(back, Arrived) and isinstance(back.message, GroupFinished)
        again = back.message.group
        assert again.lengths.tolist() == group.lengths.tolist() and again.loss_mask.tolist() == group.loss_mask.tolist()
        assert again.tokens.size == 40 and checksum(again.tokens) == checksum(group.tokens) and len(again.answers) == 40


@given(st.lists(st.booleans(), max_size=40))
def test_masks_are_kept_bit_by_bit(mask: list[bool]) -> None:
    group = msgspec.structs.replace(make_group(), loss_mask=Bool.of(np.array(mask, bool)))
    back = contents.replayed(recorded(Arrived(0.0, b"w", GroupFinished(group)), False))
    assert isinstance(back, Arrived) and isinstance(back.message, GroupFinished) and back.message.group.loss_mask.tolist() == mask


def test_an_end_that_was_cut_off_is_left_out_and_damage_is_named() -> None:
    frames = [journal.frame([Point(number, {})]) for number in range(3)]
    content = b"".join(frames)
    for length in range(len(content) + 1):
        whole = sum(length >= len(b"".join(frames[:number])) for number in (1, 2, 3))
        assert len(list(journal.records(content[:length]))) == whole
    damaged = bytearray(content)
    damaged[len(frames[0]) + 12] ^= 1
    with pytest.raises(JournalError, match=f"the frame at byte {len(frames[0])} is damaged"):
        list(journal.records(bytes(damaged)))


@pytest.mark.parametrize("plain", [[8, "os:_Environ", {}], [8, "subprocess:Popen", {"args": "true"}], [8, "workers.coordinator.core:advance", {}],
                                   [7, "workers.coordinator.core:DRAIN_S", 1],
                                   [7, "workers.coordinator.core:Coordinator", 1], [99], [9, 12], [10, "elsewhere"]])
def test_a_state_makes_nothing_but_the_coordinators_own(plain: list) -> None:
    core = Coordinator(make_config(1, 2, Bound.hard, 3), Prompts(), 1, 0.0)
    with pytest.raises(StateError):
        thaw(core, {"left": msgspec.msgpack.encode(plain)})


def broken_by(change: Callable[[Coordinator], object]) -> list[str]:
    """What an audit says of a run in whose midst the state is changed."""
    replay, auditor = Replay("code"), Auditor()
    inputs = [record for record in recorded_run().parts[0] if not isinstance(journal.decode(record), Point)]
    for number, step in enumerate(replay.play(inputs)):
        auditor.look(step)
        assert not auditor.findings
        if number > 40 and step.core.ledger.finished and step.core.ledger.num_consumed:
            change(step.core)
            auditor.look(step)
            break
    auditor.look(step._replace(given=None, outcome=None))
    return auditor.findings


@pytest.mark.parametrize(("change", "finding"), [
    (lambda core: core.ledger.finished.popitem(), "prompts: "),
    (lambda core: core.ledger.retry.setdefault(0, b""), "prompts: "),
    (lambda core: core.ledger.retry.setdefault(index_of(next(iter(core.ledger.finished))), b""), "places: "),
    (lambda core: vars(core.ledger).update(num_consumed=90, next_index=90 + core.ledger.next_index - core.ledger.num_consumed), "admission: "),
    (lambda core: core.registry.workers.clear() or core.ledger.lease(b"nobody", 0), "leases of nobody: ")])
def test_the_audit_finds_what_does_not_hold(change: Callable[[Coordinator], object], finding: str) -> None:
    assert any(finding in found for found in broken_by(change))


def resumed_run() -> tuple[list[list[bytes]], list[int]]:
    """Two incarnations, the second one from the third step on, and where in the first one's part its weights and steps are finished."""
    kept = Kept()
    world = World(make_config(1, 2, Bound.hard, 5), notes=kept)
    while world.trainer is not None and world.trainer.step < 3:
        world.talk()
        world.work()
    world.save(final=True)
    world.kill()
    world.go_to_the_end()
    first = [journal.decode(record) for record in kept.parts[0]]
    steps = [place for place, entry in enumerate(first) if isinstance(entry, Entry) and isinstance(entry.given, Arrived)
             and isinstance(entry.given.message, StepFinished)]
    return kept.parts, steps


def test_steps_that_could_not_be_recorded_are_named_and_count_as_whole_batches() -> None:
    """The disk was full until the incarnation ended."""
    (first, second), steps = resumed_run()
    whole, cut = Auditor(), Auditor()
    replayed([first, second], whole)
    replayed([first[:steps[2]], second], cut)
    assert (whole.findings, whole.notes, cut.findings) == ([], [], [])
    assert cut.notes == ["the journal lacks 2 steps, from 2 to 3"]


def test_the_audit_finds_a_prompt_that_an_incarnation_does_not_know_of_and_a_step_that_was_left_out() -> None:
    (first, second), _ = resumed_run()
    replay, auditor = Replay("code"), Auditor()
    for record in [*first, *second]:
        for step in replay.play([record]):
            if step.core.epoch == 2 and step.given is None:
                step.core.ledger.num_consumed -= 1
            if step.outcome is not None and (found := [record for record in step.outcome.records if isinstance(record, StepRecord)]):
                skips = dataclasses.replace(found[0], step=found[0].step + 1, consumed=[])
                auditor.look(step._replace(outcome=step.outcome._replace(records=[skips], sent=[])))
            else:
                auditor.look(step)
        if len(auditor.findings) > 3:
            break
    assert any("steps: step 2 follows step 0" in finding for finding in auditor.findings)
    assert any("consumed prompts: 0 in the line of incarnations before, 5 in the state" in finding for finding in auditor.findings)


def test_the_audit_finds_a_prompt_that_is_consumed_twice_and_a_token_that_is_too_old() -> None:
    replay, auditor = Replay("code"), Auditor()
    for step in replay.play(recorded_run().parts[0]):
        auditor.look(step)
        if step.outcome is not None and (records := [record for record in step.outcome.records if isinstance(record, StepRecord)]):
            old = dataclasses.replace(records[0], ages=dataclasses.replace(records[0].ages, max_token_age=2))
            auditor.look(step._replace(outcome=step.outcome._replace(records=[old], sent=[])))
            break
    assert len(auditor.findings) == 3 and "steps: step 1 follows step 1" in auditor.findings[0]
    assert "consumed twice: prompts [0, 1]" in auditor.findings[1] and "2 steps old, must be at most 1" in auditor.findings[2]
