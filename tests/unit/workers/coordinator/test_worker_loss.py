"""A worker at which groups fail, or that comes and goes: others get its leases, and the run goes on as long as there are others."""

from __future__ import annotations

import pytest

from tests.support.groups import make_group
from tests.support.ticking import pass_time
from tests.unit.workers.coordinator.test_core import ROLLOUT, TRAINER, Play
from workers.config import ClusterKind
from workers.coordinator.groups.heldout_evaluation import EvaluationResult
from workers.coordinator.monitoring.reporting import status
from workers.coordinator.monitoring.waiting_reasons import waiting
from workers.coordinator.registered_worker import SUSPECT_AFTER, Worker
from workers.coordinator.worker_loss import NUM_SAID
from workers.coordinator.worker_registry import TRIED_AGAIN_S
from workers.messages.from_coordinator import Leases
from workers.messages.from_worker import BatchRequest, Draining, Goodbye, GroupFailed, GroupFinished, Heartbeat, Register, WorkerFailed
from workers.messages.parts import Lease, Role, Version

GOOD, BAD = ROLLOUT, b"bad"


class Fleet(Play):
    """A good worker, and a bad one that fails everything at once; `given`: what each has been given and has not answered."""

    def __init__(self, capacity: int = 8, begun: tuple[bytes, ...] = (GOOD, BAD), **changes) -> None:
        super().__init__(**{"evaluation__enabled": False, "staleness__eta": 4, "run__num_steps": 50, "trainer__batch_groups": 8, **changes})
        self.given: dict[bytes, list[Lease]] = {GOOD: [], BAD: []}
        self.tell(TRAINER, Register(Role.trainer, "node", 2))
        for peer in (GOOD, BAD):
            self.tell(peer, Register(Role.rollout, "node", 1))
        self.publish(0)
        for peer in begun:
            self.beat(peer=peer, capacity=capacity)

    def sent(self) -> list:
        for peer, message in self.core.outbox:
            if isinstance(message, Leases) and peer is not None:
                self.given[peer] += message.leases
        return super().sent()

    def fail(self, peer: bytes = BAD, cause: str = "container cannot start", **more) -> None:
        lease = self.given[peer].pop(0)
        self.tell(peer, GroupFailed(lease.group_id, lease.attempt, cause, **more))

    def finish_at(self, peer: bytes) -> None:
        lease = self.given[peer].pop(0)
        self.tell(peer, GroupFinished(make_group(lease.group_id, lease.attempt, [0], rewards=[1.0], purpose=lease.purpose)))

    @property
    def bad(self) -> Worker:
        return self.core.registry.workers[BAD]


@pytest.mark.parametrize("hopeless", [False, True])
@pytest.mark.parametrize("capacity", [2, 8, 64])
def test_one_broken_node_neither_ends_the_run_nor_costs_a_prompt(capacity: int, hopeless: bool) -> None:
    """It was given every lease as the emptiest, and every retry: 48 groups in a row had failed, and each prompt three times there."""
    play, num_failed = Fleet(capacity), 0
    for _ in range(40):
        while play.given[BAD]:
            play.fail(hopeless=hopeless)
            num_failed += 1
        if play.given[GOOD]:
            play.finish(play.given[GOOD].pop(0))
    ledger = play.core.ledger
    assert play.core.ended is None and not ledger.set_aside and len(ledger.finished) > 20
    assert num_failed < SUSPECT_AFTER + capacity
    notices = [notice for notice in play.core.take_notices() if "in a row have failed" in notice]
    assert status(play.core, 1.0, 1.0, 1.0, 0, 0)["suspects"] == (["rollout 1 on node"] if capacity < 64 else [])
    assert len(notices) == play.bad.suspect == (capacity < 64), "where others always have room it gets none after its first failures"
    assert all("rollout 1" in one and "container cannot start" in one and "Others get its leases" in one for one in notices)


def test_what_failed_at_a_worker_is_tried_by_another() -> None:
    play = Fleet(2)
    failed = play.given[BAD][0].group_id
    play.fail()
    assert list(play.core.ledger.retry) == [int(failed[1:])] and play.given[BAD][0].group_id != failed, "it gets a new one instead"
    play.finish(play.given[GOOD].pop(0))
    assert play.given[GOOD][-1].group_id == failed


def test_a_worker_that_is_alone_tries_again() -> None:
    play = Fleet(2)
    play.tell(GOOD, Goodbye("its time limit"))
    for _ in range(20):
        play.fail()
    assert play.given[BAD] and play.core.ledger.set_aside


def test_a_broken_node_that_is_there_first_waits_for_the_others() -> None:
    """As on SLURM, where elements begin one after the other."""
    play = Fleet(8, begun=(BAD,))
    while play.given[BAD]:
        play.fail(hopeless=True)
    assert play.core.ended is None and not play.core.ledger.set_aside and "groups fail one after the other" in waiting(play.core)["rollout"]
    play.beat(peer=GOOD, capacity=8)
    assert len(play.given[GOOD]) == 4 and not play.given[BAD]
    play.tell(GOOD, Draining("its time limit"))
    assert play.given[BAD], "now it is alone"


def test_two_broken_nodes_of_many_do_not_end_the_run() -> None:
    play = Fleet(8)
    for peer in (b"3", b"4", b"5"):
        play.given[peer] = []
        play.tell(peer, Register(Role.rollout, "node", 1))
        play.beat(peer=peer, capacity=8)
    while play.given[BAD] or play.given[b"3"]:
        play.fail(BAD if play.given[BAD] else b"3", hopeless=True)
    assert play.core.ended is None and not play.core.ledger.set_aside


def test_held_out_prompts_that_failed_at_a_worker_go_to_others_first() -> None:
    play = Fleet(8, evaluation__enabled=True)
    while play.core.evaluation.active:
        if play.given[BAD]:
            play.fail()
        else:
            play.finish_at(GOOD)
    [result] = [record for record in play.core.training.records if isinstance(record, EvaluationResult)]
    assert (result.num_prompts, result.num_failed) == (3, 0)


def test_where_all_fail_the_run_ends() -> None:
    play = Fleet()
    for number in range(200):
        if play.core.ended is None:
            play.fail((GOOD, BAD)[number % 2] if play.given[(GOOD, BAD)[number % 2]] else (BAD, GOOD)[number % 2])
    assert "groups in a row have failed; the last one because: container cannot start" in (play.core.ended or "")


def test_a_suspect_worker_is_tried_again_with_one_group() -> None:
    play = Fleet(8)
    while play.given[BAD]:
        play.fail()
    play.core.tick(play.now + TRIED_AGAIN_S / 2)
    assert play.bad.suspect and not play.given[BAD]
    play.now += TRIED_AGAIN_S + 1
    play.beat(peer=GOOD, capacity=8)
    play.beat(peer=BAD, capacity=8)
    play.core.tick(play.now)
    play.sent()
    assert len(play.given[BAD]) == 1
    play.fail()
    assert play.bad.suspect and not play.given[BAD]
    play.now += 2 * TRIED_AGAIN_S
    for peer in (GOOD, BAD):
        play.beat(peer=peer, capacity=8)
    play.core.tick(play.now)
    play.sent()
    play.finish_at(BAD)
    assert not play.bad.failed_in_a_row and not play.core.registry.suspects and len(play.given[BAD]) == 4, "as many as it has room for"


def test_a_prompt_that_cannot_be_answered_is_no_fault_of_a_worker() -> None:
    play = Fleet()
    for number in range(2 * NUM_SAID):
        play.fail(cause="prompt too long", fatal=True)
        if number == 2 * NUM_SAID - 3:
            play.finish(play.given[GOOD].pop(0))
    assert not play.bad.failed_in_a_row and len(play.core.ledger.set_aside) == 2 * NUM_SAID
    said = [notice for notice in play.core.take_notices() if "is set aside" in notice]
    assert len(said) == NUM_SAID + 1 and "prompt 't" in said[0] and "prompt too long" in said[0], "the first ones, then fewer and fewer"


def on_slurm(**changes) -> Play:
    return Play(cluster__kind=ClusterKind.slurm, **changes)


def test_an_orderly_leave_is_no_failure() -> None:
    """The run ended with the cause that its last good worker had come to its time limit."""
    play = on_slurm(cluster__max_consecutive_crashes=3)
    play.begin()
    for number in range(4):
        play.tell(b"%d" % number, Register(Role.rollout, "other", 3))
        play.tell(b"%d" % number, WorkerFailed("no such model"))
    play.tell(ROLLOUT, Draining("its time limit"))
    play.tell(ROLLOUT, Goodbye("its time limit"))
    assert play.core.ended is None
    assert sum("no such model" in notice for notice in play.core.take_notices()) == 4, "the log says why each has gone"


def test_long_answers_are_no_stall() -> None:
    play = Play(run__stall_minutes=1.0)
    play.begin()
    for second in range(10, 300, 10):
        play.core.handle(ROLLOUT, Heartbeat(held=Version(7, 0), live=6, tokens_in_flight=100 * second), float(second))
        play.core.handle(TRAINER, Heartbeat(), float(second))
        pass_time(play.core, float(second))
    assert play.core.ended is None
    for second in range(300, 400, 10):
        play.core.handle(ROLLOUT, Heartbeat(held=Version(7, 0), live=6, tokens_in_flight=29_000), float(second))
        play.core.handle(TRAINER, Heartbeat(), float(second))
        pass_time(play.core, float(second))
    assert "run.stall_minutes=..." in (play.core.ended or "")


def test_an_evaluation_that_is_left_out_is_said_once() -> None:
    play = Play(evaluation__every_steps=1, run__num_steps=50, staleness__eta=8)
    for lease in play.begin():
        play.finish(lease)
    for step in range(1, 5):
        play.publish(step)
    [notice] = [notice for notice in play.core.take_notices() if "is left out" in notice]
    assert "of step 2 is left out, as that of step 1 goes on" in notice


def test_who_saves_waits_for_no_rollouts() -> None:
    play = Play()
    play.begin()
    play.core.drain("by hand", play.now)
    assert waiting(play.core)["trainer"] == "rollout workers to give back their leases"
    play.tell(ROLLOUT, Goodbye("by hand"))
    play.core.tick(play.now + 1)
    assert waiting(play.core)["trainer"] == "its state to be saved"


def test_a_trainer_in_its_step_waits_for_nothing() -> None:
    play = on_slurm()
    play.begin()
    play.tell(ROLLOUT, Goodbye("its time limit"))
    assert waiting(play.core)["trainer"] == ""
    play.tell(TRAINER, BatchRequest(0))
    assert waiting(play.core)["trainer"] == "rollouts"
