"""The lead that follows divergence: within its bounds whatever is measured, and where the budget is, whatever the policy does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bounds.drift import Drift, Drifting
from benchmarks.bounds.figures import figures_of
from benchmarks.bounds.simulated_workers import Fleet
from benchmarks.bounds.simulation import Setting, Simulation
from workers.config import Bound, Control, StalenessConfig
from workers.coordinator.groups import lead as leads
from workers.coordinator.groups.lead import Lead, pressures

ETA = 8
VALUES = st.one_of(st.floats(0, 3), st.sampled_from([math.nan, math.inf, 0.0, 1e300]))
STEPS = st.lists(st.tuples(VALUES, st.floats(0, 30)), max_size=40)


def staleness(**values: float | None) -> StalenessConfig:
    return dataclasses.replace(StalenessConfig(ETA, control=Control.divergence), **values)


def after(steps: Sequence[tuple[float, float]], config: StalenessConfig | None = None, ready: float = 0.0, held_back: float = 1.0) -> Lead:
    """The lead after steps with so many nats at such an age, so many batches ready, and so much of the engines' room empty; a negative gap was not
    measured."""
    lead = Lead(config or staleness())
    for number, (gap, age) in enumerate(steps, 1):
        lead.finished(number, {} if gap < 0 else {"gap_proximal_behavior": gap}, age, ETA, ready, held_back)
    return lead


@given(steps=STEPS, ready=st.floats(0, 12), held_back=st.floats(0, 1))
def test_bounds_and_pace_hold_whatever_is_measured(steps: list[tuple[float, float]], ready: float, held_back: float) -> None:
    before = Lead(staleness()).lead
    assert before == 0
    for number in range(len(steps)):
        now = after(steps[:number + 1], ready=ready, held_back=held_back).lead
        assert 0 <= now <= ETA
        assert now <= max(before * leads.PACE, before + leads.LEAST_PACE) + 1e-9
        if not math.isfinite(steps[number][0]) or steps[number][0] >= 0.1:
            assert now <= before, "beyond the budget, and without a measurement, nothing widens"
        before = now


@given(steps=STEPS, gap=st.floats(0, 1), more=st.floats(0, 1), age=st.floats(0, 10))
def test_more_divergence_never_widens(steps: list[tuple[float, float]], gap: float, more: float, age: float) -> None:
    """Up to what is not worth a change."""
    lead = after([*steps, (gap, age)]).lead
    assert after([*steps, (gap + more, age)]).lead <= lead + leads.HYSTERESIS * max(1.0, lead) + 1e-9


def test_it_widens_no_further_than_the_trainer_needs() -> None:
    """Each step at whose end the trainer waits is one more; what is ready in time is enough."""
    lead = after([(0.001, 1.0)] * 7, ready=0.0)
    assert lead.lead == pytest.approx(4 * leads.LEAST_PACE * leads.PACE ** 3)
    for number in range(30):
        lead.finished(number, {"gap_proximal_behavior": 0.001}, 1.0, ETA, 1.4, 1.0)
    assert lead.lead == pytest.approx(leads.PACE ** 3)
    lead.finished(31, {"gap_proximal_behavior": 0.001}, 1.0, ETA, 0.9, 1.0)
    assert lead.lead == pytest.approx(leads.PACE ** 4)


def test_it_widens_only_where_engines_had_room_for_more() -> None:
    """The trainer waits at every step's end; one step in which engines are full, or have room, is not yet a reason."""
    lead = after([(0.001, 1.0)] * 7)
    assert "% of the engines' room empty" in lead.reason
    for number in range(30):
        lead.finished(number, {"gap_proximal_behavior": 0.001}, 1.0, ETA, 0.0, 0.0)
    assert lead.lead == pytest.approx(leads.PACE ** 3)
    lead.finished(31, {"gap_proximal_behavior": 0.001}, 1.0, ETA, 0.0, 0.05)
    assert lead.lead == pytest.approx(leads.PACE ** 3), "on average they were full"
    lead.finished(32, {"gap_proximal_behavior": 0.001}, 1.0, ETA, 0.0, 0.05)
    assert lead.lead == pytest.approx(leads.PACE ** 4)


@given(looks=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1), st.sampled_from([0.0, 3600.0])), max_size=20), last_s=st.floats(0, 10))
def test_what_is_held_back_is_a_mean_by_time(looks: list[tuple[float, float, float]], last_s: float) -> None:
    """Pauses of this process left out, after each of the looks or none."""
    held_back, now = leads.HeldBack(), 5.0
    for seconds, share, pause_s in looks:
        held_back.look(now, share)
        held_back.excuse(pause_s)
        now += seconds + pause_s
    spans = [*(seconds for seconds, *_ in looks[:-1]), looks[-1][0] + last_s] if looks else []
    empty = sum(seconds * share for seconds, (_, share, _) in zip(spans, looks, strict=True))
    for _ in range(2):
        assert held_back.mean(now + last_s) == pytest.approx(empty / sum(spans) if sum(spans) else 0.0, abs=1e-4)
    held_back.restart(now + last_s)
    assert held_back.mean(now + last_s) == 0


def test_where_the_trainer_is_the_slower_side_it_comes_down_to_what_is_enough_and_stays() -> None:
    """Engines finish at once whatever is admitted."""
    lead = after([(0.001, 4.0)] * 30)
    assert lead.lead == ETA
    admitted, seen = 0.0, []
    for step in range(40):
        admitted = max(admitted, step + lead.lead)
        seen.append(admitted - step)
        lead.finished(step, {"gap_proximal_behavior": 0.001}, seen[-1], ETA, seen[-1], 0.5)
    assert lead.lead == pytest.approx(leads.READY, rel=leads.HYSTERESIS) and "batches wait for the trainer" in lead.reason
    assert min(seen) >= 1, "the trainer never waits for it"


def test_what_is_not_measured_narrows_to_nothing() -> None:
    lead = after([(0.001, 4.0)] * 30)
    assert lead.lead == ETA and lead.reason.startswith("as wide as eta allows: mean 0.001 of 0.1 nats at a mean age of 4")
    for number in range(40):
        lead.finished(number, {}, 4.0, ETA, 0.0, 1.0)
    assert lead.lead < 0.01 and lead.reason == "narrowed: step 39 brought no measurement"


def test_it_stays_within_the_target_and_waits_for_the_policy_to_move() -> None:
    assert after([(0.001, 1.0)] * 30, staleness(target=0.5)).lead == 0.5
    lead = Lead(staleness())
    for number in range(9):
        lead.finished(number, {"gap_proximal_behavior": 0.5}, 1.0, ETA, 0.0, 1.0, moved=False)
    assert lead.lead == leads.ENOUGH, "what is measured of a policy that stands still says nothing, and age does no harm"


def test_tokens_are_as_old_as_the_lead_under_which_they_were_admitted() -> None:
    lead = after([(0.001, 1.0)] * 4)
    assert lead.lead == 1
    for number in range(30):
        lead.finished(number, {"gap_proximal_behavior": 0.05}, 1.0, ETA, 2.0, 0.0)
    assert lead.lead == 1
    lead.finished(31, {"gap_proximal_behavior": 0.3}, 9.0, ETA, 2.0, 0.0)
    assert lead.lead == pytest.approx(1 / (0.5 + 2.5 / 3), rel=0.01)


def test_without_control_it_bounds_nothing() -> None:
    lead = Lead(StalenessConfig(ETA))
    lead.finished(1, {"gap_proximal_behavior": 9.0}, 5.0, ETA, 0.0, 1.0)
    assert lead.lead == math.inf and lead.reason == "" and lead.save() is None


@given(steps=STEPS, later=STEPS)
def test_a_checkpoint_changes_nothing(steps: list[tuple[float, float]], later: list[tuple[float, float]]) -> None:
    first, second = after(steps), Lead(staleness())
    state = first.save()
    assert state is not None
    second.restore(state)
    assert second.save() == state
    for number, (gap, age) in enumerate(later):
        for lead in (first, second):
            lead.finished(number, {"gap_proximal_behavior": gap}, age, ETA, age, gap)
    assert (first.lead, first.reason) == (second.lead, second.reason)


def test_the_tightest_budget_counts() -> None:
    config = staleness(max_divergence_p99=0.5, min_ess=0.8)
    metrics = {"gap_proximal_behavior": 0.05, "gap_proximal_behavior_p99": 0.4, "behavior_ess": 0.8}
    assert [share for share, _ in pressures(config, metrics)] == pytest.approx([0.5, 0.8, 1.0])
    assert max(pressures(config, metrics))[1] == "effective sample size 0.8, must be 0.8"
    for name in metrics:
        lead = Lead(config)
        for number in range(4):
            lead.finished(number, {key: value / 10 if key != "behavior_ess" else 1.0 for key, value in metrics.items()}, 1.0, ETA, 0.0, 1.0)
        assert lead.lead == 1
        lead.finished(5, {key: value for key, value in metrics.items() if key != name}, 1.0, ETA, 0.0, 1.0)
        assert lead.lead < 1, f"{name} is bounded, and was not measured"
    lead = Lead(staleness(max_divergence=None, min_ess=0.8))
    lead.finished(1, {"behavior_ess": 1.0}, 1.0, ETA, 0.0, 1.0)
    assert lead.lead > 0


def settled(**values: Any) -> tuple[float, float, Drift]:
    """Mean and standard deviation of the lead over the last 60 steps."""
    played = Drift(dataclasses.replace(Drifting("short", ETA, Bound.admission, 96, num_steps=120, warm_up=40), **values))
    played.run()
    last = np.array(played.leads[-60:])
    return float(last.mean()), float(last.std()), played


@pytest.mark.parametrize(("values", "expected"), [
    ({"speed": 0.05, "power": 0.5}, 3.2), ({"speed": 0.02, "faster": 3.0, "at": 30}, 1.7), ({"speed": 0.02}, 3.8),
    ({"speed": 0.05, "mismatch": 0.15}, 0.0),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ({"speed": 0.05}, 2.0), ({"speed": 0.15, "faster": 1 / 3, "at": 30}, 2.0), ({"speed": 0.05, "mismatch": 0.05}, 1.0)))])
def test_it_settles_where_the_budget_is(values: dict[str, float], expected: float) -> None:
    """The real coordinator in virtual time, with noise, the delay of what is in flight, and steps in the policy's speed."""
    mean, deviation, played = settled(**values)
    assert mean == pytest.approx(expected, rel=0.2, abs=0.02) and deviation < 0.15 * max(mean, 0.2)
    assert max(played.leads) <= ETA
    if expected:
        assert np.mean(played.apart[-60:]) < 1.1 * 0.1


def test_a_policy_that_speeds_up_is_followed_within_a_few_steps() -> None:
    _, _, played = settled(speed=0.05, faster=3.0, at=40)
    assert played.leads[39] == pytest.approx(2.0, rel=0.25) and played.leads[50] < 0.9
    assert max(played.apart[50:]) < 0.17, "no swinging back beyond the budget"


@pytest.mark.parametrize("lengths", ["short", "lognormal"])
def test_a_slow_trainer_gets_younger_samples_at_no_cost(lengths: str) -> None:
    """The budget would allow 8 steps."""
    mean, deviation, played = settled(lengths=lengths, speed=0.002, fleet=Fleet(balance=0.5))
    assert leads.READY <= mean < 3 and deviation < 0.5
    assert figures_of(played).speed > 0.98


def test_engines_that_are_full_get_no_more_lead() -> None:
    """The budget would allow 8 steps, and the trainer waits for engines that are half as fast as it is."""
    mean, deviation, played = settled(speed=0.002, fleet=Fleet(balance=2.0))
    assert 3 < mean < 5 and deviation == 0, "their room is three batches"
    furthest = Simulation(Setting("short", ETA, Bound.admission, 96, num_steps=120, warm_up=40, fleet=Fleet(balance=2.0)))
    assert figures_of(played).speed > 0.98 * figures_of(furthest.run()).speed
