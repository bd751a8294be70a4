"""The coordinator's decisions, message by message: no sockets, and time is an argument."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from tests.support.groups import make_group, make_partial
from tests.support.ticking import pass_time
from workers.config import Bound, ClusterKind, Config, Control
from workers.coordinator.core import DRAIN_S, Coordinator
from workers.coordinator.groups.heldout_evaluation import EvaluationResult
from workers.coordinator.groups.ledger import LOST_AFTER_S
from workers.coordinator.groups.results import MAX_HOPELESS
from workers.coordinator.monitoring.reporting import status, summary
from workers.coordinator.monitoring.waiting_reasons import waiting
from workers.coordinator.reconciliation import RETURN_S
from workers.coordinator.registered_worker import SUSPECT_AFTER
from workers.coordinator.snapshot import Snapshot, decode
from workers.coordinator.training.step_records import StepRecord
from workers.coordinator.worker_registry import LONGEST_FETCH
from workers.data.prompt import Prompt
from workers.messages.codec import MessageError
from workers.messages.from_coordinator import (
    Acknowledged,
    Batch,
    Drain,
    Finish,
    HeartbeatReply,
    Leases,
    Refused,
    VersionAnnounced,
    VersionsNeeded,
    Welcome,
)
from workers.messages.from_worker import (
    BatchRequest,
    CheckpointRequest,
    Draining,
    Goodbye,
    GroupFailed,
    GroupFinished,
    GroupParked,
    Heartbeat,
    Register,
    StepFinished,
    WorkerFailed,
)
from workers.messages.parts import Announcement, HeldLease, Lease, Purpose, Role, Version, WorkerStatus

ROLLOUT, TRAINER, LEADER = b"rollout", b"trainer", b"leader"


class Prompts:
    def train(self, index: int) -> Prompt:
        return Prompt(f"t{index}", f"question {index}", "numeric", "1")

    def heldout(self) -> list[Prompt]:
        return [Prompt(f"h{index}", "question", "numeric", "1") for index in range(3)]


class Play:
    """A coordinator with one rollout worker and a trainer, driven by hand."""

    def __init__(self, epoch: int = 7, snapshot: Snapshot | None = None, **changes) -> None:
        config = Config()
        config.trainer.batch_groups, config.staleness.eta, config.run.num_steps = 2, 1, 2
        config.workflow.group_size, config.trainer.num_minibatches = 2, 1
        for key, value in changes.items():
            part, name = key.split("__")
            setattr(getattr(config, part), name, value)
        self.core, self.now = Coordinator(config, Prompts(), epoch, 0.0, snapshot), 0.0

    def tell(self, peer: bytes, message) -> list:
        self.now += 0.1
        self.core.handle(peer, message, self.now)
        return self.sent()

    def sent(self) -> list:
        sent, self.core.outbox = [message for _, message in self.core.outbox], []
        return sent

    def publish(self, step: int) -> list:
        return self.tell(TRAINER, StepFinished(Announcement(Version(self.core.epoch, step), "/weights", "digest"), {"loss": 0.5}))

    def beat(self, step: int = 0, *, peer: bytes = ROLLOUT, capacity: int = 100, held: list | None = None) -> list:
        """A heartbeat with the weights of `step`; of all the leases that the worker is thought to have, or of `held`."""
        running = [(group_id, lease.attempt) for table in (self.core.ledger.running, self.core.evaluation.running)
                   for group_id, lease in table.of(peer).items()]
        return self.tell(peer, Heartbeat(held=Version(self.core.epoch, step), capacity=capacity, leases_seen=1000,
                                         leases=[hold(*key) for key in (running if held is None else held)]))

    def begin(self, capacity: int = 100, step: int = 0) -> list:
        """Register both, publish the first weights, load them; returns the leases."""
        self.tell(ROLLOUT, Register(Role.rollout, "node", 1))
        self.tell(TRAINER, Register(Role.trainer, "node", 2))
        self.publish(step)
        return leases(self.beat(step, capacity=capacity))

    @property
    def folder(self) -> str:
        return f"/run/checkpoints/.{self.core.epoch}.{self.core.training.step}.tmp"

    def save(self, final: bool = False) -> Snapshot:
        """The trainer saves its step; returns what the next incarnation begins with."""
        assert not only(self.tell(TRAINER, CheckpointRequest(self.core.training.step, self.folder, final)), Refused)
        assert self.core.checkpoint is not None
        self.core.checkpoint = None
        return decode(self.core.snapshot(1.0, {}).encode())

    def finish(self, lease, step: int = 0) -> list:
        group = make_group(lease.group_id, lease.attempt, [step], rewards=[1.0], purpose=lease.purpose)
        return self.tell(ROLLOUT, GroupFinished(group))


def hold(group_id: str, attempt: int, version: Version | None = None) -> HeldLease:
    return HeldLease(group_id, attempt, Purpose.evaluation if group_id[0] == "e" else Purpose.training, version or Version(7, 0))


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
    assert only(play.core.training.records, EvaluationResult)[0].accuracy == 1.0
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
    steps = only(play.core.training.records, StepRecord)
    assert [record.step for record in steps] == [1, 2] and steps[1].ages.head_ages == [1, 1]
    assert [record.consumed for record in steps] == [[0, 1], [2, 3]]
    assert play.core.totals.tokens_trained == sum(int(group.loss_mask.sum()) for group in [*batch[0].groups, *second.groups])
    assert play.core.totals.max_staleness == 1 and play.core.totals.share_stale == 0.5
    result = summary(play.core, [{"step": 0, "accuracy": 0.1}, {"step": 2, "accuracy": 0.9}], 12.0)
    assert (result["heldout_before"], result["heldout_after"], result["num_steps"], result["state"]) == (0.1, 0.9, 2, "finished")
    assert result["num_incarnations"] == 7


def test_no_leases_before_weights_are_held() -> None:
    play = Play()
    play.tell(ROLLOUT, Register(Role.rollout, "node", 1))
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    assert leases(play.tell(ROLLOUT, Heartbeat(capacity=100))) == []
    assert leases(play.publish(0)) == [], "announced is not loaded"
    assert leases(play.tell(ROLLOUT, Heartbeat(held=None, fetching=Version(7, 0), capacity=100))) == []
    assert leases(play.tell(ROLLOUT, Heartbeat(held=Version(7, 0), capacity=100))) != []


def test_capacity_is_a_limit_and_concurrency_too() -> None:
    assert len(Play().begin(capacity=0)) == 0
    assert len(Play().begin(capacity=4)) == 3, "three evaluation prompts of one sample; one sample more is no room for a group of two"
    assert len(Play().begin(capacity=5)) == 3 + 1
    assert len(Play(rollout__concurrency=1).begin()) == 3 + 1


def test_what_a_worker_has_leased_counts_against_its_capacity() -> None:
    play = Play()
    granted = play.begin(capacity=5)
    assert leases(play.beat(capacity=5)) == [], "it is full, however often it says so"
    assert [lease.group_id for lease in leases(play.finish(granted[0]))] == [], "one sample is no room for a group"
    assert [lease.group_id for lease in leases(play.finish(granted[1]))] == ["g1"]


def test_who_has_most_room_gets_the_lease() -> None:
    play = Play()
    play.begin(capacity=4)
    play.tell(b"second", Register(Role.rollout, "other", 3))
    assert [peer for peer, message in sending(play, b"second", 3) if isinstance(message, Leases)] == [b"second"]


def sending(play: Play, peer: bytes, capacity: int) -> list:
    play.core.handle(peer, Heartbeat(held=Version(7, 0), capacity=capacity), 1.0)
    return play.core.outbox


def test_unknown_peers_are_told_to_register() -> None:
    play = Play()
    [reply] = play.tell(b"stranger", Heartbeat())
    assert isinstance(reply, HeartbeatReply) and not reply.known


def test_registering_twice_is_harmless_and_a_second_trainer_is_refused() -> None:
    play = Play()
    [first] = play.tell(ROLLOUT, Register(Role.rollout, "node", 1))
    [again] = play.tell(ROLLOUT, Register(Role.rollout, "node", 1))
    assert first == again == Welcome(7, None)
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
        waiting += leases(play.tell(ROLLOUT, GroupFailed(lease.group_id, lease.attempt, "the verifier is broken")))
    assert "the verifier is broken" in (play.core.ended or "")


def test_a_verifier_that_has_never_given_a_score_ends_the_run_at_once() -> None:
    def failures_until_the_end(finished_first: bool) -> int:
        play = Play()
        granted = play.begin()
        if finished_first:
            play.finish(granted.pop())
        for number in range(1, 200):
            lease = granted.pop()
            granted += leases(play.tell(ROLLOUT, GroupFailed(lease.group_id, lease.attempt, "KeyError: 'x'\n  mine.py, line 3", hopeless=True)))
            if play.core.ended is not None:
                assert play.core.ended == f"{number} groups in a row have failed; the last one because: KeyError: 'x'\n  mine.py, line 3"
                return number
        return 200

    assert failures_until_the_end(False) == MAX_HOPELESS
    assert failures_until_the_end(True) > MAX_HOPELESS, "what has judged once is not hopeless: one node may lack something"


def test_verifiers_that_hang_are_said_to_be_waited_for() -> None:
    play = Play()
    play.begin()
    play.tell(TRAINER, BatchRequest(0))
    assert "reward.timeout_s" not in str(waiting(play.core))
    play.tell(ROLLOUT, Heartbeat(status=WorkerStatus(rewards_late=3)))
    assert "verifiers have given no answer within reward.timeout_s=10" in waiting(play.core)["trainer"]


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
    pass_time(play.core, 2.0)
    assert play.core.ended is None, "it may still come back"
    pass_time(play.core, 7.0)
    assert words in (play.core.ended or "") and "process" in (play.core.ended or "")


def test_a_worker_that_comes_back_in_time_is_not_lost() -> None:
    play = Play()
    play.begin()
    play.core.registry.unreachable(ROLLOUT, 1.0)
    play.tell(ROLLOUT, Heartbeat(held=Version(7, 0)))
    pass_time(play.core, 20.0)
    assert play.core.ended is None


def test_a_coordinator_that_was_suspended_itself_gives_up_nobody_for_that() -> None:
    play = Play(cluster__kind=ClusterKind.slurm, run__stall_minutes=1.0)
    play.begin()
    pass_time(play.core, 5.0)
    play.core.registry.unreachable(ROLLOUT, 5.0)
    play.core.tick(500.0)  # SLURM has suspended its job meanwhile: nothing that was sent has been read yet
    assert set(play.core.registry.workers) == {ROLLOUT, TRAINER} and play.core.ended is None and play.core.left is None
    pass_time(play.core, 500.0 + play.core.config.transport.heartbeat_timeout_s)
    assert not play.core.registry.workers, "who stays silent while it looks is lost as ever"


def test_silence_is_noticed() -> None:
    play = Play()
    play.begin()
    play.tell(TRAINER, Heartbeat())
    pass_time(play.core, 200.0)
    assert "silent" in (play.core.ended or "")


def test_a_lost_workers_leases_go_to_another() -> None:
    play = Play()
    granted = play.begin()
    play.tell(b"second", Register(Role.rollout, "other", 3))
    play.tell(b"second", Heartbeat(held=Version(7, 0)))
    play.tell(ROLLOUT, WorkerFailed("engine was killed"))
    assert play.core.ended is None, "one worker is left"
    again = leases(play.beat(peer=b"second"))
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
    assert only(play.publish(2), Refused) and play.core.training.step == 0
    assert only(play.tell(ROLLOUT, StepFinished(Announcement(Version(7, 1), "/w", "d"), {})), Refused)
    assert only(play.tell(TRAINER, BatchRequest(5)), Refused)
    assert only(play.tell(TRAINER, Finish("")), Refused) or play.core.ended is None


def test_nothing_moves_ends_the_run_and_names_what_waits() -> None:
    play = Play(run__stall_minutes=50 / 60)
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    play.publish(0)
    for now in range(10, 70, 10):
        play.core.handle(TRAINER, Heartbeat(), float(now))
        pass_time(play.core, float(now))
    assert "nothing has moved" in (play.core.ended or "") and "a rollout worker to start" in (play.core.ended or "")


def test_the_target_accuracy_ends_the_run_early() -> None:
    play = Play(run__target_accuracy=0.5, evaluation__every_steps=1, run__num_steps=50)
    for lease in play.begin():
        play.finish(lease)
    assert play.core.ended == "" and "target_accuracy" in play.core.training.early_reason


def test_old_versions_are_needed_while_someone_fetches_them() -> None:
    play = Play()
    play.begin()
    play.tell(b"late", Register(Role.rollout, "node", 3))
    play.tell(b"late", Heartbeat(held=None, fetching=Version(7, 0)))
    assert only(play.publish(1), VersionsNeeded) == [VersionsNeeded(Version(7, 0))]
    play.tell(b"late", Heartbeat(held=Version(7, 0)))
    assert only(play.publish(2), VersionsNeeded) == [VersionsNeeded(Version(7, 2))]


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
    assert dataclasses.is_dataclass(play.core.training.records[0])


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
    pass_time(play.core, 10_000.0)
    assert play.core.ended == "" and not play.core.registry.workers


def test_a_batch_is_in_the_order_of_its_prompts_whoever_finished_first() -> None:
    play = Play()
    granted = play.begin()
    for lease in [*granted[:3], granted[4], granted[3]]:
        play.finish(lease)
    [batch] = only(play.tell(TRAINER, BatchRequest(0)), Batch)
    assert [group.group_id for group in batch.groups] == ["g0", "g1"]


# -- the next batch, and shares of batches ---------------------------------------------------------------------------------

def all_finished(**changes) -> Play:
    """A run at step 0 whose workers have finished all that they may begin: the groups of two batches."""
    play = Play(**changes)
    for lease in play.begin():
        play.finish(lease)
    return play


def ids(batch: Batch) -> list[str]:
    return [group.group_id for group in batch.groups]


def test_the_next_batch_comes_while_this_one_is_computed() -> None:
    play = all_finished(run__num_steps=9)
    assert only(play.tell(TRAINER, BatchRequest(1)), Refused), "one after the other"
    [batch] = only(play.tell(TRAINER, BatchRequest(0)), Batch)
    assert waiting(play.core)["trainer"] == ""
    [following] = only(play.tell(TRAINER, BatchRequest(1)), Batch)
    assert (batch.step, ids(batch), following.step, ids(following)) == (0, ["g0", "g1"], 1, ["g2", "g3"])
    assert only(play.tell(TRAINER, BatchRequest(1)), Batch) == [following] and only(play.tell(TRAINER, BatchRequest(0)), Batch) == [batch]
    assert only(play.tell(TRAINER, BatchRequest(2)), Refused) and play.core.ledger.num_consumed == 0
    granted = leases(play.publish(1))
    assert [lease.group_id for lease in granted] == ["g4", "g5"] and play.core.totals.head_ages == {0: 2}
    assert only(play.tell(TRAINER, BatchRequest(2)), Batch) == [] and waiting(play.core)["trainer"] == "", "it computes step 1"
    play.publish(2)
    assert waiting(play.core)["trainer"] == "a batch: 0 of 2 groups finished"
    play.finish(granted[0], 1)
    [third] = only(play.finish(granted[1], 1), Batch)
    assert ids(third) == ["g4", "g5"] and third.step == 2
    assert [record.ages.head_ages for record in only(play.core.training.records, StepRecord)] == [[0, 0], [1, 1]]


def test_with_eta_zero_there_is_no_next_batch_before_its_version() -> None:
    play = all_finished(staleness__eta=0, run__num_steps=9)
    assert only(play.tell(TRAINER, BatchRequest(0)), Batch)
    assert only(play.tell(TRAINER, BatchRequest(1)), Batch) == []
    granted = leases(play.publish(1))
    assert len(granted) == 2 and play.finish(granted[0], 1)
    [batch] = only(play.finish(granted[1], 1), Batch)
    assert batch.step == 1


@pytest.mark.parametrize("bound", Bound)
def test_the_next_batch_waits_for_stragglers_by_the_step_that_consumes_it(bound: Bound) -> None:
    """g4 and g5, of step 0, must be in batch 2 with eta=2: while batch 1 is computed, it may not be made up of the later g6 and g7."""
    play = Play(staleness__eta=2, staleness__bound=bound, run__num_steps=9)
    granted = play.begin()
    for lease in granted[:7]:
        play.finish(lease)
    play.tell(TRAINER, BatchRequest(0))
    later = leases(play.publish(1))
    assert ids(only(play.tell(TRAINER, BatchRequest(1)), Batch)[0]) == ["g2", "g3"]
    play.tell(TRAINER, BatchRequest(2))
    sent = [message for lease in later for message in only(play.finish(lease, 1), Batch)]
    if bound is Bound.admission:
        assert [ids(batch) for batch in sent] == [["g6", "g7"]]
        return
    assert sent == []
    sent = [message for lease in granted[7:] for message in only(play.finish(lease), Batch)]
    assert [ids(batch) for batch in sent] == [["g4", "g5"]]


def test_a_checkpoint_holds_the_batch_that_the_trainer_has_already_as_not_trained_on() -> None:
    play = all_finished(run__num_steps=9)
    play.tell(TRAINER, BatchRequest(0))
    [following] = only(play.tell(TRAINER, BatchRequest(1)), Batch)
    play.publish(1)
    snapshot = play.save()
    assert [entry.group.group_id for entry in snapshot.ledger.finished] == ["g2", "g3"]
    assert (snapshot.ledger.num_consumed, snapshot.totals.num_steps, snapshot.totals.head_ages) == (2, 1, {0: 2})
    play.publish(2)
    assert play.core.ledger.num_consumed == 4, "and training goes on with it"
    after = Play(epoch=8, snapshot=snapshot, run__num_steps=9)
    after.tell(TRAINER, Register(Role.trainer, "node", 2))
    after.publish(1)
    register(after, [])
    after.beat(1)
    [again] = only(after.tell(TRAINER, BatchRequest(1)), Batch)
    assert ids(again) == ids(following) and again.minibatches == following.minibatches


def test_no_batch_is_formed_for_a_step_after_the_last() -> None:
    play = all_finished(run__num_steps=1)
    assert only(play.tell(TRAINER, BatchRequest(0)), Batch) and only(play.tell(TRAINER, BatchRequest(1)), Batch) == []
    assert len(play.core.ledger.finished) == 2
    for lease in leases(play.publish(1)):
        play.finish(lease, 1)
    assert play.core.ended == ""


def test_what_the_trainer_has_already_is_trained_on_when_the_target_is_reached() -> None:
    play = all_finished(run__num_steps=9, evaluation__every_steps=1)
    play.tell(TRAINER, BatchRequest(0))
    play.core.config.run.target_accuracy = 0.5
    evaluated = [lease for lease in leases(play.publish(1)) if lease.purpose is Purpose.evaluation]
    play.tell(TRAINER, BatchRequest(1))
    play.tell(TRAINER, BatchRequest(2))
    for lease in evaluated:
        play.finish(lease, 1)
    assert "target_accuracy" in play.core.training.early_reason and play.core.ended is None
    sent = play.publish(2)
    assert only(sent, Batch) == [] and len(leases(sent)) == 3 and play.core.evaluation.step == 2
    for lease in leases(sent):
        play.finish(lease, 2)
    assert play.core.ended == "" and play.core.totals.num_steps == 2


def test_in_the_warm_up_one_batch_is_admitted_at_first() -> None:
    play = Play(staleness__warmup_steps=2, evaluation__enabled=False)
    granted = play.begin()
    assert len(granted) == 2, "(0 + 0 + 1) * 2, not (0 + 1 + 1) * 2"
    for lease in granted:
        play.finish(lease)
    assert waiting(play.core)["rollout"] == "the trainer: the staleness limit (eta=1, growing until step 2) is reached"


def test_the_lead_follows_what_the_trainer_measures() -> None:
    play = Play(staleness__control=Control.divergence, staleness__eta=3, run__num_steps=9, evaluation__enabled=False)
    granted = play.begin()
    assert len(granted) == 2, "nothing runs ahead of what has not been measured: (0 + 0 + 1) * 2"
    for lease in granted:
        play.finish(lease)
    for step, gap, then in ((1, 0.01, "widened: mean 0.01 of 0.1 nats at a mean age of 0 in step 1; it left 76% of the engines' room empty"),
                            (2, 0.5, "narrowed: mean 0.5 of 0.1 nats at a mean age of 1 in step 2")):
        play.tell(TRAINER, BatchRequest(step - 1))
        finished = StepFinished(Announcement(Version(7, step), "/weights", "digest"), {"gap_proximal_behavior": gap})
        granted = leases(play.tell(TRAINER, finished)) + leases(play.beat(step))
        assert play.core.lead.reason == then
        for lease in granted:
            granted += leases(play.finish(lease, step))
    assert play.core.lead.lead == 0
    assert "eta=3, " in waiting(play.core)["rollout"] and "allowed by divergence" in waiting(play.core)["rollout"]
    shown = status(play.core, play.now, 1.0, 1.0, 0, 0)
    assert (shown["lead"], shown["lead_reason"]) == (round(play.core.lead.lead, 3), play.core.lead.reason)
    again = Play(8, play.save(), staleness__control=Control.divergence, staleness__eta=3, run__num_steps=9, evaluation__enabled=False)
    assert again.core.lead.lead == play.core.lead.lead


def test_what_staleness_holds_back_is_seen_while_held_out_prompts_take_the_room() -> None:
    """Half of it would be for training."""
    play = Play(staleness__control=Control.divergence, staleness__eta=3, run__num_steps=9)
    granted = play.begin(capacity=4)
    for lease in granted:
        granted += leases(play.finish(lease))
    held_back = play.core.office.held_back
    assert play.core.ledger.admitted == 2 and not play.core.ledger.running and not play.core.evaluation.active
    for waits in (False, True):
        if waits:
            play.core.evaluation.start(1)
        play.beat(0, capacity=2)
        assert play.core.evaluation.has_work is waits
        held_back.restart(play.now)
        play.beat(0, capacity=2)
        assert held_back.mean(play.now) == 1


def test_every_leader_gets_its_share() -> None:
    play = all_finished(trainer__batch_groups=4, staleness__eta=0, trainer__num_minibatches=2)
    play.tell(LEADER, Register(Role.trainer_shard, "node", 3))
    assert only(play.tell(LEADER, BatchRequest(0, 1, 2)), Batch) == [], "only the trainer's asking has a batch formed"
    play.core.handle(TRAINER, BatchRequest(0, 0, 2), play.now)
    sent = {peer: message for peer, message in play.core.outbox if isinstance(message, Batch)}
    play.core.outbox.clear()
    assert list(sent) == [LEADER, TRAINER] and [sent[TRAINER].share, sent[LEADER].share] == [0, 1]
    assert sorted(ids(sent[TRAINER]) + ids(sent[LEADER])) == ["g0", "g1", "g2", "g3"]
    for share in sent.values():
        assert sorted(index for part in share.minibatches for index in part) == list(range(len(share.groups)))
    assert [sum(len(share.minibatches[number]) for share in sent.values()) for number in (0, 1)] == [2, 2]
    assert only(play.tell(LEADER, BatchRequest(0, 1, 2)), Batch) == [sent[LEADER]], "asked twice, it gets the same"
    assert only(play.tell(LEADER, BatchRequest(2, 1, 2)), Batch) == [], "its word may overtake the trainer's"


@pytest.mark.parametrize(("peer", "request_"), [
    (ROLLOUT, BatchRequest(0, 0, 2)), (ROLLOUT, BatchRequest(0, 1, 2)), (LEADER, BatchRequest(0, 0, 2)), (TRAINER, BatchRequest(0, 1, 2)),
    (LEADER, BatchRequest(0, 2, 2)), (LEADER, BatchRequest(0, 1, 3)), (LEADER, BatchRequest(3, 1, 2))])
def test_nobody_gets_a_share_that_is_not_theirs(peer: bytes, request_: BatchRequest) -> None:
    play = all_finished()
    play.tell(LEADER, Register(Role.trainer_shard, "node", 3))
    play.tell(TRAINER, BatchRequest(0, 0, 2))
    sent = play.tell(peer, request_)
    assert only(sent, Refused) and not only(sent, Batch)


def test_a_leader_may_only_ask_for_shares() -> None:
    play = Play()
    granted = play.begin()
    play.tell(LEADER, Register(Role.trainer_shard, "node", 3))
    for message in (GroupFinished(make_group(granted[-1].group_id, granted[-1].attempt, [0])), CheckpointRequest(0, "/folder"), Draining("enough"),
                    StepFinished(Announcement(Version(7, 1), "/w", "d"), {}), GroupFailed(granted[-1].group_id, granted[-1].attempt, "broken")):
        assert only(play.tell(LEADER, message), Refused)
    assert leases(play.tell(LEADER, Heartbeat(held=Version(7, 0), capacity=100))) == []
    assert play.core.training.step == 0 and granted[-1].group_id in play.core.ledger.running


@pytest.mark.parametrize("message", [WorkerFailed("no memory is left"), Goodbye(), None])
@pytest.mark.parametrize("kind", ClusterKind)
def test_without_one_of_its_leaders_training_cannot_go_on(message, kind: ClusterKind) -> None:
    play = Play(cluster__kind=kind)
    play.begin()
    play.tell(LEADER, Register(Role.trainer_shard, "node", 3))
    if message is None:
        play.core.registry.unreachable(LEADER, play.now)
        pass_time(play.core, play.now + 10)
    else:
        play.tell(LEADER, message)
    assert "trainer_shard 0" in (play.core.left if kind is ClusterKind.slurm else play.core.ended or "")
    assert (play.core.ended is None) is (kind is ClusterKind.slurm)


@pytest.mark.parametrize("kind", ClusterKind)
def test_a_leader_where_there_is_only_one_copy_ends_nothing(kind: ClusterKind) -> None:
    play = Play(cluster__kind=kind)
    play.begin()
    play.tell(TRAINER, BatchRequest(0))
    play.tell(LEADER, Register(Role.trainer_shard, "node", 3))
    play.tell(LEADER, WorkerFailed("what nobody asked"))
    assert play.core.left is None and play.core.ended is None


def test_a_reward_element_that_the_run_does_not_have_is_refused() -> None:
    play = Play()
    play.begin()
    answers = play.tell(b"element", Register(Role.reward, "node", 3, serves="tcp://10.0.0.1:5000"))
    assert only(answers, Refused)[0].reason == "reward.placement=node: this run has no reward elements"
    play.tell(b"element", WorkerFailed("what nobody asked"))
    assert play.core.ended is None


def test_a_leader_that_was_told_to_go_takes_nothing_with_it() -> None:
    play = Play()
    play.begin()
    play.tell(LEADER, Register(Role.trainer_shard, "node", 3))
    play.tell(LEADER, Goodbye("time limit"))
    assert play.core.left is None and play.core.ended is None and not play.core.registry.of(Role.trainer_shard)
    play.tell(TRAINER, Goodbye("time limit"))
    assert play.core.left is not None and play.core.left_in_order


# -- leases that are lost on their way -----------------------------------------------------------------------------------

def test_a_lease_that_never_arrived_is_given_again_after_a_while_and_not_after_some_hasty_heartbeats() -> None:
    play = Play()
    granted = play.begin()
    arrived = [(lease.group_id, lease.attempt) for lease in granted if lease.group_id not in ("g1", "e0.1")]
    assert [leases(play.beat(held=arrived)) for _ in range(5)] == [[]] * 5
    play.now += LOST_AFTER_S
    again = leases(play.beat(held=arrived))
    assert sorted(lease.group_id for lease in again) == ["e0.1", "g1"] and play.core.totals.num_retries == 2
    before = {lease.group_id: lease for lease in granted}
    assert all(lease.attempt > before[lease.group_id].attempt and lease.seed == before[lease.group_id].seed for lease in again), \
        "lost is no failure: it is sampled as it would have been"


def test_a_lease_that_is_heard_of_in_between_is_not_lost() -> None:
    play = Play()
    keys = [(lease.group_id, lease.attempt) for lease in play.begin()]
    for held in (keys[:-1], keys[:-1], keys, keys[:-1], keys[:-1]):
        assert leases(play.beat(held=held)) == []
        play.now += 0.6 * LOST_AFTER_S if held is keys else 0.4 * LOST_AFTER_S


def test_a_lease_that_may_still_be_on_its_way_is_not_lost_however_late_a_heartbeat_is_read() -> None:
    """A coordinator that stood still reads heartbeats that were sent before the worker could know of its leases."""
    play = Play()
    play.begin()
    for _ in range(5):
        play.now += 2 * LOST_AFTER_S
        assert leases(play.tell(ROLLOUT, Heartbeat(held=Version(7, 0), capacity=100, leases=[], leases_seen=0))) == []
    assert play.core.totals.num_retries == 0
    [reply] = only(play.beat(held=[]), HeartbeatReply)
    assert reply.leases_sent == 7, "by this the worker knows what should have come"
    play.now += LOST_AFTER_S
    assert len(leases(play.beat(held=[]))) == 7 and play.core.totals.num_retries == 7


def lost(play: Play) -> Lease:
    """The first training lease was taken for lost; nobody has room for it yet."""
    lease = next(lease for lease in play.begin() if lease.purpose is Purpose.training)
    keys = [(group_id, one.attempt) for table in (play.core.ledger.running, play.core.evaluation.running)
            for group_id, one in table.items() if group_id != lease.group_id]
    for _ in range(2):
        assert leases(play.beat(held=keys, capacity=0)) == []
        play.now += LOST_AFTER_S
    assert list(play.core.ledger.retry) == [0]
    return lease


def test_a_group_that_was_taken_for_lost_is_taken_when_it_comes_all_the_same() -> None:
    play = Play()
    lease = lost(play)
    assert play.finish(lease)[0].accepted and "g0" in play.core.ledger.finished and not play.core.ledger.retry
    assert not play.finish(lease)[0].accepted, "once"


def test_a_group_that_was_taken_for_lost_is_not_taken_once_another_has_its_lease_or_its_place() -> None:
    play = Play()
    lease = lost(play)
    [again] = leases(play.beat(capacity=100))
    assert again.group_id == "g0" and not play.finish(lease)[0].accepted and play.finish(again)[0].accepted
    play = Play()
    lease = lost(play)
    play.core.ledger.num_consumed += 10  # whatever has taken its place
    assert not play.finish(lease)[0].accepted and list(play.core.ledger.retry) == [0]


def test_what_was_never_leased_is_not_taken_for_what_was_lost() -> None:
    play = Play()
    lease = lost(play)
    for group_id, attempt in (("g0", lease.attempt + 1), ("g0", lease.attempt - 1), ("g99", lease.attempt)):
        assert not play.tell(ROLLOUT, GroupFinished(make_group(group_id, attempt, [0], rewards=[1.0])))[0].accepted
    assert list(play.core.ledger.retry) == [0] and "g0" not in play.core.ledger.running


def test_whoever_works_on_what_nobody_wants_is_told() -> None:
    play = Play()
    keys = [(lease.group_id, lease.attempt) for lease in play.begin()]
    sent = only(play.beat(held=[*keys, ("g0", 6999), ("e9.0", 1), ("g77", 1)]), Acknowledged)
    assert sent == [Acknowledged("g0", 6999, False), Acknowledged("e9.0", 1, False), Acknowledged("g77", 1, False)]


def test_a_missed_heartbeat_does_not_cost_another_worker_its_evaluation() -> None:
    play = Play()
    granted = play.begin(capacity=2)
    play.beat(held=[])  # says nothing of its two prompts, once
    play.tell(b"second", Register(Role.rollout, "other", 3))
    play.tell(b"second", Register(Role.rollout, "other", 3))
    assert all(play.core.evaluation.running.owner(lease.group_id, lease.attempt) == ROLLOUT for lease in granted)


# -- groups that are given back ------------------------------------------------------------------------------------------

def test_a_parked_group_goes_on_with_another_worker_from_where_it_was() -> None:
    play = Play()
    lease = play.begin(capacity=5)[-1]
    play.tell(ROLLOUT, Draining("time limit"))
    [answer] = play.tell(ROLLOUT, GroupParked(make_partial(lease.group_id, lease.attempt, [0], epoch=7)))
    assert answer == Acknowledged(lease.group_id, lease.attempt, True)
    assert play.tell(ROLLOUT, GroupParked(make_partial(lease.group_id, lease.attempt, [0], epoch=7))) == [
        Acknowledged(lease.group_id, lease.attempt, False)]
    play.tell(b"second", Register(Role.rollout, "other", 3))
    [again] = [found for found in leases(play.beat(peer=b"second")) if found.group_id == lease.group_id]
    assert again.partial is not None and again.partial.tokens.tolist() == [3] and again.attempt > lease.attempt and again.seed == lease.seed


def test_how_long_a_group_takes_is_measured_of_whole_ones() -> None:
    """With rollout.concurrency=auto: the rest of a parked one is quick, whatever the load."""
    play = Play(rollout__concurrency="auto")
    granted = [lease for lease in play.begin(capacity=7) if lease.purpose is Purpose.training]
    assert granted and set(play.core.concurrency._began) == {lease.group_id for lease in granted}
    play.tell(ROLLOUT, Draining("time limit"))
    for lease in granted:
        play.tell(ROLLOUT, GroupParked(make_partial(lease.group_id, lease.attempt, [0], epoch=7)))
    play.tell(b"second", Register(Role.rollout, "other", 3))
    again = [lease for lease in leases(play.beat(peer=b"second")) if lease.purpose is Purpose.training]
    assert {lease.group_id for lease in again} >= {lease.group_id for lease in granted}
    assert set(play.core.concurrency._began) == {lease.group_id for lease in again if lease.partial is None}


def test_a_parked_group_keeps_its_place_and_its_version() -> None:
    """What waits for it counts it: by the version of its oldest token, whoever goes on with it, and whenever."""
    play = Play(staleness__eta=4, run__num_steps=9)
    granted = play.begin()
    for lease in granted[:-1]:
        play.finish(lease)
    admitted = play.core.ledger.admitted
    play.tell(ROLLOUT, Draining("time limit"))
    play.tell(ROLLOUT, GroupParked(make_partial(granted[-1].group_id, granted[-1].attempt, [0], epoch=7)))
    assert play.core.ledger.admitted == admitted
    play.tell(TRAINER, BatchRequest(0))
    play.publish(1)
    play.tell(b"second", Register(Role.rollout, "other", 3))
    [first, *others] = leases(play.beat(1, peer=b"second"))
    assert first.group_id == granted[-1].group_id and first.version == Version(7, 0)
    assert [lease.version for lease in others] == [Version(7, 1)] * 2


def test_a_draining_worker_gets_no_more_leases() -> None:
    play = Play()
    granted = play.begin(capacity=3)
    play.tell(ROLLOUT, Draining("time limit"))
    for lease in granted:
        assert leases(play.finish(lease)) == []
    assert leases(play.beat(capacity=100)) == []
    assert status(play.core, play.now, 0.0, 1000.0, 0, 0)["workers"][0]["draining"] is True


# -- incarnations --------------------------------------------------------------------------------------------------------

def interrupted(final: bool = False, **changes) -> tuple[list[Lease], Snapshot]:
    """A run of 9 steps that was saved at step 1 in epoch 7, after its first evaluation; and what its worker holds."""
    play = Play(**{"run__num_steps": 9, **changes})
    granted = play.begin()
    for lease in granted[:5]:
        play.finish(lease)
    play.tell(TRAINER, BatchRequest(0))
    granted += leases(play.publish(1))
    held = [lease for lease in granted if lease.group_id in play.core.ledger.running]
    assert [lease.group_id for lease in held] == ["g2", "g3", "g4", "g5"]
    return held, play.save(final)


def register(play: Play, held: list[HeldLease], peer: bytes = ROLLOUT) -> list:
    return play.tell(peer, Register(Role.rollout, "node", 1, leases=held))


def test_a_worker_goes_on_with_its_leases_under_the_next_incarnation() -> None:
    held, snapshot = interrupted()
    play = Play(epoch=8, snapshot=snapshot, run__num_steps=9)
    sent = register(play, [hold(lease.group_id, lease.attempt, lease.version) for lease in held])
    assert sent == [Welcome(8, None)], "nothing is refused"
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    assert only(play.publish(2), Refused) and not only(play.publish(1), Refused), "the first weights are those that were restored"
    assert leases(play.beat(1)) == [], "all places are taken"
    for lease in held[:2]:
        assert play.finish(lease)[0].accepted
    [batch] = only(play.tell(TRAINER, BatchRequest(1)), Batch)
    assert [group.group_id for group in batch.groups] == ["g2", "g3"]


def test_leases_whose_worker_does_not_come_back_go_to_others() -> None:
    held, snapshot = interrupted()
    play = Play(epoch=8, snapshot=snapshot, run__num_steps=9)
    register(play, [], b"second")
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    play.publish(1)
    pass_time(play.core, RETURN_S)
    assert leases(play.beat(1, peer=b"second")) == [], "it may still come"
    pass_time(play.core, RETURN_S + 0.1)
    granted = leases(play.sent())
    assert sorted(lease.group_id for lease in granted) == ["g2", "g3", "g4", "g5"]
    assert {lease.group_id: lease.seed for lease in granted} == {lease.group_id: lease.seed for lease in held}
    assert min(lease.attempt for lease in granted) > max(lease.attempt for lease in held)


def test_what_a_worker_does_not_hold_any_more_goes_to_others_at_once() -> None:
    held, snapshot = interrupted()
    play = Play(epoch=8, snapshot=snapshot, run__num_steps=9)
    register(play, [hold(lease.group_id, lease.attempt, lease.version) for lease in held[1:]])
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    play.publish(1)
    assert [lease.group_id for lease in leases(play.beat(1))] == ["g2"]


@pytest.mark.parametrize("eta", [0, 1])
@pytest.mark.parametrize("bound", Bound)
def test_leases_of_a_lost_lineage_are_taken_over_as_far_as_there_is_room(eta: int, bound: Bound) -> None:
    """Also before the restored weights are published: their step is what counts."""
    play = Play(epoch=8, staleness__eta=eta, staleness__bound=bound)
    sent = register(play, [hold(f"g{index}", 7000, Version(7, 5)) for index in range(3, 9)])
    room = (eta + 1) * 2
    assert sent[1:] == [Acknowledged(f"g{index}", 7000, False) for index in range(3 + room, 9)]
    assert {lease.admitted_at for lease in play.core.ledger.running.values()} == {0}, "what is lost counts as the step that was restored"
    assert list(play.core.ledger.retry) == [0, 1, 2], "the prompts before are still to be trained on"


@pytest.mark.parametrize(("bound", "wanted"), [(Bound.hard, False), (Bound.admission, True)])
def test_a_lease_that_would_come_too_late_for_the_hard_bound_is_not_taken_over(bound: Bound, wanted: bool) -> None:
    """It is of a lost lineage and counts as begun at step 0; its worker comes back at step 3, when eta=1."""
    play = Play(epoch=8, staleness__bound=bound, run__num_steps=9, rollout__concurrency=2)
    granted = play.begin()
    for step in (1, 2, 3):
        while granted:
            granted += leases(play.finish(granted.pop(0), step - 1))
            if len(play.core.ledger.finished) == 2:
                break
        play.tell(TRAINER, BatchRequest(step - 1))
        granted += leases(play.publish(step))
    assert play.core.ledger.admitted == 8, "there are places"
    late = hold("g30", 7000, Version(7, 9))
    assert only(register(play, [late], b"late"), Acknowledged) == ([] if wanted else [Acknowledged("g30", 7000, False)])


@pytest.mark.parametrize(("bound", "wanted"), [(Bound.hard, False), (Bound.admission, True)])
def test_batches_that_the_trainer_has_already_are_no_place_for_what_comes_back(bound: Bound, wanted: bool) -> None:
    """It counts as begun at step 0, and must be in batch 2 with eta=2; that is formed, though training is at step 1."""
    play = all_finished(epoch=8, staleness__eta=2, staleness__bound=bound, run__num_steps=9)
    play.core.concurrency.limit = 0
    play.tell(TRAINER, BatchRequest(0))
    play.publish(1)
    for step in (1, 2):
        assert only(play.tell(TRAINER, BatchRequest(step)), Batch)
    assert play.core.ledger.admitted == 6, "there are places"
    late = hold("g30", 7000, Version(7, 9))
    assert only(register(play, [late], b"late"), Acknowledged) == ([] if wanted else [Acknowledged("g30", 7000, False)])


def test_a_worker_that_was_thought_lost_keeps_its_version() -> None:
    """It comes back within the same incarnation: what it has sampled is as old as it is, and no older."""
    play = Play(staleness__eta=1, staleness__bound=Bound.hard, run__num_steps=9, cluster__kind=ClusterKind.slurm)
    granted = play.begin()
    for lease in granted[:5]:
        play.finish(lease)
    play.tell(TRAINER, BatchRequest(0))
    [lease, _] = leases(play.publish(1))
    assert lease.version == Version(7, 1)
    play.core.registry.remove(ROLLOUT)
    play.core.ledger.release(ROLLOUT)
    register(play, [hold(lease.group_id, lease.attempt, lease.version)])
    assert play.core.ledger.running[lease.group_id].admitted_at == 1


def test_an_incarnation_without_a_checkpoint_counts_all_that_was_sampled_before_as_its_beginning() -> None:
    play = Play(epoch=8)
    register(play, [hold("g0", 7000, Version(7, 3))])
    play.tell(ROLLOUT, GroupFinished(make_group("g0", 7000, [3, 4], epoch=7)))
    [entry] = play.core.ledger.finished.values()
    assert entry.group.steps.tolist() == [0, 0] and entry.admitted_at == 0


def test_steps_of_all_lost_lineages_stay_known() -> None:
    """Of epoch 7 up to step 1 was kept, of epoch 8 up to step 3: a token of 7.9 counts as 1 for ever."""
    _, first = interrupted()
    second = Play(epoch=8, snapshot=first, run__num_steps=9)
    second.tell(TRAINER, Register(Role.trainer, "node", 2))
    for step in (1, 2, 3):
        second.publish(step)
    third = Play(epoch=9, snapshot=second.save())
    assert [third.core.lineage.step_of(version) for version in (Version(7, 9), Version(7, 0), Version(8, 9), Version(8, 2), Version(9, 9))] == [
        1, 0, 3, 2, 9]


def test_evaluation_prompts_from_before_are_evaluated_anew_but_those_that_were_judged_are_not() -> None:
    play = Play()
    granted = play.begin()
    play.finish(granted[1])
    snapshot = play.save()
    after = Play(epoch=8, snapshot=snapshot)
    sent = register(after, [hold(lease.group_id, lease.attempt) for lease in granted])
    assert only(sent, Acknowledged) == [Acknowledged("e0.0", granted[0].attempt, False), Acknowledged("e0.1", granted[1].attempt, False),
                                        Acknowledged("e0.2", granted[2].attempt, False)]
    after.tell(TRAINER, Register(Role.trainer, "node", 2))
    after.publish(0)
    again = [lease for lease in leases(after.beat()) if lease.purpose is Purpose.evaluation]
    assert [lease.group_id for lease in again] == ["e0.0", "e0.2"]
    assert {lease.attempt for lease in again}.isdisjoint({lease.attempt for lease in granted}), "an old answer names no new lease"
    for lease in again:
        after.finish(lease)
    [result] = only(after.core.training.records, EvaluationResult)
    assert result.num_prompts == 3 and result.accuracy == 1.0


# -- checkpoints and leaving ---------------------------------------------------------------------------------------------

def test_only_the_present_step_can_be_saved_and_only_by_the_trainer() -> None:
    play = Play()
    play.begin()
    assert only(play.tell(TRAINER, CheckpointRequest(1, "/folder")), Refused) and only(play.tell(ROLLOUT, CheckpointRequest(0, "/folder")), Refused)
    assert play.core.checkpoint is None
    play.save()


def test_a_batch_whose_step_is_given_up_goes_back_to_the_buffer() -> None:
    play = Play()
    for lease in play.begin():
        play.finish(lease)
    [batch] = only(play.tell(TRAINER, BatchRequest(0)), Batch)
    [following] = only(play.tell(TRAINER, BatchRequest(1)), Batch)
    snapshot = play.save(final=True)
    assert play.core.totals.head_ages == {} and snapshot.totals.head_ages == {} and snapshot.ledger.num_consumed == 0
    assert play.core.training.in_training == [] and len(play.core.ledger.finished) == 4
    after = Play(epoch=8, snapshot=snapshot)
    after.tell(TRAINER, Register(Role.trainer, "node", 2))
    after.publish(0)
    register(after, [])
    after.beat()
    for step, given_up in enumerate([batch, following]):
        [again] = only(after.tell(TRAINER, BatchRequest(step)), Batch)
        assert [group.group_id for group in again.groups] == [group.group_id for group in given_up.groups]
        assert again.minibatches == given_up.minibatches


def test_results_that_come_after_the_last_checkpoint_are_left_to_the_next_incarnation() -> None:
    """They are in no checkpoint: whoever acknowledged them would lose them."""
    play = Play(run__num_steps=9)
    granted = play.begin(capacity=9)
    assert len(granted) == 6, "a fourth group could be leased"
    play.save(final=True)
    assert play.finish(granted[-1]) == [] and play.tell(ROLLOUT, GroupParked(make_partial(granted[-2].group_id, granted[-2].attempt))) == []
    assert play.tell(ROLLOUT, GroupFailed(granted[-3].group_id, granted[-3].attempt, "engine gone")) == []
    assert not leases(play.beat(capacity=1000)), "and nothing more is leased"
    assert not only(play.beat(), Acknowledged), "nor is anyone told to give up what it holds"


def test_a_checkpoint_on_the_way_stops_nothing() -> None:
    play = Play()
    granted = play.begin(capacity=3)
    play.save()
    assert play.finish(granted[-1])[0].accepted and len(leases(play.beat(capacity=3))) == 0 and len(leases(play.beat(capacity=9))) == 3


def slurm(**changes) -> Play:
    return Play(cluster__kind=ClusterKind.slurm, **changes)


@pytest.mark.parametrize("message", [WorkerFailed("no memory is left"), Goodbye("time limit")])
def test_on_slurm_a_trainer_that_goes_takes_only_the_incarnation_with_it(message) -> None:
    play = slurm()
    assert len(play.begin(capacity=9)) == 6
    play.tell(TRAINER, message)
    assert play.core.ended is None and (play.core.left or "").endswith(("no memory is left", "time limit"))
    assert leases(play.beat(capacity=1000)) == []


def test_on_slurm_workers_come_and_go() -> None:
    play = slurm()
    granted = play.begin()
    play.core.registry.unreachable(ROLLOUT, 1.0)
    pass_time(play.core, 7.0)
    assert play.core.ended is None and not play.core.registry.of(Role.rollout)
    play.tell(b"second", Register(Role.rollout, "other", 3))
    assert len(leases(play.beat(peer=b"second"))) == len(granted)


def test_on_slurm_workers_that_all_fail_end_the_run() -> None:
    play = slurm(cluster__max_consecutive_crashes=3)
    play.begin()
    for number in range(3):
        assert play.core.ended is None
        peer = b"%d" % number
        play.tell(peer, Register(Role.rollout, "other", 3))
        play.tell(peer, WorkerFailed("no such model"))
    assert play.core.ended is None, "three for each that lives"
    play.tell(ROLLOUT, WorkerFailed("no such model"))
    assert "no such model" in (play.core.ended or "") and "4 rollout workers in a row" in (play.core.ended or "")


def test_failures_of_workers_are_forgotten_when_the_run_gets_on() -> None:
    play = slurm(cluster__max_consecutive_crashes=1)
    granted = play.begin()
    for number in range(5):
        peer = b"%d" % number
        play.tell(peer, Register(Role.rollout, "other", 3))
        play.tell(peer, WorkerFailed("out of memory"))
        assert play.finish(granted[number])[0].accepted
    assert play.core.ended is None


def test_waiting_for_workers_in_the_queue_is_no_stall() -> None:
    for expected in (True, False):
        play = slurm(run__stall_minutes=50 / 60)
        play.tell(TRAINER, Register(Role.trainer, "node", 2))
        play.publish(0)
        play.core.expected = {Role.rollout} if expected else set()
        for now in range(10, 200, 10):
            play.core.handle(TRAINER, Heartbeat(), float(now))
            pass_time(play.core, float(now))
        assert (play.core.ended is None) is expected


# -- pausing the whole run -----------------------------------------------------------------------------------------------

def drained(play: Play) -> bool:
    """Whether the trainer has just been told to save and leave."""
    told = any(peer == TRAINER and isinstance(message, Drain) for peer, message in play.core.outbox)
    play.core.outbox.clear()
    return told


def test_a_pause_waits_for_what_the_workers_give_back_then_the_trainer_saves() -> None:
    play = Play()
    granted = play.begin(capacity=9)
    assert len(granted) == 6
    play.core.drain("stopped by someone", play.now)
    assert [(peer, message) for peer, message in play.core.outbox if isinstance(message, Drain)] == [(ROLLOUT, Drain("stopped by someone"))]
    play.core.outbox.clear()
    assert play.finish(granted[-1])[0].accepted and play.core.checkpoint is None
    assert play.tell(ROLLOUT, GroupParked(make_partial(granted[-2].group_id, granted[-2].attempt)))[0].accepted
    assert not leases(play.beat(capacity=1000)), "nothing more is leased"
    play.core.handle(ROLLOUT, Goodbye("stopped by someone"), play.now)
    pass_time(play.core, play.now)
    assert drained(play), "the last worker has gone"
    assert play.core.ended is None
    snapshot = play.save(final=True)
    assert len(snapshot.ledger.finished) == len(snapshot.ledger.parked) == 1
    play.tell(TRAINER, Goodbye("drained"))
    assert play.core.left is not None and play.core.ended is None


def test_a_pause_has_patience_with_workers_but_not_for_ever() -> None:
    play = Play()
    play.begin()
    play.core.drain("stopped", 10.0)
    for now in (20.0, 10.0 + DRAIN_S):
        play.core.handle(ROLLOUT, Heartbeat(), now)
        play.core.handle(TRAINER, Heartbeat(), now)
        pass_time(play.core, now)
        assert not drained(play)
    pass_time(play.core, 10.1 + DRAIN_S)
    assert drained(play)
    pass_time(play.core, 10.2 + DRAIN_S)
    assert not drained(play), "once is enough"


def test_a_pause_without_workers_does_not_wait_for_any() -> None:
    play = Play()
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    play.publish(0)
    play.core.drain("stopped", play.now)
    pass_time(play.core, play.now)
    assert drained(play)


def test_whoever_registers_during_a_pause_is_told() -> None:
    play = Play()
    play.tell(ROLLOUT, Register(Role.rollout, "node", 1))
    play.core.drain("stopped", play.now)
    play.sent()
    assert only(play.tell(b"second", Register(Role.rollout, "other", 3)), Drain)
    for peer in (ROLLOUT, b"second"):
        play.tell(peer, Goodbye("stopped"))
    pass_time(play.core, play.now)
    assert only(play.tell(TRAINER, Register(Role.trainer, "node", 2)), Drain), "nobody was there to be told before"


def test_a_pause_is_asked_for_once_and_not_after_the_end() -> None:
    play = Play()
    play.begin()
    play.core.drain("first", play.now)
    play.core.drain("second", play.now)
    assert [message.reason for _, message in play.core.outbox if isinstance(message, Drain)] == ["first"]
    other = Play()
    other.begin()
    other.core.end("failed")
    other.core.drain("too late", other.now)
    assert not only(other.sent(), Drain)


# -- what workers left in the run folder ---------------------------------------------------------------------------------

def test_what_was_left_in_the_run_folder_is_taken_once() -> None:
    held, snapshot = interrupted()
    play = Play(epoch=8, snapshot=snapshot, run__num_steps=9)
    finished = GroupFinished(make_group(held[0].group_id, held[0].attempt, [0], epoch=7))
    parked = GroupParked(make_partial(held[1].group_id, held[1].attempt, [0], epoch=7))
    unknown = GroupParked(make_partial("g7", 7000, [3], epoch=7))
    consumed = GroupFinished(make_group("g0", 7000, [0], epoch=7))
    admitted = play.core.ledger.admitted
    for message in (finished, parked, unknown, consumed, finished, parked):
        play.core.reconciliation.absorb(message)
    ledger = play.core.ledger
    assert list(ledger.finished) == ["g2"] and list(ledger.parked) == ["g3"] and ledger.admitted == admitted, "there is no place for g7"
    assert set(ledger.running) == {"g4", "g5"}


def test_something_left_by_a_lost_lineage_is_taken_where_there_is_a_place() -> None:
    play = Play(epoch=8, staleness__eta=1)
    play.core.reconciliation.absorb(GroupParked(make_partial("g2", 7000, [3], epoch=7)))
    [parked] = play.core.ledger.parked.values()
    assert parked.admitted_at == 0 and parked.partial.steps.tolist() == [0] and list(play.core.ledger.retry) == [0, 1]


def test_something_malformed_is_not_taken() -> None:
    play = Play(epoch=8)
    group = make_group("g0", 7000)
    with pytest.raises(MessageError):
        play.core.reconciliation.absorb(GroupFinished(msgspec.structs.replace(group, run_lengths=group.run_lengths * 2)))
    partial = make_partial("g0", 7000)
    with pytest.raises(MessageError):
        play.core.reconciliation.absorb(GroupParked(msgspec.structs.replace(partial, finished=partial.finished[:1])))
    assert play.core.ledger.next_index == 0


def test_whose_results_cannot_be_taken_has_its_leases_taken_away_and_does_not_end_the_run() -> None:
    play = Play()
    granted = [lease for lease in play.begin() if lease.purpose is Purpose.training]
    assert len(granted) >= SUSPECT_AFTER
    play.tell(b"good", Register(Role.rollout, "node", 3))
    play.beat(peer=b"good")
    for number in range(40):
        running = [(group_id, lease.attempt) for group_id, lease in play.core.ledger.running.items() if lease.worker == ROLLOUT]
        name, attempt = running[0] if running else (granted[number % len(granted)].group_id, granted[number % len(granted)].attempt)
        group = make_group(name, attempt)
        play.tell(ROLLOUT, GroupFinished(msgspec.structs.replace(group, run_lengths=group.run_lengths * 2)))
    assert play.core.ended is None and all(lease.worker != ROLLOUT for lease in play.core.ledger.running.values())
    play.beat(peer=b"good")
    assert any(lease.worker == b"good" for lease in play.core.ledger.running.values()), "others get them"


def test_a_version_that_is_fetched_for_ever_is_not_kept_for_ever() -> None:
    play = Play()
    play.begin()
    play.tell(b"late", Register(Role.rollout, "node", 3))
    play.tell(b"late", Heartbeat(held=None, fetching=Version(7, 0)))
    needed = [only(play.publish(step), VersionsNeeded)[0].oldest for step in range(1, LONGEST_FETCH + 4)]
    assert needed == [Version(7, 0)] * LONGEST_FETCH + [Version(7, 1), Version(7, 2), Version(7, 3)]
