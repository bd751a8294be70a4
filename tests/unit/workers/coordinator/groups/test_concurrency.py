"""How many groups run at once: the controller alone, and in simulated runs (benchmarks/bounds/simulation.py) of the real coordinator."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bounds.figures import Figures, simulate
from benchmarks.bounds.simulated_workers import LENGTHS, Fleet
from benchmarks.bounds.simulation import Setting, Simulation
from launcher.__main__ import CONF
from launcher.config.schema import FullConfig, register, to_object
from tests.support.groups import make_group
from workers.config import Bound, Config, ConfigError, load
from workers.config.generation import AUTO
from workers.coordinator.groups.concurrency import PACE, SATURATED, Concurrency, ConcurrencyState, Level, line_through, longest
from workers.coordinator.groups.staleness import StalenessPolicy
from workers.messages.arrays import Int32
from workers.messages.codec import Decoder, pack

FIXED = (4, 16, 48, 96)


def composed(*overrides: str) -> FullConfig:
    register()
    with initialize_config_dir(str(CONF), version_base=None):
        return to_object(compose("config", overrides=list(overrides)))


# -- the config


@pytest.mark.parametrize(("text", "value"), [("auto", AUTO), ("1", 1), ("512", 512)])
def test_a_number_or_auto(text: str, value: int | str, tmp_path: Path) -> None:
    config = composed("experiment=tiny", f"rollout.concurrency={text}").for_workers()
    assert config.rollout.concurrency == value and type(config.rollout.concurrency) is type(value)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    assert load(tmp_path / "config.json").rollout.concurrency == value, "as the workers read it"


@pytest.mark.parametrize("text", ["0", "-1", "many", "''"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.concurrency.*auto"):
        composed("experiment=tiny", f"rollout.concurrency={text}")


@pytest.mark.parametrize(("target", "refused"), [("0", False), ("1.5", False), ("2", False), ("null", False), ("2.5", True), ("-1", True)])
def test_the_target_is_at_most_eta(target: str, refused: bool) -> None:
    overrides = ("experiment=tiny", "staleness.eta=2", f"staleness.target={target}")
    if refused:
        with pytest.raises(ConfigError, match=r"staleness\.target.*from 0 to staleness\.eta=2"):
            composed(*overrides)
    else:
        composed(*overrides)


# -- the controller alone


@given(alpha=st.floats(1e-4, 1.0), beta=st.floats(1e-6, 1.0), loads=st.lists(st.floats(1, 100), min_size=2, max_size=8, unique=True),
       most=st.floats(1, 200))
def test_on_a_line_of_latencies_the_answer_is_the_smallest_load_that_saturates(alpha: float, beta: float, loads: list[float], most: float) -> None:
    if max(loads) < 1.01 * min(loads):
        return
    line = line_through([Level(load, alpha + beta * load, 1.0) for load in loads])
    found = line.load(SATURATED * line.rate(most))
    assert found / (alpha + beta * found) == pytest.approx(SATURATED * most / (alpha + beta * most), rel=1e-3)
    assert 0 < found <= most


@given(points=st.lists(st.tuples(st.floats(0.1, 100), st.floats(1e-5, 10), st.floats(1, 8)), min_size=2, max_size=8), most=st.floats(1, 200))
def test_whatever_the_latencies_the_answer_is_a_load_that_there_is_room_for(points: list[tuple[float, float, float]], most: float) -> None:
    line = line_through([Level(*point) for point in points])
    assert min(line.alpha, line.beta) >= 0 and line.alpha + line.beta > 0
    assert 0 <= line.load(SATURATED * line.rate(most)) <= most * (1 + 1e-9)


EVENTS = st.lists(st.tuples(st.sampled_from(["began", "ended", "decide", "fleet", "others", "wait", "restart"]), st.integers(0, 40)), max_size=80)


@given(configured=st.sampled_from([AUTO, 1, 16]), batch=st.integers(1, 64), events=EVENTS)
@settings(deadline=None)
def test_the_limit_stays_between_one_group_an_engine_and_all_their_room(configured: int | str, batch: int, events: list[tuple[str, int]]) -> None:
    control = Concurrency(configured, batch)
    now, running, others, engines, room, begun = 0.0, {}, 0, 0, 0, 0
    for name, number in events:
        before = control.limit
        if name == "began" and len(running) < control.limit:
            running[f"g{begun}"] = None
            control.began(f"g{begun}", now)
            begun += 1
        elif name == "ended" and running:
            group_id = list(running)[number % len(running)]
            del running[group_id]
            if number % 3:  # else it failed
                control.ended(make_group(group_id, 0, [0, 0, 0]), now)
        elif name == "decide":
            control.decide(now, running, number)
            assert not engines or before / PACE - 1 <= control.limit <= before * PACE + 1, "slowly"
        elif name == "fleet":
            engines = number % 5
            room = engines * (number // 5)
        elif name == "others":
            others = number
        elif name == "wait":
            now += number
        elif name == "restart":
            state = Decoder(ConcurrencyState, 1 << 20).unpack(pack(control.save()))
            control = Concurrency(configured, batch)
            control.restore(state)
        control.look(now, len(running), others, engines, room, number % 2 == 1)
        if configured != AUTO:
            assert control.limit == configured
        elif engines and name != "restart":
            assert engines <= control.limit <= max(room, engines)


@given(events=EVENTS, pauses=st.sets(st.integers(0, 80), max_size=3))
@settings(deadline=None)
def test_a_pause_of_ones_own_changes_nothing(events: list[tuple[str, int]], pauses: set[int]) -> None:
    """Two that are told the same; the clock of one jumps now and then, while its process is suspended."""
    straight, paused = Concurrency(AUTO, 8), Concurrency(AUTO, 8)
    now, late, running, engines = 0.0, 0.0, {}, 2
    for place, (name, number) in enumerate(events):
        if place in pauses:
            late += 4096.0
            paused.excuse(4096.0)
        for control, at in ((straight, now), (paused, now + late)):
            if name == "began":
                control.began(f"g{place}", at)
            elif name == "ended" and running:
                control.ended(make_group(list(running)[number % len(running)], 0, [0, 0, 0]), at)
            elif name == "decide":
                control.decide(at, running, number)
            control.look(at, len(running), 0, engines, 40, number % 2 == 1)
        if name == "began":
            running[f"g{place}"] = None
        elif name == "ended" and running:
            del running[list(running)[number % len(running)]]
        elif name == "wait":
            now += number
    assert straight.limit == paused.limit and straight.save() == paused.save()


def test_a_restart_goes_on_with_what_was_found() -> None:
    control, again = Concurrency(AUTO, 8), Concurrency(AUTO, 8)
    control.levels, control.load = {1: Level(2.0, 0.5, 3.0)}, 7.0
    again.restore(control.save())
    again.look(0.0, 0, 0, 4, 100, False)
    assert again.limit == 28 and again.save() == control.save()


def test_a_group_is_as_long_as_its_longest_episode() -> None:
    group = make_group("g0", 0, [0] * 12)
    assert longest(msgspec.structs.replace(group, lengths=Int32.of([3, 4, 5]), episodes=Int32.of([0, 0, 1]))) == 7
    assert longest(msgspec.structs.replace(group, lengths=Int32.of([3, 4, 5]), episodes=None)) == 5


@given(eta=st.integers(0, 8), share=st.floats(0, 1), batch=st.integers(1, 64), admitted=st.integers(0, 2000), version=st.integers(0, 30),
       bound=st.sampled_from(Bound))
def test_a_target_only_ever_holds_back_and_never_a_whole_batch(eta: int, share: float, batch: int, admitted: int, version: int, bound: Bound) -> None:
    free, held = StalenessPolicy(eta, batch, bound), StalenessPolicy(eta, batch, bound, share * eta)
    assert free.may_admit(admitted, version) or not held.may_admit(admitted, version)
    assert held.may_admit(admitted, version) or admitted >= (version + 1) * batch, "else no batch could be formed"
    assert StalenessPolicy(eta, batch, bound, float(eta)).may_admit(admitted, version) == free.may_admit(admitted, version)


# -- in simulated runs


def setting(lengths: str, bound: Bound = Bound.admission, **changes: object) -> Setting:
    return replace(Setting(lengths, 4, bound, AUTO, num_steps=90, warm_up=40), **changes)


QUICK = ("lognormal", Bound.admission), ("long tail", Bound.hard)


@cache
def figures_of(case: Setting) -> Figures:
    return simulate(case)


@pytest.mark.parametrize(("lengths", "bound"), [
    pytest.param(lengths, bound, marks=[] if (lengths, bound) in QUICK else pytest.mark.long)
    for lengths in LENGTHS for bound in Bound])
def test_auto_is_about_as_fast_as_the_best_number_and_no_staler_than_the_largest(lengths: str, bound: Bound) -> None:
    fixed = [figures_of(setting(lengths, bound, concurrency=number)) for number in FIXED]
    auto = figures_of(setting(lengths, bound))
    assert auto.speed >= 0.95 * max(each.speed for each in fixed)
    assert auto.head.mean <= fixed[-1].head.mean + 0.1
    if bound is Bound.hard:
        assert auto.head.over == 0 and auto.head.most <= 4


def test_engines_that_saturate_early_are_given_few_groups() -> None:
    """A fixed limit of all their room is hardly faster, and its groups are older."""
    early = Fleet(half=1.0, balance=2.0)
    auto, full = (figures_of(setting("short", fleet=early, concurrency=number)) for number in (AUTO, 48))
    assert auto.concurrency < 0.75 * full.concurrency
    assert auto.speed >= 0.9 * full.speed and auto.head.mean < full.head.mean - 0.3


def test_a_slow_trainer_is_given_what_it_takes_and_no_long_buffer() -> None:
    slow = Fleet(balance=0.5)
    auto, full = (figures_of(setting("lognormal", fleet=slow, concurrency=number)) for number in (AUTO, 48))
    assert auto.concurrency < 0.75 * full.concurrency
    assert auto.speed >= 0.95 * full.speed and auto.head.mean < full.head.mean - 0.3


@pytest.mark.parametrize("change", [-2, 3])
def test_the_limit_follows_engines_that_are_lost_or_come(change: int) -> None:
    played = Simulation(setting("short", fleet=Fleet(balance=2.0), changes=((60, change),))).run()
    before, after = np.mean(played.concurrency[50:60]), np.mean(played.concurrency[62:72])
    assert after / before == pytest.approx((4 + change) / 4, rel=0.3)
    assert len(played.records) == 50, "it goes on to its end"


class Outage(Simulation):
    """Once, while the trainer waits in step 50 or later, nothing comes for so long."""

    def __init__(self, setting: Setting, lasts_s: float) -> None:
        super().__init__(setting)
        self.late_s = 0.0
        tell = self.core.handle

        def handle(peer: bytes, message: object, now: float) -> None:
            if not self.late_s and self._step >= 50 and self.core.training.trainer_waits:
                self.late_s = lasts_s
            tell(peer, message, now + self.late_s)

        self.core.handle = handle  # type: ignore[method-assign]


@pytest.mark.parametrize("lasts_s", [30.0, 900.0])
def test_an_outage_that_delays_all_that_runs_is_not_taken_for_load(lasts_s: float) -> None:
    """It was: one group an engine from then on, to the end."""
    played = Outage(Setting("lognormal", 8, Bound.admission, AUTO, num_steps=110), lasts_s)
    played.run()
    assert played.late_s == lasts_s
    assert np.mean(played.concurrency[60:]) > 0.8 * np.mean(played.concurrency[40:50])


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_mean_age_is_at_most_the_target_and_near_it_where_the_trainer_is_slower(lengths: str, share: float) -> None:
    figures = figures_of(setting(lengths, target=4 * share, concurrency=48, fleet=Fleet(balance=0.3)))
    assert 4 * share - 0.7 <= figures.head.mean <= 4 * share + 0.1


def test_with_the_hard_bound_half_the_age_costs_little_speed() -> None:
    """The room below eta is time for stragglers, which the trainer waits for otherwise."""
    whole, half = (figures_of(setting("lognormal", Bound.hard, target=target)) for target in (None, 2.0))
    assert half.speed > 0.85 * whole.speed and half.head.over == 0 and half.head.mean < 0.6 * whole.head.mean


def test_a_coordinator_without_auto_has_the_number_of_its_config() -> None:
    assert Config().rollout.concurrency == 16
    assert set(Simulation(setting("short", concurrency=7, num_steps=5, warm_up=1)).run().concurrency) == {7}
