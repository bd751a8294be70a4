"""The coordinator's decisions, message by message: no sockets, and time is an argument."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from tests.unit.groups import make_group
from workers.config import Config
from workers.coordinator.core import Coordinator, StepRecord
from workers.coordinator.evaluation import Result
from workers.coordinator.reporting import status, summary
from workers.coordinator.waiting import waiting
from workers.data.prompts import Prompt
from workers.messages.types import (
    Acknowledged,
    Announcement,
    Batch,
    BatchRequest,
    Credit,
    Finish,
    Goodbye,
    GroupFailed,
    GroupFinished,
    Heartbeat,
    HeartbeatReply,
    Leases,
    Purpose,
    Refused,
    Register,
    Role,
    StepFinished,
    Version,
    VersionAnnounced,
    Welcome,
    WorkerFailed,
)

ROLLOUT, TRAINER = b"rollout", b"trainer"


class Prompts:
    def train(self, index: int) -> Prompt:
        return Prompt(f"t{index}", f"question {index}", "numeric", "1")

    def heldout(self) -> list[Prompt]:
        return [Prompt(f"h{index}", "question", "numeric", "1") for index in range(3)]


class Play:
    """A coordinator with one rollout worker and a trainer, driven by hand."""

    def __init__(self, **changes) -> None:
        config = Config()
        config.trainer.batch_groups, config.staleness.eta, config.run.num_steps = 2, 1, 2
        config.workflow.group_size, config.trainer.num_minibatches = 2, 1
        for key, value in changes.items():
            part, name = key.split("__")
            setattr(getattr(config, part), name, value)
        self.core, self.now = Coordinator(config, Prompts(), epoch=7, now=0.0), 0.0

    def tell(self, peer: bytes, message) -> list:
        self.now += 0.1
        self.core.handle(peer, message, self.now)
        return self.sent()

    def sent(self) -> list:
        sent, self.core.outbox = [message for _, message in self.core.outbox], []
        return sent

    def publish(self, step: int) -> list:
        return self.tell(TRAINER, StepFinished(Announcement(Version(7, step), "/weights", "digest"), {"loss": 0.5}, 4))

    def begin(self, credit: int = 100) -> list:
        """Register both, publish the starting weights, load them, give credit; returns the leases."""
        self.tell(ROLLOUT, Register(Role.rollout, "node", 1))
        self.tell(TRAINER, Register(Role.trainer, "node", 2))
        self.publish(0)
        self.tell(ROLLOUT, Heartbeat(held=Version(7, 0)))
        return leases(self.tell(ROLLOUT, Credit(credit)))

    def finish(self, lease, step: int = 0) -> list:
        group = make_group(lease.group_id, lease.attempt, [step], rewards=[1.0], purpose=lease.purpose)
        return self.tell(ROLLOUT, GroupFinished(group))


def leases(messages: list) -> list:
    return [lease for message in messages if isinstance(message, Leases) for lease in message.leases]


def only(messages: list, kind: type) -> list:
    return [message for message in messages if isinstance(message, kind)]


def test_a_whole_run() -> None:
    play = Play()
    granted = play.begin()
    assert [lease.purpose for lease in granted] == [Purpose.evaluation] * 3 + [Purpose.training] * 4, "evaluation first, then (0+1+1)*2 groups"
    assert only(play.tell(TRAINER, BatchRequest(0)), Batch) == []
    for lease in granted[3:]:
        assert only(play.finish(lease), Batch) == [], "the first batch waits for the first evaluation"
    batch = [found for lease in granted[:3] for found in only(play.finish(lease), Batch)]
    assert [group.group_id for group in batch[0].groups] == ["g0", "g1"]
    assert only(play.core.records, Result)[0].accuracy == 1.0
    sent = play.publish(1)
    assert only(sent, VersionAnnounced) and len(leases(sent)) == 2, "a new version admits B more groups"
    [second] = only(play.tell(TRAINER, BatchRequest(1)), Batch)
    assert [group.group_id for group in second.groups] == ["g2", "g3"]
    sent = play.publish(2)
    assert [lease.purpose for lease in leases(sent)] == [Purpose.evaluation] * 3, "after the last step only evaluation runs"
    assert play.core.ended is None
    for lease in leases(sent):
        play.finish(lease, step=2)
    assert play.core.ended == ""
    steps = only(play.core.records, StepRecord)
    assert [record.step for record in steps] == [1, 2] and steps[1].ages.head_ages == [1, 1]
    assert play.core.totals.max_staleness == 1 and play.core.totals.share_stale == 0.5
    result = summary(play.core, [{"step": 0, "accuracy": 0.1}, {"step": 2, "accuracy": 0.9}], 12.0, 99)
    assert (result["heldout_before"], result["heldout_after"], result["num_steps"], result["state"]) == (0.1, 0.9, 2, "finished")


def test_no_leases_before_weights_are_held() -> None:
    play = Play()
    play.tell(ROLLOUT, Register(Role.rollout, "node", 1))
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    assert leases(play.tell(ROLLOUT, Credit(100))) == []
    assert leases(play.publish(0)) == [], "announced is not loaded"
    assert leases(play.tell(ROLLOUT, Heartbeat(held=None, fetching=Version(7, 0)))) == []
    assert leases(play.tell(ROLLOUT, Heartbeat(held=Version(7, 0)))) != []


def test_credit_is_a_limit_and_concurrency_too() -> None:
    assert len(Play().begin(credit=4)) == 3, "three evaluation prompts of one sample; one credit does not hold a group of two"
    assert len(Play(rollout__concurrency=1).begin()) == 3 + 1


def test_unknown_peers_are_told_to_register() -> None:
    play = Play()
    [reply] = play.tell(b"stranger", Heartbeat())
    assert isinstance(reply, HeartbeatReply) and not reply.known


def test_registering_twice_is_harmless_and_a_second_trainer_is_refused() -> None:
    play = Play()
    [first] = play.tell(ROLLOUT, Register(Role.rollout, "node", 1))
    [again] = play.tell(ROLLOUT, Register(Role.rollout, "node", 1))
    assert first == again == Welcome(0, 7, None)
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    assert isinstance(play.tell(b"second", Register(Role.trainer, "node", 3))[0], Refused)
    assert isinstance(play.tell(b"old", Register(Role.rollout, "node", 4, protocol=99))[0], Refused)


def test_a_finished_group_counts_once() -> None:
    play = Play()
    lease = play.begin()[-1]
    assert play.finish(lease)[0] == Acknowledged(lease.group_id, lease.attempt, True)
    assert play.finish(lease)[0] == Acknowledged(lease.group_id, lease.attempt, False)
    assert len(play.core.ledger.finished) == 1 and play.core.totals.num_duplicates == 1


def test_a_failed_group_is_tried_again_and_an_old_attempt_comes_too_late() -> None:
    play = Play()
    granted = play.begin()
    lease = granted[-1]
    [again] = leases(play.tell(ROLLOUT, GroupFailed(lease.group_id, lease.attempt, "engine gone")))
    assert again.prompt_id == lease.prompt_id and again.attempt == lease.attempt + 1 and again.seed != lease.seed
    assert not play.finish(lease)[0].accepted
    assert play.finish(again)[0].accepted


def test_a_fatal_failure_sets_the_group_aside_at_once() -> None:
    play = Play()
    lease = play.begin()[-1]
    [following] = leases(play.tell(ROLLOUT, GroupFailed(lease.group_id, lease.attempt, "prompt too long", fatal=True)))
    assert list(play.core.ledger.set_aside.values()) == ["prompt too long"]
    assert following.prompt_id != lease.prompt_id, "its place goes to the next prompt"


def test_a_run_in_which_nothing_succeeds_ends_and_says_why() -> None:
    play = Play()
    waiting = play.begin()
    for _ in range(200):
        if play.core.ended is not None:
            break
        lease = waiting.pop()
        sent = play.tell(ROLLOUT, GroupFailed(lease.group_id, lease.attempt, "the verifier is broken"))
        waiting += leases(sent) + leases(play.tell(ROLLOUT, Credit(2)))
    assert "the verifier is broken" in (play.core.ended or "")


def test_a_malformed_group_is_refused_and_tried_again() -> None:
    play = Play()
    lease = play.begin()[-1]
    group = msgspec.structs.replace(make_group(lease.group_id, lease.attempt), prompt_id="p")
    sent = play.tell(ROLLOUT, GroupFinished(msgspec.structs.replace(group, run_lengths=group.run_lengths * 2)))
    assert "version runs" in only(sent, Refused)[0].reason
    assert not play.core.ledger.finished and play.core.ledger.running[lease.group_id].attempt == lease.attempt + 1


@pytest.mark.parametrize(("peer", "words"), [(ROLLOUT, "min_replicas"), (TRAINER, "trainer 0")])
def test_a_lost_worker_ends_the_run_with_the_cause(peer: bytes, words: str) -> None:
    play = Play()
    play.begin()
    play.core.registry.unreachable(peer, 1.0)
    play.core.tick(2.0)
    assert play.core.ended is None, "it may still come back"
    play.core.tick(7.0)
    assert words in (play.core.ended or "") and "process" in (play.core.ended or "")


def test_a_worker_that_comes_back_in_time_is_not_lost() -> None:
    play = Play()
    play.begin()
    play.core.registry.unreachable(ROLLOUT, 1.0)
    play.tell(ROLLOUT, Heartbeat(held=Version(7, 0)))
    play.core.tick(20.0)
    assert play.core.ended is None


def test_silence_is_noticed() -> None:
    play = Play()
    play.begin()
    play.tell(TRAINER, Heartbeat())
    play.core.tick(200.0)
    assert "silent" in (play.core.ended or "")


def test_a_lost_workers_leases_go_to_another() -> None:
    play = Play()
    granted = play.begin()
    play.tell(b"second", Register(Role.rollout, "other", 3))
    play.tell(b"second", Heartbeat(held=Version(7, 0)))
    play.tell(ROLLOUT, WorkerFailed("engine was killed"))
    assert play.core.ended is None, "one worker is left"
    again = leases(play.tell(b"second", Credit(100)))
    assert sorted(lease.prompt_id for lease in again) == sorted(lease.prompt_id for lease in granted)


def test_failures_and_goodbyes_end_the_run_with_the_cause() -> None:
    play = Play()
    play.begin()
    play.tell(TRAINER, WorkerFailed("loss is not finite"))
    assert "loss is not finite" in (play.core.ended or "")
    other = Play()
    other.begin()
    other.tell(ROLLOUT, Goodbye())
    assert "left before the run was over" in (other.core.ended or "")


def test_versions_must_come_in_order_and_from_the_trainer() -> None:
    play = Play()
    play.begin()
    assert only(play.publish(2), Refused) and play.core.step == 0
    assert only(play.tell(ROLLOUT, StepFinished(Announcement(Version(7, 1), "/w", "d"), {}, 0)), Refused)
    assert only(play.tell(TRAINER, BatchRequest(5)), Refused)
    assert only(play.tell(TRAINER, Finish("")), Refused) or play.core.ended is None


def test_nothing_moves_ends_the_run_and_names_what_waits() -> None:
    play = Play(run__stall_timeout_s=50.0)
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    play.publish(0)
    for now in range(10, 70, 10):
        play.core.handle(TRAINER, Heartbeat(), float(now))
        play.core.tick(float(now))
    assert "nothing has moved" in (play.core.ended or "") and "a rollout worker to start" in (play.core.ended or "")


def test_the_target_accuracy_ends_the_run_early() -> None:
    play = Play(run__target_accuracy=0.5, evaluation__every_steps=1, run__num_steps=50)
    for lease in play.begin():
        play.finish(lease)
    assert play.core.ended == "" and "target_accuracy" in play.core.early_reason


def test_old_versions_are_needed_while_someone_fetches_them() -> None:
    play = Play()
    granted = play.begin()
    play.tell(b"late", Register(Role.rollout, "node", 3))
    play.tell(b"late", Heartbeat(held=None, fetching=Version(7, 0)))
    for lease in granted:
        play.finish(lease)
    play.tell(TRAINER, BatchRequest(0))
    play.publish(1)
    [batch] = only(play.tell(TRAINER, BatchRequest(1)), Batch)
    assert batch.needed == Version(7, 0)


def test_status_names_what_each_part_waits_for() -> None:
    play = Play()
    assert waiting(play.core) == {"rollout": "the starting weights", "trainer": "its start"}
    granted = play.begin()
    play.tell(TRAINER, BatchRequest(0))
    assert "first evaluation" in waiting(play.core)["trainer"]
    for lease in granted[:3]:
        play.finish(lease)
    assert waiting(play.core)["trainer"] == "a batch: 0 of 2 groups finished"
    shown = status(play.core, play.now, 0.0, 1000.0, 0, 0)
    assert [worker["name"] for worker in shown["workers"]] == ["rollout 0", "trainer 0"] and shown["running"] == 4
    assert msgspec.json.encode(shown)
    assert dataclasses.is_dataclass(play.core.records[0])


def complete(play: Play) -> None:
    """Play a run of two steps to its complete end."""
    for lease in play.begin():
        play.finish(lease)
    for step in (0, 1):
        play.tell(TRAINER, BatchRequest(step))
        for lease in leases(play.publish(step + 1)):
            play.finish(lease, step + 1)
    assert play.core.ended == ""


def test_a_complete_run_has_failed_if_its_model_cannot_be_exported() -> None:
    play = Play()
    complete(play)
    play.tell(TRAINER, WorkerFailed("no room for the final model"))
    assert "no room for the final model" in (play.core.ended or "")


def test_workers_that_leave_a_complete_run_do_not_spoil_it() -> None:
    play = Play()
    complete(play)
    play.tell(ROLLOUT, Goodbye())
    play.tell(TRAINER, Goodbye())
    play.core.tick(10_000.0)
    assert play.core.ended == "" and not play.core.registry.workers


def test_a_batch_is_in_the_order_of_its_prompts_whoever_finished_first() -> None:
    play = Play()
    granted = play.begin()
    for lease in [*granted[:3], granted[4], granted[3]]:
        play.finish(lease)
    [batch] = only(play.tell(TRAINER, BatchRequest(0)), Batch)
    assert [group.group_id for group in batch.groups] == ["g0", "g1"]
