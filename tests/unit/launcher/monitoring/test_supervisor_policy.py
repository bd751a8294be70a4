"""What keeps a run going, against a simulated cluster in which anything may happen to an element."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.cluster import RoleConfig
from launcher.config.schema import FullConfig
from launcher.monitoring import keeping, supervisor
from launcher.monitoring.observation import Observation
from launcher.monitoring.supervisor import Supervisor, usable_nodes, with_excluded
from launcher.monitoring.supervisor_policy import (
    CUT_SHORT_S,
    FAST_S,
    FRUITLESS,
    HELD_S,
    SETTLE_S,
    UNANSWERED_S,
    CancelPending,
    Decision,
    End,
    Exclude,
    Release,
    Situation,
    Submit,
    SupervisorPolicy,
    Tell,
    blames_node,
    held_by_us,
    pending_arrays,
)
from launcher.slurm.queries import HistoryEntry, QueueEntry
from launcher.slurm.states import State
from workers.config import AllocationConfig, ClusterConfig, ClusterKind
from workers.run.folder import KEPT_S, RunFolder
from workers.slurm.command import SlurmError
from workers.slurm.element import SOON_S


def entry(task: int, state: State = State.RUNNING, array: str = "1", reason: str = "") -> QueueEntry:
    return QueueEntry(array, task, str(100 + task), state, reason, () if state.waiting else ("n0",), None, None)


def past(element: str, state: State, node: str = "n0", elapsed_s: float = 600.0, start: float = 1.0, exit_code: int = 0) -> HistoryEntry:
    return HistoryEntry(element, state, elapsed_s, 1, tuple(node.split(",")), start, start + elapsed_s, exit_code)


def situation(now: float, train: Any = (), inference: Any = (), history: dict[str, list[HistoryEntry]] | None = None, **changes: Any) -> Situation:
    observed = Observation(now, {"train": list(train), "inference": list(inference)}, history or {"train": [], "inference": []}, "", [], None)
    return replace(Situation(observed, False, False, (1, 0), 0.0, {"train": 4, "inference": 4}), **changes)


def policy(**changes: Any) -> SupervisorPolicy:
    return SupervisorPolicy(**{"max_hours": 24.0, "nodes_needed": {"train": 1, "inference": 1}, "excluded": {}, **changes})


def over_time(one: SupervisorPolicy, first: float, last: float, *train: QueueEntry, **changes: Any) -> list[Decision]:
    """What is decided while the same situation lasts."""
    inference = changes.pop("inference", [entry(0, array="2")])
    return [decision for now in range(int(first), int(last) + 1, 5) for decision in one.decide(situation(now, train, inference, **changes))]


def test_a_run_in_order_is_left_alone() -> None:
    assert over_time(policy(), 0, 1000, entry(0), entry(1, State.PENDING)) == []
    for state in State:
        if not state.over:
            assert over_time(policy(), 0, 1000, entry(0, state)) == [], state


def test_training_is_submitted_again_once_nothing_of_it_is_left() -> None:
    one = policy()
    assert over_time(one, 0, SETTLE_S - 1) == []
    assert over_time(one, SETTLE_S, SETTLE_S) == [Submit("train")]
    assert over_time(one, SETTLE_S + 5, 1000, entry(0, State.PENDING)) == []


def test_a_queue_that_is_empty_for_a_moment_is_no_reason() -> None:
    one = policy()
    assert over_time(one, 0, 20) == over_time(one, 25, 25, entry(0)) == over_time(one, 30, 55) == []


def test_inference_is_submitted_again_only_for_training_that_runs() -> None:
    assert over_time(policy(), 0, 500, entry(0, State.PENDING), inference=[]) == []
    assert over_time(policy(), 0, SETTLE_S, entry(0), inference=[]) == [Submit("inference")]
    assert over_time(policy(), 0, 500, entry(0), inference=[entry(7, State.PENDING)]) == []


def test_nothing_is_submitted_once_the_run_is_over_or_to_stop() -> None:
    assert over_time(policy(), 0, 500, over=True, inference=[]) == []
    decisions = over_time(policy(), 0, 500, stop_requested=True, inference=[])
    assert decisions and {type(decision) for decision in decisions} == {End}
    assert over_time(policy(), 0, 500, stop_requested=True) == [], "a worker is still there: it is for `headway stop` to wait"
    pending = over_time(policy(), 0, SETTLE_S, entry(0, State.PENDING), over=True)
    assert pending == [CancelPending()]


def test_what_a_person_has_cancelled_is_not_submitted_again() -> None:
    def seen(who: dict[str, str], now: int, *train: QueueEntry) -> Situation:
        one = situation(now, train)
        return replace(one, observed=replace(one.observed, cancelled=who))

    one = policy()
    (end,) = [decision for now in range(0, int(SETTLE_S) + 1, 5) for decision in one.decide(seen({"train": "alice"}, now))]
    assert end == End("stopped: training was cancelled by alice (scancel)", in_order=True)
    one = policy()
    (tell,) = [decision for now in range(0, 500, 5) for decision in one.decide(seen({"inference": "alice"}, now, entry(0)))]
    assert isinstance(tell, Tell) and "inference was cancelled by alice" in tell.text


def test_the_time_that_training_may_take() -> None:
    (end,) = over_time(policy(max_hours=2.0), 0, SETTLE_S, training_hours=2.5)
    assert isinstance(end, End) and "run.max_hours=2 is used up" in end.cause


def test_a_submission_that_was_cut_short_ends_the_run_after_a_while() -> None:
    assert policy().decide(situation(0, cut_short_s=CUT_SHORT_S - 1)) == []
    (end,) = policy().decide(situation(0, cut_short_s=CUT_SHORT_S + 1))
    assert isinstance(end, End) and "cut short" in end.cause


def test_arrays_without_progress_end_the_run() -> None:
    one, decisions = policy(), []
    for number in range(10):
        decisions += over_time(one, 100 * number, 100 * number + SETTLE_S, history={"train": [past("1_0", State.FAILED)], "inference": []})
        if isinstance(decisions[-1], End):
            break
    assert decisions[:-1] == [Submit("train")] * FRUITLESS and "1_0 failed" in decisions[-1].cause
    one = policy()
    for number in range(10):  # with progress it may go on for ever
        assert over_time(one, 100 * number, 100 * number + SETTLE_S, progress=(number, 0)) == [Submit("train")]


def test_a_submission_that_slurm_refused_does_not_count() -> None:
    one = policy()
    for number in range(10):
        assert over_time(one, 100 * number, 100 * number + SETTLE_S) == [Submit("train")]
        one.not_submitted("train")


def test_held_inference_is_released_when_training_has_run_for_a_while() -> None:
    held = [entry(0, State.PENDING, "2", "JobHeldUser"), entry(1, State.PENDING, "2", "job requeued in held state")]
    one = policy()
    assert over_time(one, 0, HELD_S - 1, entry(0), inference=held) == []
    assert over_time(one, HELD_S, HELD_S, entry(0), inference=held) == [Release("inference")]
    assert over_time(policy(), 0, 500, entry(0, State.PENDING), inference=held) == []
    assert pending_arrays([*held, entry(3)]) == ["2"]


def test_what_others_hold_is_not_released() -> None:
    for reason in ("JobHeldUser", "JobHeldAdmin", "launch failed requeued held"):
        assert over_time(policy(), 0, 500, entry(0), inference=[entry(0, State.PENDING, "2", reason)]) == [], reason
    assert held_by_us(entry(0, State.REQUEUE_HOLD)) and not held_by_us(entry(0, State.REQUEUE_HOLD, reason="launch failed requeued held"))


def test_nothing_is_submitted_while_slurm_may_queue_an_array_yet() -> None:
    for role, others in (("train", {}), ("inference", {"train": [entry(0)], "inference": []})):
        one, train = policy(), others.pop("train", [])
        assert over_time(one, 0, UNANSWERED_S - 1, *train, unanswered={role: 0.0}, **others) == []
        assert over_time(one, UNANSWERED_S, UNANSWERED_S + SETTLE_S, *train, unanswered={role: 0.0}, **others) == [Submit(role)]
    assert over_time(policy(), 0, SETTLE_S, unanswered={"inference": 0.0}) == [Submit("train")]


@pytest.fixture
def hands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Supervisor, list[str]]:
    """A policy for a run on the default partition, and what it says."""
    full, said = FullConfig(), []
    full.cluster.kind = ClusterKind.slurm
    full.cluster.train, full.cluster.inference = RoleConfig(time="60", exclude="n3"), RoleConfig(time="60", partition="big,other")
    full.allocation = AllocationConfig(4)
    monkeypatch.setattr(supervisor, "read_full", lambda run: full)
    lines = "n0|small*\nn1|small*\nn2|small*\nn3|small*\nn3|big\nn4|big\nn5|other\nn6|third\n"
    monkeypatch.setattr(supervisor, "ask", lambda *_: subprocess.CompletedProcess((), 0, lines))
    run = RunFolder.create(tmp_path / "run")
    run.submitted.write_text('{"cluster": "slurm", "complete": true, "arrays": []}')
    return Supervisor(run, said.append), said


def test_nodes_are_left_out_beside_those_of_the_user_and_of_his_file(tmp_path: Path) -> None:
    full = FullConfig()
    (tmp_path / "bad").write_text("# bad ones\nn1  # ECC\nn[3-4]\n")
    for own, whole in (("", "n7,n8"), ("n[1-2]", "n[1-2],n7,n8"), (str(tmp_path / "bad"), "n1,n[3-4],n7,n8"), ("/gone/file", "/gone/file")):
        full.cluster.train.exclude, full.cluster.inference.exclude = own, own
        result = with_excluded(full, {"train": {"n8": 0.0, "n7": 1.0}})
        assert (result.cluster.train.exclude, result.cluster.inference.exclude) == (whole, own)


def test_the_nodes_that_a_role_may_run_on(hands: tuple[Supervisor, list[str]]) -> None:
    assert usable_nodes(RoleConfig()) == {"n0", "n1", "n2", "n3"} and usable_nodes(RoleConfig(partition="big,other")) == {"n3", "n4", "n5"}
    assert usable_nodes(RoleConfig(exclude="n[1-2],n9")) == {"n0", "n3"} and usable_nodes(RoleConfig(nodelist="n[0-1],n9")) == {"n0", "n1"}
    assert usable_nodes(RoleConfig(nodelist="n[0-1]", exclude="n1")) == {"n0"} and len(usable_nodes(RoleConfig(exclude="./hosts"))) == 4
    hands[0].act(situation(0.0, [entry(0)], [entry(0)]).observed)
    assert hands[0]._num_nodes == {"train": 3, "inference": 3}


def test_a_decision_that_slurm_refuses_does_not_stop_the_others(hands: tuple[Supervisor, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    one, said = hands

    def refused(*_: object) -> None:
        raise SlurmError("scontrol: no permission")

    monkeypatch.setattr(supervisor.queries, "release", refused)
    monkeypatch.setattr(one._policy, "decide", lambda _: [Release("inference"), Tell("and so on")])
    for _ in range(2):
        one.act(situation(0.0).observed)
    assert [text for text in said if "no permission" in text] == ["not done, SLURM did not take it: scontrol: no permission"]
    assert said.count("and so on") == 2


def test_a_node_is_left_out_after_two_failures() -> None:
    fails = [past("1_0", State.NODE_FAIL, start=1), past("1_1", State.FAILED, elapsed_s=5, start=2)]
    one = policy()
    assert over_time(one, 10, 20, entry(2), history={"train": fails[:1], "inference": []}) == []
    one.decide(situation(25, [entry(2)], [entry(0)], {"train": fails, "inference": []}))
    assert one.excluded == {"train": {"n0": 25}, "inference": {}}
    assert over_time(one, 30, 90, entry(2), history={"train": fails, "inference": []}) == [], "once is enough"
    again = [*fails, past("1_2", State.NODE_FAIL, start=95)]  # an element that was requeued before the node was left out
    assert Exclude("train", "n0", "3 train elements failed on it") in over_time(one, 100, 100, entry(2), history={"train": again, "inference": []})


def test_which_failures_are_a_nodes() -> None:
    assert SOON_S + 6 * ClusterConfig().crash_backoff_s <= FAST_S, "it stays so long before it ends"
    assert blames_node(past("1_0", State.FAILED, elapsed_s=FAST_S - 1)) and not blames_node(past("1_0", State.FAILED, elapsed_s=FAST_S))
    assert blames_node(past("1_0", State.BOOT_FAIL)) and not blames_node(past("1_0", State.OUT_OF_MEMORY, elapsed_s=3))
    assert not blames_node(past("1_0", State.CANCELLED, elapsed_s=1)) and not blames_node(past("1_0", State.PREEMPTED, elapsed_s=1))


def test_enough_nodes_stay() -> None:
    def excluded(nodes: list[str], **changes: Any) -> dict[str, float]:
        one = policy(**changes)
        history = {"train": [past(f"1_{index}", State.NODE_FAIL, node) for index, node in enumerate(nodes * 2)], "inference": []}
        one.decide(situation(10, [entry(2)], [entry(0)], history))
        return one.excluded["train"]

    assert len(excluded(["n0", "n1", "n2", "n3"])) == 2, "at least half of the partition"
    assert len(excluded(["n0"], nodes_needed={"train": 4, "inference": 1})) == 0
    assert policy().decide(situation(10, [entry(2)], [entry(0)], {"train": [past("1_0", State.NODE_FAIL)] * 2, "inference": []}, num_nodes={})) == []


def test_faults_are_told_once_and_not_those_from_before() -> None:
    one = policy()
    old = past("1_0", State.OUT_OF_MEMORY, start=5)
    new = past("1_0", State.OUT_OF_MEMORY, start=700, exit_code=1)
    told = [*over_time(one, 0, 20, entry(1), history={"train": [old], "inference": []}),
            *over_time(one, 25, 50, entry(1), history={"train": [old, new], "inference": []})]
    (tell,) = told
    assert isinstance(tell, Tell) and tell.text.startswith("job 1_0 on n0 ran out of memory: ask for more") and "exit status 1" in tell.text


@dataclass
class Cluster:
    """A queue in which elements start, end in any way, are requeued and lost; accounting that lags and may be missing."""

    queue: dict[str, list[QueueEntry]] = field(default_factory=lambda: {"train": [], "inference": []})
    history: dict[str, list[HistoryEntry]] = field(default_factory=lambda: {"train": [], "inference": []})
    num_arrays: int = 0
    over: bool = False
    stop: bool = False
    epoch: int = 0
    failures: dict[tuple[str, str], int] = field(default_factory=dict)

    def submit(self, role: str, num: int) -> None:
        self.num_arrays += 1
        self.queue[role] += [QueueEntry(str(self.num_arrays), task, str(1000 * self.num_arrays + task), State.PENDING, "Resources", (), None, None)
                             for task in range(num)]

    def happens(self, now: float, role: str, what: str, node: str, elapsed_s: float) -> None:
        with_nodes = [one for one in self.queue[role] if not one.state.waiting]
        limit = 1 if role == "train" else 2
        if what == "start":
            # SLURM's limit (%1) is one of each array: it would start a second training array beside the first.
            busy = [one.array_job_id for one in with_nodes]
            first = next((one for one in self.queue[role] if one.state.waiting and busy.count(one.array_job_id) < limit), None)
            if first is not None:
                self.queue[role][self.queue[role].index(first)] = replace(first, state=State.RUNNING, nodes=(node,))
                self.epoch += role == "train"
        elif what == "vanish":  # the queue cannot be trusted to show everything at every moment
            self.queue[role] = [one for one in self.queue[role] if one.state.waiting]
        elif with_nodes:
            one, state = with_nodes[0], State[what]
            self.history[role].append(HistoryEntry(one.element, state, elapsed_s, 1, one.nodes, now, now + elapsed_s, 0))
            if blames_node(self.history[role][-1]):
                self.failures[role, one.nodes[0]] = self.failures.get((role, one.nodes[0]), 0) + 1
            self.queue[role].remove(one)
            if state in (State.NODE_FAIL, State.PREEMPTED):
                self.queue[role].append(replace(one, state=State.PENDING, nodes=()))


HAPPENINGS = st.tuples(st.sampled_from(["train", "inference"]),
                       st.sampled_from(["start", "start", "start", "COMPLETED", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "OUT_OF_MEMORY",
                                        "vanish"]),
                       st.sampled_from(["n0", "n1", "n2", "n3"]), st.sampled_from([1.0, 50.0, 5000.0]), st.integers(min_value=1, max_value=60))


@settings(max_examples=300, deadline=None)
@given(happenings=st.lists(HAPPENINGS, max_size=80), ends=st.integers(min_value=0, max_value=100), stops=st.integers(min_value=0, max_value=100))
def test_invariants(happenings: list, ends: int, stops: int) -> None:
    cluster, one, now = Cluster(), policy(), 0.0
    cluster.submit("train", 3)
    cluster.submit("inference", 4)
    for number, (role, what, node, elapsed_s, pause_s) in enumerate(happenings):
        cluster.happens(now, role, what, node, elapsed_s)
        now += pause_s
        cluster.over, cluster.stop = cluster.over or number >= ends, cluster.stop or number >= stops
        seen = situation(now, cluster.queue["train"], cluster.queue["inference"],
                         {role: list(entries) for role, entries in cluster.history.items()}, over=cluster.over, stop_requested=cluster.stop,
                         progress=(cluster.epoch, 0))
        for decision in one.decide(seen):
            assert not isinstance(decision, CancelPending) or cluster.over
            if isinstance(decision, Submit):
                assert not cluster.over and not cluster.stop, "nothing after the end"
                assert not cluster.queue[decision.role], "never two training arrays that live"
                cluster.submit(decision.role, 3)
            if isinstance(decision, Exclude):
                assert cluster.failures[decision.role, decision.node] >= 2
                assert len(one.excluded[decision.role]) <= 2
            if isinstance(decision, End):
                cluster.over = True
    assert sum(not entry.state.waiting for entry in cluster.queue["train"]) <= 1


def test_a_watch_takes_over_from_the_one_that_kept_the_run(hands: tuple[Supervisor, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    run, said, acted = hands[0].run, [], []
    monkeypatch.setattr(Supervisor, "act", lambda self, observed: acted.append(observed))
    program = "import fcntl, signal, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program, str(run.supervisor_lock)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with supervisor.supervising(run, said.append) as act:
            act(situation(0.0).observed)
            assert not acted and "is kept going by another `headway watch`" in said[-1]
            other.kill()
            other.wait()
            for now in (1.0, 2.0):
                act(situation(now).observed)
            assert [observed.time for observed in acted] == [1.0, 2.0] and "this one does from now on" in said[-1] and len(said) == 2
            with supervisor.lock(run, said.append) as mine:
                assert not mine, "it holds the lock"


@pytest.mark.parametrize("where", ["elsewhere", "here"])
def test_who_keeps_a_run_on_another_machine_is_seen_though_its_lock_is_not(where: str, tmp_path: Path) -> None:
    """Locks that hold on one machine alone: two would have submitted every array twice."""
    run, said = RunFolder.create(tmp_path / "run"), list[str]()
    run.keeper.write_text(json.dumps({"host": "login2" if where == "elsewhere" else socket.gethostname()}))
    with supervisor.lock(run, said.append) as mine:
        assert mine is (where == "here") and run.kept_elsewhere() == ("login2" if where == "elsewhere" else "")
    assert run.keeper.exists() is (where == "elsewhere"), "its own word goes with it"
    assert run.is_supervised() is (where == "elsewhere")
    if where == "elsewhere":
        long_ago = time.time() - KEPT_S - 1
        os.utime(run.keeper, (long_ago, long_ago))
        assert not run.is_supervised()
        with supervisor.lock(run, said.append) as mine:
            assert mine and json.loads(run.keeper.read_bytes())["host"] == socket.gethostname(), "it is gone"


def test_who_was_silent_for_long_does_not_keep_a_run_that_another_one_keeps_now(
        hands: tuple[Supervisor, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    run, said, acted = hands[0].run, list[str](), list[Observation]()
    monkeypatch.setattr(Supervisor, "act", lambda self, observed: acted.append(observed))
    monkeypatch.setattr(keeping, "KEPT_S", 0.06)
    with supervisor.supervising(run, said.append) as act:
        act(situation(0.0).observed)
        run.keeper.write_text('{"host": "login2"}')  # as if this process had been suspended
        while run.kept_elsewhere():
            act(situation(1.0).observed)
            if said:
                break
        assert "is kept going by a `headway watch` on login2" in said[-1]
        number = len(acted)
        act(situation(2.0).observed)
        assert len(acted) == number and json.loads(run.keeper.read_bytes())["host"] == "login2"
    assert run.keeper.exists(), "it is the other one's"
