"""Groups that are not trained on: the decision, the share of them, and what the coordinator makes of it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.groups import make_group, make_partial
from tests.support.ticking import pass_time
from tests.unit.workers.coordinator.test_core import ROLLOUT, TRAINER, Play, leases, only
from workers.config import ConfigError, WorkflowConfig
from workers.coordinator.groups.rejections import WINDOW_BATCHES, Rejections
from workers.coordinator.monitoring.reporting import status, step_record, summary
from workers.coordinator.monitoring.waiting_reasons import waiting
from workers.coordinator.training.step_records import StepRecord
from workers.messages.arrays import Int32
from workers.messages.codec import encode, from_workers
from workers.messages.from_coordinator import Acknowledged, Batch, Refused
from workers.messages.from_worker import BatchRequest, GroupFailed, GroupFinished, GroupParked, GroupRejected, Register
from workers.messages.parts import Lease, Message, Purpose, Role
from workers.rollout.leases.outbox import Results
from workers.rollout.workflows.group_filter import GroupFilter
from workers.run.folder import RunFolder

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=8)


# -- the decision --------------------------------------------------------------------------------------------------------

@given(REWARDS)
@settings(max_examples=200, deadline=None)
def test_spread_keeps_groups_whose_rewards_are_not_all_equal(rewards: list[float]) -> None:
    group = make_group("g3", 7, [0] * len(rewards), rewards=rewards)
    verdict = GroupFilter("spread").verdict(group)
    if len(set(group.rewards.tolist())) > 1:
        assert verdict == GroupFinished(group)
    else:
        assert verdict == GroupRejected("g3", 7, len(rewards), 0, pytest.approx(rewards[0]))
    assert GroupFilter("all").verdict(group) == GroupFinished(group)


def test_the_samples_of_an_episode_are_no_spread() -> None:
    group = msgspec.structs.replace(make_group("g0", 0, [0, 0, 0], rewards=[1.0, 1.0, 0.0]), episodes=Int32.of([0, 0, 1]))
    assert isinstance(GroupFilter("spread").verdict(group), GroupFinished)
    alone = msgspec.structs.replace(group, rewards=group.rewards * 0, scores=group.scores)
    rejected = GroupFilter("spread").verdict(alone)
    assert isinstance(rejected, GroupRejected) and rejected.score == 0.5, "each episode counts once"


def test_held_out_prompts_are_never_rejected(functions: None) -> None:
    group = make_group("e0.0", 1, [0], purpose=Purpose.evaluation)
    for keep in ("all", "spread", "own_filters:never"):
        assert GroupFilter(keep).verdict(group) == GroupFinished(group)


def test_what_a_rejected_group_took_is_told() -> None:
    group = msgspec.structs.replace(make_group("g0", 2, [0, 1, 1]), tokens_interrupted=2)
    rejected = GroupFilter("spread").verdict(group)
    assert rejected == GroupRejected("g0", 2, 3, 2, 1.0)
    assert from_workers(1 << 20).decode(encode(rejected)) == rejected


FILTERS = '''
def never(scores, lengths):
    return False

def half(scores, lengths):
    assert all(type(score) is float for score in scores) and all(type(length) is int for length in lengths)
    return 0 < sum(scores) / len(scores) < 0.6 and max(lengths) < 3

def numpys(scores, lengths):
    import numpy
    return numpy.float32(1) > 0

def nothing(scores, lengths):
    pass

def broken(scores, lengths):
    return scores[99]

def verbose(scores, lengths):
    raise ValueError("x" * 2_000_000)

number = 3
'''


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_filters.py").write_text(FILTERS)
    (tmp_path / "broken_filters.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_filters", raising=False)


def test_a_function_of_ones_own_decides_by_scores_and_lengths(functions: None) -> None:
    keeping = GroupFilter("own_filters:half")
    assert isinstance(keeping.verdict(make_group("g0", 0, [0, 0], rewards=[1.0, 0.0])), GroupFinished)
    assert isinstance(keeping.verdict(make_group("g0", 0, [0, 0], rewards=[1.0, 1.0])), GroupRejected)
    episodes = msgspec.structs.replace(make_group("g0", 0, [0, 0, 0], rewards=[1.0, 1.0, 0.0]), episodes=Int32.of([0, 0, 1]))
    assert isinstance(keeping.verdict(episodes), GroupFinished), "an episode has one score, and the length of all its samples"
    longer = msgspec.structs.replace(make_group("g0", 0, [0] * 4, rewards=[1.0, 1.0, 1.0, 0.0]), episodes=Int32.of([0, 0, 0, 1]))
    assert isinstance(keeping.verdict(longer), GroupRejected)
    assert isinstance(GroupFilter("own_filters:numpys").verdict(episodes), GroupFinished)


@pytest.mark.parametrize(("name", "words"), [
    ("broken", ["IndexError", "own_filters.py, line", "in broken"]), ("nothing", ["returned None", "True"]), ("verbose", ["ValueError: xxx"])])
def test_a_function_that_fails_is_a_failure_that_says_where(functions: None, name: str, words: list[str]) -> None:
    failed = GroupFilter(f"own_filters:{name}").verdict(make_group("g0", 3, [0, 0]))
    assert isinstance(failed, GroupFailed) and failed.fatal and (failed.group_id, failed.attempt) == ("g0", 3) and len(failed.cause) < 3000
    for word in [f"workflow.keep='own_filters:{name}'", *words]:
        assert word in failed.cause


@pytest.mark.parametrize(("path", "words"), [
    ("own_filters:missing", "no function 'missing'"), ("own_filters:number", "no function 'number'"), ("not_there:f", "PYTHONPATH"),
    ("broken_filters:f", "a_module_that_is_not_there")])
def test_a_function_that_is_not_there_is_named_before_anything_is_generated(functions: None, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GroupFilter(path)


@pytest.mark.parametrize(("changes", "words"), [
    ({"keep": "most"}, "workflow.keep='most'"), ({"keep": ""}, "workflow.keep=''"), ({"keep": "a:b:c"}, "import path"),
    ({"keep": "a b:c"}, "import path"), ({"keep": "spread", "group_size": 1}, "workflow.group_size=1"),
    ({"max_rejected": 0.0}, "workflow.max_rejected=0.0"),
    ({"max_rejected": 1.1}, "workflow.max_rejected=1.1"), ({"max_rejected": float("nan")}, "workflow.max_rejected=nan")])
def test_what_cannot_work_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WorkflowConfig(**changes).check()


@pytest.mark.parametrize("keep", ["all", "spread", "filters:f", "my.filters:keep_half"])
def test_what_can_work_is_not_refused(keep: str) -> None:
    WorkflowConfig(keep=keep, max_rejected=1.0).check()


# -- how many ------------------------------------------------------------------------------------------------------------

@given(batch=st.integers(1, 4), tenths=st.integers(1, 10), scores=st.lists(st.none() | st.floats(0, 1), max_size=80))
@settings(max_examples=300, deadline=None)
def test_the_run_ends_exactly_when_a_full_window_has_too_many(batch: int, tenths: int, scores: list[float | None]) -> None:
    rejections, size = Rejections("spread", tenths / 10, batch), WINDOW_BATCHES * batch
    for number, score in enumerate(scores, 1):
        rejected = sum(score is not None for score in scores[max(0, number - size) : number])
        if score is None:
            rejections.kept(0.5)
        else:
            cause = rejections.rejected(score)
            assert bool(cause) == (number >= size and rejected / size > tenths / 10)
        assert rejections.share == rejected / min(number, size)


def test_the_cause_names_figures_and_remedies() -> None:
    rejections = Rejections("spread", 0.5, 1)
    for _ in range(3):
        rejections.kept(0.5)
    causes = [rejections.rejected(0.25) for _ in range(5)]
    assert causes[:4] == [""] * 4
    for words in ("62% of the last 8 groups", "workflow.keep=spread", "workflow.max_rejected=0.5", "is 0.250", "workflow.group_size"):
        assert words in causes[4]


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=30))
@settings(max_examples=100, deadline=None)
def test_a_steps_figures_are_of_what_was_judged_since_the_one_before(judged: list[tuple[bool, float]]) -> None:
    rejections = Rejections("spread", 1.0, 4)
    rejections.rejected(1.0)
    assert rejections.next_step() == (1, 1.0, 1.0)
    for kept, score in judged:
        (rejections.kept if kept else rejections.rejected)(score)
    num_rejected, share, accuracy = rejections.next_step()
    assert num_rejected == sum(not kept for kept, _ in judged)
    if judged:
        assert share == num_rejected / len(judged) and accuracy == pytest.approx(np.mean([score for _, score in judged]))
    else:
        assert (share, accuracy) == (0.0, None)
    assert rejections.next_step() == (0, 0.0, None)


# -- the coordinator -----------------------------------------------------------------------------------------------------

def reject(play: Play, lease: Lease, score: float = 0.0) -> list:
    return play.tell(ROLLOUT, GroupRejected(lease.group_id, lease.attempt, 5, 1, score))


def begun(**changes) -> tuple[Play, list[Lease]]:
    """A run in which the first evaluation is over; and its training leases."""
    play = Play(**{"workflow__keep": "spread", "run__num_steps": 9, **changes})
    granted = play.begin()
    for lease in granted[:3]:
        play.finish(lease)
    return play, granted[3:]


def test_a_rejected_group_is_replaced_by_the_next_prompt() -> None:
    play, granted = begun()
    [answer, *others] = reject(play, granted[1])
    assert answer == Acknowledged("g1", granted[1].attempt, True)
    [instead] = leases(others)
    assert (instead.group_id, instead.version) == ("g4", granted[1].version) and play.core.ledger.admitted == 4
    assert reject(play, granted[1]) == [Acknowledged("g1", granted[1].attempt, False)], "again: acknowledged, and counted once"
    assert not play.finish(granted[1])[0].accepted
    assert play.core.ledger.num_rejected == 1 and (play.core.totals.tokens_generated, play.core.totals.tokens_interrupted) == (5, 1)
    for lease in (granted[0], granted[2]):
        play.finish(lease)
    [batch] = only(play.tell(TRAINER, BatchRequest(0)), Batch)
    assert [group.group_id for group in batch.groups] == ["g0", "g2"]


@pytest.mark.parametrize("eta", [0, 2])
def test_a_replacement_is_of_the_version_of_now(eta: int) -> None:
    play, granted = begun(staleness__eta=eta)
    for lease in granted[:2]:
        play.finish(lease)
    play.tell(TRAINER, BatchRequest(0))
    granted = granted[2:] + leases(play.publish(1))
    play.beat(1)
    [instead] = leases(reject(play, granted[0]))
    assert instead.version.step == 1 and play.core.ledger.running[instead.group_id].admitted_at == 1


def test_figures_of_a_step_count_what_was_rejected() -> None:
    play, granted = begun()
    granted += leases(reject(play, granted.pop(0), 0.0))
    granted += leases(reject(play, granted.pop(0), 1.0))
    play.tell(TRAINER, BatchRequest(0))
    assert waiting(play.core)["trainer"] == "a batch: 0 of 2 groups finished; 100% of the last 2 were rejected (workflow.keep=spread)"
    for lease in granted[:2]:
        play.finish(lease)
    play.publish(1)
    [record] = only(play.core.training.records, StepRecord)
    line = step_record(play.core, record, 1.0, 0)
    assert (line["groups_rejected"], line["share_rejected"], line["accuracy_sampled"]) == (2, 0.5, 0.75)
    shown = status(play.core, play.now, 0.0, 1000.0, 0, 0)
    assert (shown["rejected"], shown["share_rejected"]) == (2, 0.5) and msgspec.json.encode(shown)
    assert summary(play.core, [], 1.0)["num_rejected"] == 2
    for lease in granted[2:]:
        play.finish(lease, 1)
    play.tell(TRAINER, BatchRequest(1))
    play.publish(2)
    later = step_record(play.core, only(play.core.training.records, StepRecord)[1], 2.0, 0)
    assert (later["groups_rejected"], later["share_rejected"], later["accuracy_sampled"]) == (0, 0.0, 1.0)


def test_too_many_rejected_groups_end_the_run_and_say_why() -> None:
    play, granted = begun(workflow__max_rejected=0.9)
    for number in range(WINDOW_BATCHES * 2):
        assert play.core.ended is None, number
        granted += leases(reject(play, granted.pop(0), 1.0))
    assert "100% of the last 16 groups were rejected" in (play.core.ended or "") and "mean score of those is 1.000" in (play.core.ended or "")


def test_without_a_limit_the_run_goes_on_and_each_rejection_is_a_sign_of_life() -> None:
    play, granted = begun(workflow__max_rejected=1.0, run__stall_minutes=1.0)
    for _ in range(100):
        play.now += 30.0
        granted += leases(reject(play, granted.pop(0)))
        play.tell(TRAINER, BatchRequest(0))
        pass_time(play.core, play.now)
        assert play.core.ended is None and len(granted) == 4
    for lease in granted[:2]:
        play.finish(lease)
    assert len(play.core.training.in_training) == 1


def test_a_score_that_is_no_number_is_a_failure() -> None:
    play, granted = begun()
    sent = reject(play, granted[0], float("nan"))
    assert [lease.group_id for lease in leases(sent)] == ["g0"] and not play.core.ledger.num_rejected


def test_only_rollout_workers_reject_and_no_held_out_prompt() -> None:
    play = Play()
    granted = play.begin()
    play.tell(b"leader", Register(Role.trainer_shard, "node", 3))
    for peer in (TRAINER, b"leader"):
        assert only(play.tell(peer, GroupRejected("g0", granted[3].attempt, 1, 0, 0.0)), Refused)
    assert reject(play, granted[0]) == [Acknowledged("e0.0", granted[0].attempt, False)] and "e0.0" in play.core.evaluation.running
    assert not play.core.ledger.num_rejected


def test_a_rejection_after_the_last_checkpoint_is_left_to_the_next_incarnation() -> None:
    play, granted = begun()
    reject(play, granted[0])
    snapshot = play.save(final=True)
    assert reject(play, granted[1]) == []
    after = Play(epoch=8, snapshot=snapshot, run__num_steps=9, workflow__keep="spread")
    assert (after.core.ledger.num_rejected, after.core.rejections.share) == (1, 1.0)
    after.core.ledger.running["g1"].worker = ROLLOUT
    after.tell(ROLLOUT, Register(Role.rollout, "node", 1))
    assert not reject(after, granted[1])[0].accepted, "nobody said that it was still held"
    assert after.core.ledger.num_rejected == 1 and 1 in after.core.ledger.retry and 0 not in after.core.ledger.retry


def test_a_group_that_was_parked_may_be_rejected_by_whoever_finished_it() -> None:
    play, granted = begun()
    [again] = leases(play.tell(ROLLOUT, GroupParked(make_partial("g0", granted[0].attempt, [0], epoch=7))))
    assert again.partial is not None
    assert reject(play, again)[0].accepted and not play.core.ledger.parked and "g0" not in play.core.ledger.running


def test_what_a_worker_leaves_behind_is_taken_by_the_next_coordinator(tmp_path: Path) -> None:
    """From the worker's results to the file, and from there to the coordinator that knows the lease."""
    class Nobody:
        in_touch = False

        async def send(self, message: Message) -> None:
            raise AssertionError("nobody is there")

    async def leave() -> None:
        results = Results(Nobody())
        results.add(granted[1], GroupFilter("spread").verdict(make_group("g1", granted[1].attempt, [0, 0])))
        assert results.spill(run) == 1 and len(results) == 0

    play, granted = begun()
    run = RunFolder.create(tmp_path / "run")
    asyncio.run(leave())
    [path] = run.partials.iterdir()
    message = from_workers(1 << 20).unpack(path.read_bytes())
    after = Play(epoch=8, snapshot=play.save(), run__num_steps=9, workflow__keep="spread")
    assert isinstance(message, GroupRejected) and after.core.reconciliation.absorb(message) and not after.core.reconciliation.absorb(message)
    assert after.core.ledger.num_rejected == 1 and "g1" not in after.core.ledger.running
