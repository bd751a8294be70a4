"""What a worker with the key can send, and what becomes of it: nothing that training could not use, whichever way it comes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.groups import make_group, make_partial
from tests.unit.workers.coordinator.test_core import ROLLOUT, TRAINER, Play, hold, leases, only
from workers.config import RouterReplay, RoutingShape
from workers.coordinator.core import Coordinator
from workers.coordinator.groups.bounds import Bounds
from workers.coordinator.groups.ledger import MAX_SKIPPED
from workers.coordinator.registered_worker import SUSPECT_AFTER
from workers.messages.arrays import Bool, Float32, Int32, Uint8
from workers.messages.codec import MessageError, encode, from_workers
from workers.messages.from_coordinator import Acknowledged, Batch, Leases, Refused
from workers.messages.from_worker import (
    BatchRequest,
    CheckpointRequest,
    GroupFailed,
    GroupFinished,
    GroupParked,
    GroupRejected,
    Heartbeat,
    Register,
    SourcesRequest,
    StepFinished,
    TransportFailed,
)
from workers.messages.parts import Announcement, Group, HeldLease, Lease, Message, Partial, Purpose, Role, Turns, Version, WorkerStatus

OTHER = b"other"
LONG = 300
POISON: list[tuple[dict, str]] = [
    ({"tokens": Int32.of([3, 64])}, "vocabulary"),
    ({"tokens": Int32.of([3, 2**31 - 1])}, "vocabulary"),
    ({"prompt": Int32.of([1, 64])}, "vocabulary"),
    ({"prompt": Int32.of([1] * 256)}, "context_length"),
    ({"logprobs": Float32.of(np.array([-0.5, 3e38], np.float32))}, "log-probs"),
    ({"logprobs": Float32.of(np.array([-0.5, -3e38], np.float32))}, "log-probs"),
    ({"logprobs": Float32.of(np.array([-0.5, np.nan], np.float32))}, "finite"),
    ({"rewards": Float32.of(np.array([1, 3e38], np.float32))}, "rewards"),
    ({"rewards": Float32.of(np.array([-5.1, 1], np.float32))}, "rewards"),
    ({"scores": Float32.of(np.array([1, 1.5], np.float32))}, "scores"),
    ({"steps": Int32.of([0, 1])}, "version 7.1"),
    ({"steps": Int32.of([2**31 - 1, 0])}, "version 7.2147483647"),
    ({"epochs": Int32.of([7, 8])}, "version 8.0"),
    ({"episodes": Int32.of([0, 0])}, "2 episodes"),
    ({"loss_mask": Bool.of([False, False])}, "trained on"),
    ({"lengths": Int32.of([2**31 - 1, 2**31 - 1])}, "sum"),
    ({"run_lengths": Int32.of([2**31 - 1, 2**31 - 1])}, "sum"),
]
POISON_PARTIAL: list[tuple[dict, str]] = [
    ({"tokens": Int32.of([64])}, "vocabulary"),
    ({"logprobs": Float32.of([0.5])}, "log-probs"),
    ({"steps": Int32.of([1])}, "version 7.1"),
    ({"lengths": Int32.of([1, 0, 0]), "finished": Bool.of([False] * 3)}, "2 samples"),
    ({"lengths": Int32.of([2**31 - 1, 2**31 - 1])}, "sum"),
]


def make_play(**changes) -> Play:
    return Play(**{"model__vocab_size": 64, "evaluation__enabled": False, **changes})


def begin(play: Play) -> list[Lease]:
    """Two workers, of whom the first has all leases."""
    granted = play.begin()
    play.tell(OTHER, Register(Role.rollout, "node", 3))
    return [lease for lease in granted if lease.purpose is Purpose.training]


def good(lease: Lease) -> Group:
    return make_group(lease.group_id, lease.attempt, epoch=7, purpose=lease.purpose)


def good_partial(lease: Lease) -> Partial:
    return make_partial(lease.group_id, lease.attempt, epoch=7)


# -- routing -------------------------------------------------------------------------------------------------------------

SHAPE = RoutingShape(2, 1, 2, 8)
ROUTING = np.array([[[0, 1], [2, 3]], [[4, 5], [7, 6]], [[1, 0], [3, 7]], [[6, 2], [5, 4]]], np.uint8)  # two samples of a token, a prompt of two


def replaying(**changes) -> Play:
    return make_play(algorithm__router_replay=RouterReplay.rollout, model__routing=SHAPE, **changes)


@pytest.mark.parametrize(("routing", "words"), [
    (None, "2 of 8 experts"), (ROUTING[:3], "2 of 8 experts"), (np.repeat(ROUTING, 2, 0), "2 of 8 experts"), (ROUTING.ravel()[:15], "as many bytes"),
    (np.where(ROUTING == 7, 8, ROUTING), "8 experts"), (np.where(ROUTING == 6, 7, ROUTING), "2 of 8 experts"), (ROUTING[:0], "as many bytes")])
def test_routing_that_the_trainer_could_not_replay_is_refused(routing: np.ndarray | None, words: str) -> None:
    play = replaying()
    lease = begin(play)[0]
    told = None if routing is None else Uint8.of(routing.astype(np.uint8).ravel())
    [refused] = only(play.tell(ROLLOUT, GroupFinished(msgspec.structs.replace(good(lease), routing=told))), Refused)
    assert words in refused.reason


def test_routing_is_taken_where_it_is_replayed_and_nowhere_else() -> None:
    routing, partial_routing = Uint8.of(ROUTING.ravel()), Uint8.of(ROUTING[:1].ravel())
    play = replaying()
    first, second, third = begin(play)[:3]
    for lease, taken in ((first, True), (second, True)):
        message = GroupFinished(msgspec.structs.replace(good(lease), routing=routing)) if lease is first else GroupParked(
            msgspec.structs.replace(good_partial(lease), routing=partial_routing))
        assert (Acknowledged(lease.group_id, lease.attempt, taken) in play.tell(ROLLOUT, message)), message
    bad = msgspec.structs.replace(good_partial(third), routing=Uint8.of(ROUTING[:1].ravel()[:3]))
    assert "2 of 8 experts" in only(play.tell(ROLLOUT, GroupParked(bad)), Refused)[0].reason
    play = make_play()
    lease = begin(play)[0]
    refused = only(play.tell(ROLLOUT, GroupFinished(msgspec.structs.replace(good(lease), routing=routing))), Refused)[0]
    assert "router_replay=off" in refused.reason


# -- groups --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("changes", "words"), POISON)
def test_a_group_that_cannot_be_of_this_run_is_refused_and_sampled_again(changes: dict, words: str) -> None:
    play = make_play()
    lease = begin(play)[0]
    assert not leases(play.beat(peer=OTHER))
    sent = play.tell(ROLLOUT, GroupFinished(msgspec.structs.replace(good(lease), **changes)))
    [refused] = only(sent, Refused)
    assert words in refused.reason and lease.group_id in refused.reason
    assert Acknowledged(lease.group_id, lease.attempt, True) in sent, "the worker need not keep it"
    assert not play.core.ledger.finished and play.core.registry.workers[ROLLOUT].num_refused == 1
    [again] = leases(sent)
    assert again.group_id == lease.group_id and again.attempt > lease.attempt
    assert play.tell(OTHER, GroupFinished(good(again)))[0] == Acknowledged(again.group_id, again.attempt, True)


@pytest.mark.parametrize(("changes", "words"), POISON_PARTIAL)
def test_a_partial_that_cannot_be_of_this_run_is_refused(changes: dict, words: str) -> None:
    play = make_play()
    lease = begin(play)[0]
    [refused] = only(play.tell(ROLLOUT, GroupParked(msgspec.structs.replace(good_partial(lease), **changes))), Refused)
    assert words in refused.reason and not play.core.ledger.parked


@pytest.mark.parametrize(("episodes", "outside", "lengths", "words"), [
    ([0, 2], [0, 0], [1, 1], "2 episodes"), ([0, 1], [1, 0], [1, 1], "vocabulary"), ([0, 0], [200, 50], [4, 4], "context_length")])
def test_turns_of_a_partial_are_bounded_too(episodes: list[int], outside: list[int], lengths: list[int], words: str) -> None:
    play = make_play()
    lease, total = begin(play)[0], sum(lengths)
    turns = Turns(Int32.of(episodes), Int32.of([0, 0]), Bool.of([True, True]), Int32.of(outside),
                  Int32.of(np.array([64 if words == "vocabulary" else 1] * sum(outside), np.int32)), Bool.of([False, False]))
    partial = msgspec.structs.replace(
        good_partial(lease), lengths=Int32.of(lengths), tokens=Int32.of([3] * total), logprobs=Float32.of([-0.5] * total),
        epochs=Int32.of([7]), steps=Int32.of([0]), run_lengths=Int32.of([total]), turns=turns)
    assert words in only(play.tell(ROLLOUT, GroupParked(partial)), Refused)[0].reason


def test_an_evaluation_is_guarded_alike() -> None:
    play = make_play(evaluation__enabled=True)
    lease = play.begin()[0]
    assert lease.purpose is Purpose.evaluation
    group = make_group(lease.group_id, lease.attempt, epoch=7, purpose=lease.purpose)
    for changes in ({"scores": Float32.of([3e38])}, {"tokens": Int32.of([64])}, {"steps": Int32.of([1])}):
        assert only(play.tell(ROLLOUT, GroupFinished(msgspec.structs.replace(group, **changes))), Refused)
        running = play.core.evaluation.running.get(lease.group_id)
        group = msgspec.structs.replace(group, attempt=running.attempt if running else 0)
    assert not play.core.evaluation.scores


def test_a_rejected_group_is_bounded_too() -> None:
    play = make_play()
    lease = begin(play)[0]
    assert only(play.tell(ROLLOUT, GroupRejected(lease.group_id, lease.attempt, 2**40, 0, 0.5)), Refused)
    assert play.core.ledger.num_rejected == 0 and play.core.totals.tokens_generated == 0


def test_what_is_broadcast_already_may_be_sampled_from() -> None:
    play = make_play()
    lease = begin(play)[0]
    play.core.broadcasts.group.sent = Version(7, 1)
    sent = play.tell(ROLLOUT, GroupFinished(make_group(lease.group_id, lease.attempt, [0, 1], epoch=7)))
    assert not only(sent, Refused) and play.core.ledger.finished


@pytest.mark.parametrize("message", [GroupFinished(make_group("g0", 6000, [99, 99])), GroupParked(make_partial("g0", 6000, [99], epoch=9)),
                                     GroupFinished(msgspec.structs.replace(make_group("g0", 6000), tokens=Int32.of([64, 3])))])
def test_what_stands_in_the_run_folder_is_guarded_alike(message) -> None:
    play = make_play()
    if isinstance(message, GroupFinished) and message.group.steps[0] == 99:  # of a lineage that is lost: it counts as of the restored step
        assert play.core.reconciliation.absorb(message) and play.core.ledger.finished["g0"].group.steps.tolist() == [0, 0]
        return
    with pytest.raises(MessageError):
        play.core.reconciliation.absorb(message)
    assert play.core.ledger.next_index == 0


def test_a_checkpoint_with_a_poisoned_group_fails_no_incarnation() -> None:
    """It can stand in one that older code has written."""
    play = make_play()
    finished, parked, kept = begin(play)[:3]
    for lease in (finished, kept):
        play.tell(ROLLOUT, GroupFinished(good(lease)))
    play.tell(ROLLOUT, GroupParked(good_partial(parked)))
    ledger = play.core.ledger
    ledger.finished[finished.group_id].group = msgspec.structs.replace(good(finished), tokens=Int32.of([3, 64]))
    for one in [*ledger.parked.values(), *(one for one in ledger.running.values() if one.partial)]:
        one.partial = msgspec.structs.replace(good_partial(parked), logprobs=Float32.of([3e30]))
    later = make_play(epoch=8, snapshot=play.save())
    assert list(later.core.ledger.finished) == [kept.group_id]
    assert not any(one.partial for one in later.core.ledger.running.values()) and not later.core.ledger.parked
    assert sum("left out" in notice for notice in later.core.notices) == 2
    everything = [*later.core.ledger.retry, *(entry.index for entry in later.core.ledger.running.values())]
    assert sorted([*everything, int(kept.group_id[1:])]) == list(range(later.core.ledger.next_index)), "no prompt is lost"


def test_without_a_known_vocabulary_the_rest_is_still_checked() -> None:
    bounds = Bounds.of(Play().core.config)
    assert Play().core.config.model.vocab_size == 0
    bounds.check(msgspec.structs.replace(make_group(), tokens=Int32.of([3, 2**31 - 1])), Version(1, 0))
    with pytest.raises(MessageError, match="rewards"):
        bounds.check(msgspec.structs.replace(make_group(), rewards=Float32.of([50.0, 1.0])), Version(1, 0))


# -- whose lease it is ---------------------------------------------------------------------------------------------------

def results_of(lease: Lease) -> list[Message]:
    return [GroupFailed(lease.group_id, lease.attempt, "not mine", fatal=True), GroupFinished(good(lease)), GroupParked(good_partial(lease)),
            GroupRejected(lease.group_id, lease.attempt, 1, 0, 0.0)]


@pytest.mark.parametrize("number", range(4))
def test_only_the_worker_that_holds_a_lease_can_end_it(number: int) -> None:
    play = make_play()
    lease = begin(play)[0]
    assert only(play.tell(OTHER, results_of(lease)[number]), Acknowledged) == [Acknowledged(lease.group_id, lease.attempt, False)]
    assert play.core.ledger.running.owner(lease.group_id, lease.attempt) == ROLLOUT and not play.core.ledger.set_aside
    assert play.core.registry.workers[OTHER].num_refused == 1
    assert play.tell(ROLLOUT, GroupFinished(good(lease)))[0].accepted


def test_a_duplicate_is_acknowledged_again_and_nobody_is_blamed() -> None:
    play = make_play()
    lease = begin(play)[0]
    assert [play.tell(ROLLOUT, GroupFinished(good(lease)))[0].accepted for _ in range(3)] == [True, False, False]
    assert play.core.registry.workers[ROLLOUT].num_refused == 0


def test_a_worker_whose_results_are_refused_again_and_again_is_named_and_others_get_its_leases() -> None:
    play = make_play(rollout__max_attempts=100)
    granted = begin(play)
    play.tell(OTHER, Heartbeat(held=Version(7, 0), capacity=0))
    for _ in range(SUSPECT_AFTER):
        lease = granted.pop()
        granted += leases(play.tell(ROLLOUT, GroupFinished(msgspec.structs.replace(good(lease), tokens=Int32.of([64, 64])))))
    [notice] = [notice for notice in play.core.notices if "refused" in notice]
    assert "rollout 0" in notice and "vocabulary" in notice
    play.core.handle(OTHER, Heartbeat(held=Version(7, 0), capacity=100), play.now)
    lease = granted.pop()
    play.core.handle(ROLLOUT, GroupFailed(lease.group_id, lease.attempt, "engine gone"), play.now)
    assert {peer for peer, message in play.core.outbox if isinstance(message, Leases)} == {OTHER}


# -- numbers at their bounds ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("lease", [
    HeldLease("g999999999999999", 6000, Purpose.training, Version(6, 0)), HeldLease(f"g{MAX_SKIPPED + 1}", 6000, Purpose.training, Version(6, 0)),
    HeldLease("g0", 2**53, Purpose.training, Version(6, 0)), HeldLease("g0", 6000, Purpose.training, Version(7, 1)),
    HeldLease("g0", 6000, Purpose.training, Version(2**31 - 1, 0)), HeldLease("e5.3", 6000, Purpose.evaluation, Version(6, 0)),
    HeldLease("g5", 7000, Purpose.training, Version(6, 0)), HeldLease("g5", 999, Purpose.training, Version(0, 0))])
def test_leases_that_there_cannot_have_been_are_not_adopted(lease: HeldLease) -> None:
    play = make_play()
    sent = play.tell(ROLLOUT, Register(Role.rollout, "node", 1, leases=[lease]))
    assert only(sent, Acknowledged) == [Acknowledged(lease.group_id, lease.attempt, False)]
    assert play.core.ledger.next_index == 0 and not play.core.ledger.retry


def test_what_a_lost_incarnation_leased_is_still_adopted() -> None:
    play = make_play()
    play.tell(ROLLOUT, Register(Role.rollout, "node", 1, leases=[hold("g2", 6000, Version(6, 3))]))
    assert list(play.core.ledger.running) == ["g2"] and list(play.core.ledger.retry) == [0, 1]


@pytest.mark.parametrize("folder", ["/etc", "/run/checkpoints/.7.1.tmp", "checkpoints/.7.0.tmp", "/run/checkpoints/../.7.0.tmp",
                                    "/run/x\0/checkpoints/.7.0.tmp", "/run/checkpoints/.7.0.tmp/deeper"])
def test_the_coordinators_part_of_a_checkpoint_goes_nowhere_else(folder: str) -> None:
    play = make_play()
    begin(play)
    [refused] = only(play.tell(TRAINER, CheckpointRequest(0, folder)), Refused)
    assert "checkpoints/.7.0.tmp" in refused.reason and play.core.checkpoint is None


def test_a_leader_does_not_say_into_how_many_shares_batches_are_divided() -> None:
    play = make_play()
    granted = begin(play)
    play.tell(b"leader", Register(Role.trainer_shard, "node", 4))
    play.tell(b"leader", BatchRequest(0, 4000, 4096))
    for lease in granted[:2]:
        play.tell(ROLLOUT, GroupFinished(good(lease)))
    [batch] = only(play.tell(TRAINER, BatchRequest(0)), Batch)
    assert batch.num_shares == 1 and len(batch.groups) == 2


@pytest.mark.parametrize("metrics", [{"heldout_loss": 1.0}, {"heldout_loss": 1.0, "heldout_tokens": float("nan")},
                                     {"heldout_loss": float("inf"), "heldout_tokens": 3.0}])
def test_a_heldout_loss_that_is_no_number_is_refused(metrics: dict[str, float]) -> None:
    play = make_play(run__kind="supervised")
    core: Coordinator = play.core
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    assert only(play.tell(TRAINER, StepFinished(Announcement(Version(7, 0), "", "digest"), metrics)), Refused)
    assert core.training.announcement is None


def decoded(message: Message) -> Message:
    return from_workers(1 << 24).decode(encode(message))


@pytest.mark.parametrize("message", [
    Register(Role.rollout, "node", 1, serves="tcp://elsewhere.example:80"), Register(Role.rollout, "node", 1, serves="ipc:///tmp/socket"),
    Register(Role.rollout, "node\nlies", 1), Register(Role.rollout, "node", 1, job="1;reboot"), Register(Role.rollout, "node", 2**63),
    Heartbeat(status=WorkerStatus(idle_s=float("nan"))), Heartbeat(status=WorkerStatus(reward_busy_s=float("inf"))),
    Heartbeat(status=WorkerStatus(waiting_for="x" * 10_001)), Heartbeat(update_ranks=2**40), Heartbeat(held=Version(0, 2**31)),
    Heartbeat(tokens_in_flight=2**60), Heartbeat(kv_tokens=2**60),
    SourcesRequest(Version(1, 1), ["tcp://1.2.3.4:5"] * 1001), TransportFailed(Version(1, 1), "pigeon", ""),
    BatchRequest(0, 0, 2**40), StepFinished(Announcement(Version(1, 0), "", "d"), {str(key): 0.0 for key in range(1001)}),
    GroupRejected("g0", 0, 1, 0, float("nan")), GroupRejected("g0", 0, 2**62, 0, 0.5), GroupFailed("g٣", 0, "other digits"),
    GroupFailed("g007", 0, "another name of g7"), GroupFailed("g0\n", 0, ""), GroupFailed("g" + "9" * 5000, 0, "")])
def test_messages_of_impossible_numbers_and_names_are_malformed(message: Message) -> None:
    with pytest.raises(MessageError):
        decoded(message)


def test_a_lease_is_for_what_its_name_says() -> None:
    with pytest.raises(ValueError, match="not for training"):
        hold_as = HeldLease("e0.1", 1, Purpose.training, Version(1, 0))
        raise AssertionError(hold_as)
    frames = encode(Heartbeat(leases=[hold("g0", 1)]))
    frames[0] = bytes(frames[0]).replace(b"g0", b"e0")
    with pytest.raises(MessageError):
        from_workers(1 << 20).decode(frames)


def test_lists_of_a_million_are_malformed() -> None:
    with pytest.raises(MessageError):
        decoded(Heartbeat(leases=[hold("g0", 1)] * 100_001))
