"""What the curves of a report are made of: series, scales, layers of time. Pure."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report import ages, plot, timeline
from launcher.report.changes import Change, changes, defaults
from launcher.report.curves import interval, slots_used
from launcher.report.plot import Label, Scale, Trace, line_chart, nice_ticks, scale_of, spread
from launcher.report.record import number, read
from launcher.report.series import increments, rates, smooth, thin, values, wilson, words
from tests.support.report_runs import make, write_lines
from workers.run import incarnations

NUMBERS = st.floats(-1e9, 1e9, allow_subnormal=False)
POINTS = st.lists(st.tuples(st.integers(0, 10_000), NUMBERS), min_size=1, max_size=400, unique_by=lambda point: point[0]).map(
    lambda points: sorted((float(at), value) for at, value in points))


@pytest.mark.parametrize(("value", "expected"), [(1, 1.0), (0.5, 0.5), (True, None), ("1", None), (None, None), (math.nan, None), (math.inf, None),
                                                 (10**400, None), ([1], None)],
                         ids=["int", "float", "bool", "text", "none", "nan", "inf", "huge", "list"])
def test_what_is_a_number(value: object, expected: float | None) -> None:
    assert number(value) == expected


def test_series_leave_out_what_is_not_there() -> None:
    records = [{"step": 1, "x": 1.0}, {"step": 2}, {"x": 3.0}, {"step": 4, "x": None}, {"step": 5, "x": 2}]
    assert values(records, "x") == [(1.0, 1.0), (5.0, 2.0)]
    assert increments([{"t": 5}, {"t": 7}, {}, {"t": 6}, {"t": 10}], "t") == [5, 2, 0, 0, 4], "a total that falls has lost a worker"
    grown = [{"step": 1, "seconds": 10, "t": 100}, {"step": 2, "seconds": 12, "t": 150}, {"step": 3, "seconds": 12, "t": 160}]
    assert rates(grown, "t") == [(2.0, 25.0)], "the first step holds the start of the run, the last one took no time"


@given(POINTS, st.integers(1, 40))
def test_smoothing_keeps_places_and_stays_within_the_values(points: list[tuple[float, float]], width: int) -> None:
    result = smooth(points, width)
    assert [at for at, _ in result] == [at for at, _ in points]
    low, high = min(value for _, value in points), max(value for _, value in points)
    slack = 1e-6 * max(1.0, abs(low), abs(high)) * len(points)
    assert all(low - slack <= value <= high + slack for _, value in result)


def test_smoothing_leaves_a_straight_line_as_it_is() -> None:
    line = [(float(at), 2.0 * at) for at in range(50)]
    assert smooth(line, 9) == [(at, pytest.approx(value)) for at, value in line]


@given(POINTS, st.integers(4, 60))
def test_thinning_keeps_ends_and_extremes(points: list[tuple[float, float]], limit: int) -> None:
    result = thin(points, limit)
    assert len(result) <= max(len(points) if len(points) <= limit else 0, limit + 3) and result[0] == points[0] and result[-1] == points[-1]
    assert set(result) <= set(points) and [at for at, _ in result] == sorted(at for at, _ in result)
    assert {value for _, value in result} >= {min(value for _, value in points), max(value for _, value in points)}


@given(st.integers(0, 400), st.integers(1, 400))
def test_wilsons_interval_holds_the_share(right: int, more: int) -> None:
    count = right + more
    low, high = wilson(right / count, count)
    assert 0 <= low <= right / count <= high <= 1 and high - low < 1


@pytest.mark.parametrize(("value", "said"), [(0.0, "0"), (3.0, "3"), (0.125, "0.125"), (12.345, "12.3"), (9999.0, "9999"), (12_300.0, "12.3k"),
                                             (4.5e6, "4.5M"), (2e-5, "2e-05"), (-1.5, "-1.5"), (2.5e9, "2.5G"), (999_999.0, "1000k")])
def test_numbers_in_words(value: float, said: str) -> None:
    assert words(value) == said


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.booleans())
def test_a_scale_shows_every_number(numbers: list[float], log: bool) -> None:
    scale = scale_of(numbers, 100, 0, log)
    assert scale.low < scale.high and all(-0.1 <= scale.at(value) <= 100.1 for value in numbers)


@given(NUMBERS, st.floats(1e-6, 1e9), st.integers(1, 10))
def test_ticks_are_within_and_not_too_many(low: float, size: float, count: int) -> None:
    high = low + size
    if high - low < 1e-9 * abs(low):
        return
    ticks = nice_ticks(low, high, count)
    slack = (high - low) * 1e-6
    assert len(ticks) <= 2 * count + 2 and all(low - slack <= tick <= high + slack for tick in ticks)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_do_not_lie_on_each_other(places: list[float]) -> None:
    result = spread([Label(0, y, str(at), "") for at, y in enumerate(places)], 0, 100)
    assert len(result) == len(places)
    assert all(later.y - earlier.y >= plot.LABEL_GAP - 0.2 for earlier, later in itertools.pairwise(result))


@given(POINTS)
def test_charts_stay_in_their_frame(points: list[tuple[float, float]]) -> None:
    chart = line_chart("x", [Trace("a", points), Trace("b", points[:1], 1, dots=True)])
    assert chart is not None
    frame = chart.frame
    for hover in chart.hovers:
        assert frame.left - 0.2 <= hover.x and hover.x + hover.width <= frame.left + frame.width + 0.2
    assert len(chart.hovers) <= plot.MAX_HOVERS and all(len(path.d) < 10_000 for path in chart.paths)


def test_nothing_to_draw() -> None:
    assert line_chart("x", [Trace("a", [])]) is None and line_chart("x", []) is None


def test_the_trainers_time_adds_up_to_the_steps(tmp_path: Path) -> None:
    record = read(make(tmp_path / "run", None, (), 10))
    layers = {layer.name: layer.total for layer in timeline.trainer_layers(record)}
    assert layers == {"trains": 10.0, "waits for a batch": 5.0, "publishes weights": 2.5, "anything else": 2.25}, "the start, 0.25 s, is left out"
    lane = timeline.lane("x", timeline.trainer_layers(record), record)
    assert lane is not None and sum(share.share for share in lane.shares) == pytest.approx(1)


def test_the_rollout_workers_time_is_that_of_all_of_them(tmp_path: Path) -> None:
    record = read(make(tmp_path / "run", None, (), 10))
    layers = {layer.name: layer.total for layer in timeline.rollout_layers(record, 7)}
    assert layers == {"generate": 24.5, "have nothing to do": 10.0, "stand still for new weights": 5.0}, "two replicas for 20 s less 0.25 s"
    for line in record.steps:
        del line["replicas"]
    assert sum(layer.total for layer in timeline.rollout_layers(record, 7)) == 7 * 19.75, "without a record there are as many as planned"


def test_the_start_of_another_incarnation_is_nobodys_work(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, (), 10)
    incarnations.claim(run, "", "", 0, "here", 1, 6)
    record = read(run)
    trainer = {layer.name: layer.seconds for layer in timeline.trainer_layers(record)}
    assert trainer[timeline.STARTING] == [0.0] * 6 + [0.25] + [0.0] * 3 and trainer[timeline.REST][6] == 0
    rollouts = {layer.name: layer.seconds for layer in timeline.rollout_layers(record, 1)}
    assert rollouts[timeline.STARTING][6] == 0.5 and sum(layer[6] for layer in rollouts.values()) == sum(layer[5] for layer in rollouts.values())


def test_an_incarnation_before_which_nothing_was_done_is_marked_at_the_beginning(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, (), 10)
    incarnations.claim(run, "", "", 0, "here", 1, 0)
    marks, _ = timeline._epochs(read(run), 3.0, [2.0 * at for at in range(1, 11)], Scale(3.0, 13.0, 50.0, 150.0))
    assert marks == [50.0]


def test_what_workers_waited_between_two_incarnations_is_no_time_of_the_run(tmp_path: Path) -> None:
    """The training job was in the queue for two hours; rollout workers outlived it."""
    run = make(tmp_path / "run", None, (), 3)
    write_lines(run.metrics, [{"step": at, "seconds": 10 * at, "replicas": 2, "train_s": 6.0, "rollout_idle_s": 2.0 * at + 14400 * (at > 2),
                               "weight_update_s": 1.0 * at + 300 * (at > 2)} for at in (1, 2, 3, 4)])
    incarnations.claim(run, "", "", 0, "here", 1, 2)
    rollouts = {layer.name: layer.seconds for layer in timeline.rollout_layers(read(run), 1)}
    assert rollouts[timeline.IDLE] == [2.0, 2.0, 0.0, 2.0] and rollouts[timeline.UPDATING] == [1.0, 1.0, 0.0, 1.0]
    assert rollouts[timeline.STARTING] == [0.0, 0.0, 8.0, 0.0] and rollouts[timeline.GENERATING][2] == 12.0


def test_workers_that_come_and_go_make_no_time(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None, (), 3)
    write_lines(run.metrics, [{"step": 1, "seconds": 10, "replicas": 1, "rollout_idle_s": 90.0, "weight_update_s": 3.0},
                              {"step": 2, "seconds": 20, "replicas": 1, "rollout_idle_s": 2.0, "weight_update_s": 90.0}])
    layers = timeline.rollout_layers(read(run), 1)
    assert all(value >= 0 for layer in layers for value in layer.seconds)
    assert [sum(layer.seconds[at] for layer in layers) for at in (0, 1)] == [10.0, 10.0]


def test_slots_in_use_are_the_samples_that_ran_over_all_that_could(tmp_path: Path) -> None:
    engine = {"engine": {"num_slots": 8, "parallel": {"tp": 1, "pp": 1}}, "allocation": {"replica_size": 2}}
    record = read(make(tmp_path / "run", engine, (), 4))
    expected = pytest.approx(12 / (2 * 2 * 8))  # 24 sample seconds in 2 s, two workers of two servers
    assert slots_used(record) == [(step, expected) for step in (2, 3, 4)]


def test_ages_of_all_consumed_groups(tmp_path: Path) -> None:
    record = read(make(tmp_path / "run", {"staleness": {"eta": 1}}, (), 10))
    found = ages.ages(record)
    assert found.counts == {0: 20, 2: 60} and found.total == 80 and found.stale == 0.75 and found.beyond == 0.75
    chart = ages.histogram(found)
    assert chart is not None and [path.css for path in chart.paths] == ["bar tone0", "bar late", "line bound"]
    assert [label.text for label in chart.labels] == ["25.0%", "75.0%", "η = 1"]


@pytest.mark.parametrize(("control", "traces"), [("eta", 3), ("divergence", 4)])
def test_the_lead_is_drawn_where_something_moves_it(tmp_path: Path, control: str, traces: int) -> None:
    chart = ages.over_steps(read(make(tmp_path / "run", {"staleness": {"eta": 4, "control": control}}, (), 10)), 4.0)
    assert chart is not None and len(chart.legend) == traces and ("lead" in {each.name for each in chart.legend}) is (control == "divergence")


@pytest.mark.parametrize("oldest", [0, 39, 40, 1000])
def test_old_groups_share_bars(tmp_path: Path, oldest: int) -> None:
    run = make(tmp_path / "run", None, (), 1)
    write_lines(run.metrics, [{"step": 1, "staleness_histogram": {"0": 3, str(oldest): 1}}])
    chart = ages.histogram(ages.ages(read(run)))
    assert chart is not None and 1 <= sum(path.css.startswith("bar") for path in chart.paths) <= ages.MAX_BARS


@pytest.mark.parametrize(("evaluation", "expected"), [
    ({"step": 3, "accuracy": 0.5, "avg": {"mean": 0.5, "low": 0.4, "high": 0.6}}, (3.0, 0.4, 0.6)), ({"step": 3, "accuracy": 0.5}, None),
    ({"step": 3, "accuracy": 0.5, "num_prompts": 4, "num_failed": 4}, None), ({"accuracy": 0.5, "num_prompts": 4}, None)],
    ids=["told", "unknown", "all_failed", "no_step"])
def test_intervals_are_those_on_record(evaluation: dict, expected: tuple[float, float, float] | None) -> None:
    assert interval(evaluation) == expected


def test_intervals_without_a_record_come_from_the_number_of_prompts() -> None:
    found = interval({"step": 1, "accuracy": 0.5, "num_prompts": 100, "num_failed": 0})
    assert found == (1.0, pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))


@pytest.mark.parametrize("kind", ["rl", "supervised"])
def test_the_difference_to_the_composed_defaults(kind: str) -> None:
    standard = defaults(kind)
    assert standard["run.kind"] == kind and "trainer.lr" in standard
    config = {key: value for key, value in standard.items() if key.startswith(("trainer.", "staleness."))}
    assert changes(config, standard) == []
    changed = config | {"trainer.lr": 0.5, "run.name": "x", "own.key": [1], "model.path": "/m"}
    assert changes(changed, standard) == [Change("trainer.lr", str(standard["trainer.lr"]), "0.5"), Change("own.key", "not there", "[1]"),
                                          Change("model.path", '""', "/m")]
