"""Several samples for each held-out prompt within a run: leased as one group, sampled as configured, told with avg@k, pass@k and maj@k."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from launcher.views import run_view
from tests.support.episodes import Chatter, Judge, make_lease, make_workflow
from tests.support.groups import make_group
from tests.unit.workers.coordinator.test_core import ROLLOUT, Play, leases
from workers.config import EvaluationConfig, RewardConfig, WorkflowConfig
from workers.coordinator.monitoring import reporting
from workers.coordinator.training.step_records import HeldoutGroup
from workers.messages.from_worker import GroupFinished
from workers.messages.parts import Group, Lease, Purpose
from workers.rollout.workflows.rendering import PlainText
from workers.rollout.workflows.workflow import Parts, Workflow


def evaluated(chatter: Chatter, heldout: EvaluationConfig, judge: Judge) -> Group:
    parts = Parts(chatter, judge, WorkflowConfig(group_size=2, max_new_tokens=8, temperature=0.9), RewardConfig(), 400, PlainText(),  # type: ignore[arg-type]
                  heldout=heldout)
    return asyncio.run(Workflow(parts).run(make_lease(purpose=Purpose.evaluation, verifier="number")))


def test_a_held_out_prompt_has_its_own_number_of_samples_temperature_and_answers() -> None:
    turns = iter(["41", "42", "42."])
    chatter = Chatter(says=lambda _: next(turns))
    group = evaluated(chatter, EvaluationConfig(num_samples=3, temperature=0.6, top_p=0.95, top_k=20), Judge(lambda text: float("42" in text)))
    assert group.scores.tolist() == [0.0, 1.0, 1.0] and group.answers == ["41", "42", "42"]
    assert {(params.temperature, params.top_p, params.top_k) for params in chatter.params} == {(0.6, 0.95, 20)}


def test_training_groups_carry_no_answers() -> None:
    group = asyncio.run(make_workflow(Chatter()).run(make_lease()))
    assert group.answers == []


def judged(lease: Lease, scores: list[float], answers: list[str]) -> GroupFinished:
    group = make_group(lease.group_id, lease.attempt, [0] * len(scores), rewards=scores, purpose=Purpose.evaluation)
    return GroupFinished(msgspec.structs.replace(group, answers=answers))


def test_the_record_of_an_evaluation_has_all_figures_over_its_prompts() -> None:
    play = Play(evaluation__num_samples=4, evaluation__temperature=1.0)
    granted = [lease for lease in play.begin() if lease.purpose is Purpose.evaluation]
    outcomes = [([1, 0, 1, 1], ["3", "4", "3", "3"]), ([0, 0, 1, 0], ["1", "1", "2", ""]), ([0, 0, 0, 0], [""] * 4)]
    for lease, (scores, answers) in zip(granted, outcomes, strict=True):
        play.tell(ROLLOUT, judged(lease, list(map(float, scores)), answers))
    *groups, result = play.core.training.records
    assert [one.group.group_id for one in groups if isinstance(one, HeldoutGroup)] == [lease.group_id for lease in granted], "kept to be read"
    record = reporting.evaluation_record(play.core, result, 1.0)  # type: ignore[arg-type]
    assert record["accuracy"] == pytest.approx(record["avg"]["mean"]) == pytest.approx(4 / 12)
    assert {k: told["mean"] for k, told in record["pass"].items()} == pytest.approx({"1": 4 / 12, "2": 0.5, "4": 2 / 3})
    assert record["maj"]["mean"] == pytest.approx(1 / 3) and record["num_samples"] == 4
    assert "mean of 4 at temperature 1" in run_view.evaluation_line(record) and "pass@4 0.667, maj@4 0.333" in run_view.evaluation_line(record)


def test_an_interrupted_evaluation_keeps_the_samples_of_what_was_judged() -> None:
    play = Play(evaluation__num_samples=2, evaluation__temperature=1.0)
    first, *_ = leases(play.beat()) or play.begin()
    play.tell(ROLLOUT, judged(first, [1.0, 0.0], ["a", "b"]))
    after = Play(epoch=8, snapshot=play.save(), evaluation__num_samples=2, evaluation__temperature=1.0)
    assert after.core.evaluation.samples == {0: ([1.0, 0.0], ["a", "b"])} and after.core.evaluation.scores == {0: 0.5}


def test_a_worker_gets_no_more_prompts_than_it_has_room_for_their_samples() -> None:
    granted = Play(evaluation__num_samples=4, evaluation__temperature=1.0).begin(capacity=9)
    assert [lease.purpose for lease in granted] == [Purpose.evaluation] * 2


def test_one_greedy_sample_is_told_as_before() -> None:
    line = run_view.evaluation_line({"step": 3, "accuracy": 0.5, "num_prompts": 8, "num_failed": 0, "num_samples": 1, "temperature": 0.0})
    assert line == "held-out accuracy after step 3: 0.500 (8 prompts, greedy)"
    assert replace(EvaluationConfig(), num_samples=6).ks == [1, 2, 4, 6]
