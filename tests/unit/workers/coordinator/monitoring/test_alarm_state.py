"""Alarms about training: when each begins and ends, on series as runs have them, and never on those of runs that learn."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from launcher.config.schema import FullConfig
from launcher.launch.changeable import changed
from launcher.monitoring.watch import Follower, _print_lines
from tests.unit.launcher.views.test_run_view import shown, status, step
from tests.unit.workers.coordinator.test_core import TRAINER, Play, only
from workers.config import Advantage, AlarmsConfig, Config, ConfigError, ImportanceLevel, RunKind
from workers.config.alarms import ALARMS, RL_ALARMS, SUPERVISED_ALARMS
from workers.coordinator.monitoring.alarm_conditions import _ALL, alarms_of
from workers.coordinator.monitoring.alarm_state import Health
from workers.coordinator.monitoring.reporting import step_record
from workers.coordinator.training.step_records import StepRecord
from workers.messages.from_worker import BatchRequest
from workers.run.folder import RunFolder

Curve = Callable[[int], Any]
NUM_STEPS = 80
WINDOW, STEPS = AlarmsConfig().window, AlarmsConfig().steps
EARLIEST = WINDOW + STEPS - 1
"""The first step at which an alarm can begin."""


def config_of(**changes: Any) -> Config:
    """A config with `part__key` changed."""
    config = Config()
    config.staleness.eta = 2
    for key, value in changes.items():
        part, name = key.split("__")
        setattr(getattr(config, part), name, value)
    return config


def curve(*points: tuple[int, float], noise: float = 0.0, seed: int = 0) -> Curve:
    """Straight lines between `points` (step, value), with noise of that relative size."""
    def at(step: int) -> float:
        wobble = 1 + noise * random.Random(seed * 100_003 + step).uniform(-1, 1)
        for (left, low), (right, high) in itertools.pairwise(points):
            if step <= right:
                return (low + (high - low) * max(0, step - left) / (right - left)) * wobble
        return points[-1][1] * wobble

    return at


def flat(value: float, noise: float = 0.0, seed: int = 0) -> Curve:
    return curve((0, value), noise=noise, seed=seed)


def series(num_steps: int = NUM_STEPS, **curves: Any) -> list[dict[str, Any]]:
    """Records of a run that learns as `demo` does (README.md), but for `curves`: functions of the step, or constants."""
    healthy: dict[str, Any] = {
        "seconds": lambda step: 4.0 * step, "accuracy": curve((1, 0.2), (20, 0.7), (80, 0.88), noise=0.1, seed=1), "accuracy_sampled": None,
        "entropy": curve((1, 1.2), (10, 0.6), (20, 0.3), (40, 0.15), (80, 0.12), noise=0.15, seed=2),
        "response_tokens": curve((1, 2.9), (80, 3.0), noise=0.02, seed=3), "share_truncated": curve((1, 0.2), (20, 0.02), noise=0.3, seed=4),
        "share_no_spread": curve((1, 0.15), (20, 0.4), (40, 0.68), noise=0.3, seed=5), "share_rejected": 0.0,
        "staleness_histogram": lambda step: {"1": 1, "2": 14, "3": 1}, "grad_norm": curve((1, 3.0), (40, 1.5), (80, 2.5), noise=0.7, seed=6),
        "behavior_ess": flat(0.9, 0.1, 7), "behavior_weight_max": flat(8.0, 0.9, 8), "behavior_masked_share": flat(0.002, 0.9, 9),
        "logprob_gap_mean": flat(2e-4, 0.5, 10), "num_tokens_compared": lambda step: 0 if step % 3 == 0 else 400,
        "wait_batch_s": flat(0.2, 0.9, 11), "train_s": 3.0, "publish_s": 0.3, "replicas": 1, "rollout_idle_s": lambda step: 3.0 * step}
    return [{"step": number} | {name: value(number) if callable(value) else value for name, value in (healthy | curves).items()}
            for number in range(1, num_steps + 1)]


def alarms(records: Iterable[dict[str, Any]], config: Config | None = None) -> list[tuple[int, str, str]]:
    """What a run's records bring about: (step, alarm, 'begins' or 'over')."""
    health = Health(config or config_of())
    found = []
    for record in records:
        for line in health.step(record):
            name = re.fullmatch(r"alarm (\w+), since step .*", line, re.DOTALL)
            assert name is not None
            found.append((record["step"], name[1], "over" if line.endswith(": over") else "begins"))
    return found


# -- runs that learn -----------------------------------------------------------------------------------------------------

EXPERIMENTS: dict[str, dict[str, Any]] = {  # docs/results.md
    "demo": {},
    "code_tiny": {
        "accuracy": curve((5, 0.324), (15, 0.629), (25, 0.809), (35, 0.793), noise=0.12, seed=20),
        "entropy": curve((1, 1.3), (5, 1.0), (15, 0.35), (25, 0.14), (35, 0.13), noise=0.2, seed=21),
        "share_no_spread": curve((5, 0.15), (15, 0.35), (25, 0.64), (35, 0.68), noise=0.4, seed=22)},
    "gsm_symbolic": {
        "accuracy": curve((5, 0.141), (15, 0.281), (25, 0.447), (35, 0.489), noise=0.2, seed=23),
        "accuracy_sampled": curve((5, 0.101), (15, 0.212), (25, 0.371), (35, 0.425), noise=0.25, seed=24),
        "entropy": curve((5, 0.81), (15, 0.48), (25, 0.25), (35, 0.16), noise=0.2, seed=25), "share_no_spread": 0.0,
        "share_rejected": curve((5, 0.37), (25, 0.34), (35, 0.48), noise=0.5, seed=26), "wait_batch_s": flat(7.0, 0.2, 27)},
    "multi_turn": {
        "accuracy": curve((5, 0.234), (14, 0.475), (23, 0.682), (41, 0.768), noise=0.12, seed=28),
        "entropy": curve((5, 0.67), (14, 0.24), (23, 0.19), (41, 0.14), noise=0.2, seed=29),
        "response_tokens": curve((1, 9.0), (40, 6.0), noise=0.05, seed=30)},
    "slow start": {"accuracy": flat(0.03, 0.9, 31), "entropy": curve((1, 0.9), (80, 0.7), noise=0.1, seed=32)},
    "solved": {
        "accuracy": curve((1, 0.2), (30, 1.0)), "entropy": curve((1, 1.0), (30, 0.001), noise=0.2, seed=33),
        "share_no_spread": flat(0.6, 0.4, 34)},
    "longer answers that are right": {
        "response_tokens": curve((1, 3.0), (80, 11.0), noise=0.05, seed=35), "share_truncated": curve((1, 0.01), (80, 0.05), noise=0.5, seed=36)},
    "a slow evaluation now and then": {"wait_batch_s": lambda step: 60.0 if step % 10 == 0 else 0.2},
    "one wild step": {"grad_norm": lambda step: 500.0 if step == 40 else 2.0, "behavior_weight_max": lambda step: 1e6 if step == 40 else 5.0,
                      "behavior_ess": lambda step: 0.01 if step == 40 else 0.9, "logprob_gap_mean": lambda step: 3.0 if step == 40 else 1e-4},
}


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_runs_that_learn_raise_no_alarm(name: str) -> None:
    assert alarms(series(**EXPERIMENTS[name])) == []


# -- one alarm after the other -------------------------------------------------------------------------------------------

def fall(before: float, after: float, back: float, noise: float = 0.05) -> Curve:
    """`before` up to step 30, `after` from step 32 to 60, `back` from step 62 on."""
    return curve((30, before), (32, after), (60, after), (62, back), noise=noise, seed=40)


SINGLE = {"workflow__max_new_tokens": 512, "engine__context_length": 1024, "trainer__microbatch_tokens": 1024}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "entropy": ("entropy_collapse",
                {"entropy": fall(0.8, 0.01, 0.5), "accuracy": curve((1, 0.2), (20, 0.5), (62, 0.5), (80, 0.8), noise=0.02, seed=41)}, {},
                r"entropy is 0\.01\d*, below 0\.0\d+ \(alarms\.entropy=0\.05 of the beginning's 0\.\d+ nats\), and the gain in score is "),
    "sample size": ("exploding_weights", {"behavior_ess": fall(0.9, 0.1, 0.9)}, {}, "effective sample size of the importance weights is 0.1"),
    "largest weight": ("exploding_weights", {"behavior_weight_max": fall(5.0, 5e5, 5.0)}, {},
                       r"the largest importance weight is .*e\+05, above 1e\+03"),
    "masked": ("exploding_weights", {"behavior_masked_share": fall(0.002, 0.3, 0.01)}, {}, "share of tokens above algorithm.behavior_cap is 0.3"),
    "mismatch": ("logprob_mismatch", {"logprob_gap_mean": fall(1e-4, 0.02, 1e-4)}, {}, r"is 0\.0\d+, above 0\.001 \(selftest\.mean_tolerance"),
    "all wrong": ("equal_rewards", {"share_no_spread": fall(0.2, 0.99, 0.2, 0.01), "accuracy": flat(0.01)}, {},
                  r"whose rewards are all equal \(mean score 0\.01\) is (0\.9|1)"),
    "all rejected": ("equal_rewards", {"share_rejected": fall(0.2, 0.94, 0.2, 0.01), "share_no_spread": 0.0}, {}, "rejected by workflow.keep"),
    "truncated": ("growing_length", {"share_truncated": fall(0.05, 0.6, 0.05)}, {}, r"truncated responses, 0\.0\d+ in the beginning, is 0\.5"),
    "length": ("growing_length", {"response_tokens": fall(100.0, 480.0, 120.0)}, SINGLE,
               r"response length is 4\d\d, above 410 \(alarms\.length=0\.8 of workflow\.max_new_tokens=512\), and its multiple of"),
    "length of turns": ("growing_length", {"response_tokens": fall(300.0, 900.0, 310.0)}, SINGLE | {"workflow__name": "multi_turn"},
                        "engine.context_length=1024"),
    "waiting": ("starving_trainer", {"wait_batch_s": fall(0.5, 30.0, 0.5)}, {}, "in which the trainer waits for its batch is 0.9"),
    "idle": ("idle_rollouts", {"replicas": 4, "rollout_idle_s": curve((1, 0.0), (30, 30.0), (60, 30.0 + 30 * 4 * 3.6), (90, 500.0))}, {},
             "rollout workers have no lease is 0.9"),
    "accuracy": ("reward_collapse", {"accuracy": fall(0.6, 0.1, 0.6)}, {},
                 r"the mean score is 0\.1\d*, below 0\.3\d* \(alarms\.accuracy=0\.5 of its best, 0\.6"),
    "gradients": ("gradient_spikes", {"grad_norm": lambda step: 100.0 if 32 <= step <= 60 and step % 2 else 2.0}, {},
                  r"of 3 in 10 of the last 10 steps is 100, above 10 \(alarms\.grad_norm=5 times the 2 before"),
    "strangers": ("strangers", {"refused": curve((1, 2.0), (30, 2.0), (60, 500.0), (110, 500.0))}, {},
                  r"messages refused, over the last window, is [0-9.]+, above 20 \(alarms\.refused"),
    "stale": ("stale_data", {"staleness_histogram": lambda step: {"2": 8, "3": 8} if 32 <= step <= 60 else {"2": 16}}, {},
              "groups older than staleness.eta=2 is 0.5, above 0.2"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_an_alarm_begins_and_ends(name: str) -> None:
    alarm, curves, changes, words = CASES[name]
    records, config = series(num_steps=110, **curves), config_of(**changes)
    found = [(number, kind) for number, which, kind in alarms(records, config) if which == alarm]
    assert [kind for _, kind in found] == ["begins", "over"], found
    (began, _), (ended, _) = found
    assert 32 + STEPS - 1 <= began <= 60 < ended <= 110
    assert {which for _, which, _ in alarms(records, config)} == {alarm}, "no other one"
    health = Health(config)
    lines = [line for record in records[:began] for line in health.step(record)]
    [active] = health.active
    assert health.metrics == {"alarms": 1, "alarms_since": {alarm: active["since"]}} and 32 <= active["since"] <= began - STEPS + 1
    assert active["name"] == alarm and re.search(words, active["condition"]), active["condition"]
    assert lines == [f"alarm {alarm}, since step {active['since']}: {active['condition']}. Remedy: {active['remedy']}"]
    assert alarms(records, config_of(**changes, alarms__off=[alarm])) == []


@pytest.mark.parametrize(("changes", "curves"), [
    ({"algorithm__advantage": Advantage.batch_norm}, {"share_no_spread": 1.0}),
    ({"algorithm__behavior_level": ImportanceLevel.sequence}, {"behavior_ess": 0.01, "behavior_weight_max": 1e9}),
    ({"staleness__eta": 0}, {"wait_batch_s": 60.0, "replicas": 4, "rollout_idle_s": lambda step: 15.0 * step, "staleness_histogram": {"0": 16}}),
    ({"staleness__eta": 1, "staleness__warmup_steps": 20}, {
        "wait_batch_s": lambda step: 60.0 if step <= 20 else 0.2, "staleness_histogram": {"1": 16}}),
    ({}, {"rollout_idle_s": lambda step: 4.0 * step}),
    ({}, {"replicas": lambda step: 2 + step % 2, "rollout_idle_s": lambda step: 12.0 * step}),
    ({}, {"logprob_gap_mean": 1.0, "num_tokens_compared": 63}),
    ({}, {"share_truncated": 1.0, "response_tokens": 16.0}),
    ({}, {"grad_norm": lambda step: 0.0 if step < 40 else 2.0}),
    ({}, {"grad_norm": lambda step: 50.0 if step < 20 else 1.0 if step > 65 and step % 2 else 1e-3}),
    ({}, {"accuracy": curve((1, 0.04), (40, 0.01))}),
], ids=["whole batch", "sequence weights", "synchronous", "warm-up", "one worker", "workers come and go", "few tokens", "long from the beginning",
        "no gradient before", "gradients have faded", "chance"])
def test_what_is_no_fault(changes: dict[str, Any], curves: dict[str, Any]) -> None:
    assert alarms(series(**curves), config_of(**changes)) == []


def test_nothing_is_said_while_a_critic_warms_up() -> None:
    warming = config_of(algorithm__advantage=Advantage.gae, algorithm__critic_warmup_steps=40)
    trouble = series(behavior_ess=lambda step: 0.1, grad_norm=lambda step: 0.0 if step <= 40 else 2.0)
    assert alarms(trouble[:40], warming) == []
    assert alarms(trouble, warming) == [(40 + EARLIEST, "exploding_weights", "begins")]
    assert alarms(trouble, config_of()) == [(EARLIEST, "exploding_weights", "begins")], "nor in the first steps"


def test_steps_without_a_figure_neither_count_nor_break_a_row() -> None:
    every_other = series(logprob_gap_mean=0.5, num_tokens_compared=lambda step: 400 * (step % 2))
    assert alarms(every_other) == [(2 * EARLIEST - 1, "logprob_mismatch", "begins")]
    missing = [{key: value for key, value in record.items() if key != "behavior_ess" or record["step"] % 2} for record in series(behavior_ess=0.1)]
    assert alarms(missing) == []  # the other figures of that alarm are there, and well


def test_a_supervised_run_has_its_own() -> None:
    supervised = config_of(run__kind=RunKind.supervised)
    assert tuple(alarms_of(supervised)) == SUPERVISED_ALARMS and tuple(alarms_of(config_of())) == RL_ALARMS
    learning = [{"step": number, "seconds": float(number), "loss": curve((1, 3.0), (80, 0.8), noise=0.05)(number), "entropy": 1e-3,
                 "grad_norm": flat(1.0, 0.5)(number), "wait_batch_s": 9.0, "train_s": 1.0, "response_tokens": 9.0} for number in range(1, 81)]
    assert alarms(learning, supervised) == []
    diverging = [record | ({"loss": 2.5} if record["step"] > 60 else {}) for record in learning]
    [(began, name, kind)] = alarms(diverging, supervised)
    assert (name, kind) == ("rising_loss", "begins") and 60 + STEPS <= began <= 80
    learned = [record | {"loss": 0.05 if record["step"] > 60 else 0.01} for record in learning]
    assert alarms(learned, supervised) == [], "five times next to nothing"


# -- the machine ---------------------------------------------------------------------------------------------------------

QUICK = {"alarms__window": 3, "alarms__steps": 2}
FIGURES = st.fixed_dictionaries({}, optional={
    "behavior_ess": st.sampled_from([0.05, 0.33, 0.9, None, math.nan]), "share_no_spread": st.sampled_from([0.0, 0.8, 1.0]),
    "accuracy": st.sampled_from([0.0, 0.1, 0.5, 1.0]), "grad_norm": st.sampled_from([0.0, 1.0, 90.0, None]),
    "entropy": st.sampled_from([0.0, 0.01, 1.0]), "staleness_histogram": st.sampled_from([{}, {"0": 3}, {"3": 2, "4": 2}]),
    "logprob_gap_mean": st.floats(0, 1), "num_tokens_compared": st.sampled_from([0, 64, 400]),
    "wait_batch_s": st.floats(0, 10), "train_s": st.just(1.0),
    "response_tokens": st.floats(1, 300), "share_truncated": st.floats(0, 1), "replicas": st.integers(0, 4), "rollout_idle_s": st.floats(0, 100)})
RECORDS = st.lists(FIGURES, max_size=60).map(
    lambda found: [{"step": number, "seconds": 2.0 * number} | figures for number, figures in enumerate(found, 1)])


def as_recorded(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As metrics.jsonl gives them back: what is not finite is null."""
    return json.loads(json.dumps([{key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
                                  for record in records]))


@given(RECORDS)
@settings(max_examples=150, deadline=None)
def test_alarms_begin_and_end_in_turn_and_after_enough_steps(records: list[dict[str, Any]]) -> None:
    config = config_of(**QUICK)
    last: dict[str, tuple[int, str]] = {}
    for number, name, kind in alarms(records, config):
        before, was = last.get(name, (config.alarms.window - 1, "over"))
        assert {was, kind} == {"begins", "over"}, "no alarm begins twice, or ends without having begun"
        assert number - before >= config.alarms.steps
        last[name] = (number, kind)
    health = Health(config)
    for record in records:
        health.step(record)
    assert set(health.metrics["alarms_since"]) == {name for name, (_, kind) in last.items() if kind == "begins"}


@given(RECORDS, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_fields_does_not_matter(records: list[dict[str, Any]], chance: random.Random) -> None:
    config = config_of(**QUICK)
    shuffled = [dict(chance.sample(list(record.items()), len(record))) for record in records]
    assert alarms(shuffled, config) == alarms(records, config)


@given(RECORDS, st.data())
@settings(max_examples=200, deadline=None)
def test_a_run_that_goes_on_has_the_alarms_of_one_that_never_stopped(records: list[dict[str, Any]], data: st.DataObject) -> None:
    config, cut = config_of(**QUICK), data.draw(st.integers(0, len(records)))
    unbroken, resumed = Health(config), Health(config)
    for record in records[:cut]:
        unbroken.step(record)
    resumed.resume(as_recorded(records[:cut]))
    for record in records[cut:]:
        assert resumed.step(record) == unbroken.step(record)
        assert (resumed.active, resumed.metrics) == (unbroken.active, unbroken.metrics)


def test_figures_between_limit_and_release_neither_begin_nor_end_an_alarm() -> None:
    between = AlarmsConfig().weight_ess * 1.1
    assert alarms(series(behavior_ess=between)) == []
    found = alarms(series(behavior_ess=lambda step: 0.1 if step <= 40 else between if step <= 60 else 0.9))
    assert [kind for _, _, kind in found] == ["begins", "over"] and found[1][0] > 60


def test_an_alarm_that_is_to_end_the_run_does() -> None:
    records, config = series(behavior_ess=0.1), config_of(alarms__stop=["exploding_weights"])
    health, warning = Health(config), Health(config_of())
    for record in records[: EARLIEST - 1]:
        health.step(record)
        assert health.cause == ""
    health.step(records[EARLIEST - 1])
    assert health.cause.startswith(f"alarm exploding_weights, since step {WINDOW}: the effective sample size")
    assert "Lower staleness.eta" in health.cause and "headway resume RUN alarms.stop=[]" in health.cause
    for record in records:
        warning.step(record)
    assert warning.active and warning.cause == ""


def test_a_run_that_goes_on_with_an_alarm_gets_its_time_before_it_ends() -> None:
    records, config = series(behavior_ess=0.1), config_of(alarms__stop=["exploding_weights"])
    health = Health(config)
    health.resume(records[:40])
    assert health.active and health.cause == ""
    for record in records[40 : 40 + STEPS - 1]:
        assert health.step(record) == [] and health.cause == ""
    health.step(records[40 + STEPS - 1])
    assert health.cause


# -- config and remedies -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ALARMS)
def test_remedies_name_keys_that_there_are(name: str) -> None:
    config = Config()
    keys = re.findall(r"\b([a-z]+)\.([a-z_]+)", re.sub(r"\w+\.jsonl", "", _ALL[name].remedy))
    assert keys, "a remedy is something to change"
    for part, key in keys:
        assert hasattr(getattr(config, part, None), key), f"{part}.{key}"


def test_every_alarm_is_documented() -> None:
    text = (Path(__file__).parents[5] / "docs" / "health.md").read_text()
    for name in (*ALARMS, *(f"alarms.{key}" for key in AlarmsConfig.__dataclass_fields__)):
        assert f"`{name}`" in text, name
    assert set(_ALL) == set(ALARMS)


@pytest.mark.parametrize(("changes", "words"), [
    ({"stop": ["entropy"]}, r"alarms.stop=\['entropy'\]: must be among entropy_collapse"), ({"off": ["x"]}, "alarms.off"),
    ({"stop": ["stale_data"], "off": ["stale_data"]}, "must not be in alarms.off too"), ({"window": 0}, "alarms.window=0: must be at least 1"),
    ({"steps": 0}, "alarms.steps"), ({"equal": 1.0}, "alarms.equal=1.0: must be between 0 and 1"), ({"waiting": 0.0}, "alarms.waiting"),
    ({"grad_norm": 1.0}, "alarms.grad_norm=1.0: must be greater than 1"), ({"loss": math.inf}, "alarms.loss"),
    ({"entropy": math.nan}, "alarms.entropy"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_limits_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AlarmsConfig(**changes).check()


def test_an_alarm_that_is_not_judged_may_not_be_asked_to_end_a_run() -> None:
    config = FullConfig()
    config.model.path = "/model"
    with pytest.raises(ConfigError, match=r"alarms.stop=\['rising_loss'\]: must be among entropy_collapse, .* of reinforcement learning, and would"):
        changed(config, ["alarms.stop=[rising_loss,gradient_spikes]"])
    with pytest.raises(ConfigError, match=r"alarms.stop=\['entropy_collapse'\]: must be among rising_loss, .* of supervised runs, and would end"):
        AlarmsConfig(stop=["entropy_collapse"]).check_judged(supervised=True)
    AlarmsConfig(stop=["gradient_spikes", "rising_loss"]).check_judged(supervised=True)


def test_a_run_that_an_alarm_has_ended_can_go_on_without_it() -> None:
    config = FullConfig()
    config.model.path, config.alarms.stop = "/model", ["stale_data"]
    assert changed(config, ["alarms.stop=[]"]).alarms.stop == []
    assert changed(config, ["alarms.stop=[stale_data,idle_rollouts]"]).alarms.stop == ["stale_data", "idle_rollouts"]
    with pytest.raises(ConfigError, match="must be among"):
        changed(config, ["alarms.stop=stale"])


# -- where they are shown ------------------------------------------------------------------------------------------------

def test_the_live_view_shows_alarms_with_their_remedies() -> None:
    health = Health(config_of())
    for record in series(behavior_ess=0.1):
        health.step(record)
    text = shown(status(alarms=health.active), width=600)
    assert "alarm exploding_weights, since step 10: the effective sample size of the importance weights is 0.1, below 0.3" in text
    assert "remedy: the policy has moved too far from what sampled the data. Lower staleness.eta" in text
    assert "alarm" not in shown(status(alarms=[])) and "alarm" not in shown(status())


def test_plain_output_has_a_line_when_one_begins_or_ends(tmp_path: Path) -> None:
    console, follower = Console(file=StringIO(), width=80), Follower(RunFolder.create(tmp_path / "run"))
    _print_lines(console, follower, [step(4, 1.0), step(5, 2.0, alarm_changes=["alarm stale_data, since step 1: over"])], [], "")
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3 and lines[2] == "alarm stale_data, since step 1: over"


def test_the_coordinator_records_what_alarms_are_judged_by() -> None:
    play = Play(workflow__max_new_tokens=1, evaluation__enabled=False)
    granted = play.begin()
    play.tell(TRAINER, BatchRequest(0))
    for lease in granted[:2]:
        play.finish(lease)
    play.publish(1)
    [record] = only(play.core.training.records, StepRecord)
    line = step_record(play.core, record, 1.0, 0)
    assert line["replicas"] == 1 and line["share_truncated"] == 1.0 and line["share_no_spread"] == 1.0
    assert Health(play.core.config).step(line) == []
