"""The prediction against the real coordinator in virtual time, and what must hold of it whatever the numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bounds.figures import simulate
from benchmarks.bounds.simulated_workers import Fleet
from benchmarks.bounds.simulation import Setting
from launcher.prediction.lengths import Lengths, mean_of_cut
from launcher.prediction.steady_state import Engine, Prediction, Work, predict
from workers.config import Bound

SIGMA = 0.8


def both(fleet: Fleet, eta: int, batch: int, group_size: int, concurrency: int | str, mean: float = 64, most: int = 512) -> tuple[float, Prediction]:
    """Tokens/s, simulated and predicted."""
    setting = Setting(f"lognormal:{mean:g}", eta, Bound.admission, concurrency, fleet=fleet, group_size=group_size, batch_groups=batch, num_steps=30,
                      warm_up=15, max_tokens=most)
    lengths = Lengths(mean_of_cut(math.log(mean) - SIGMA**2 / 2, SIGMA, most), SIGMA, most)
    work = Work(eta, batch, group_size, lengths, concurrency if isinstance(concurrency, int) else None)
    predicted = predict(Engine(fleet.half / fleet.peak, 1 / fleet.peak, fleet.slots, fleet.pause_s), fleet.num_engines, work,
                        work.tokens / fleet.trained_rate)
    return simulate(setting).speed * fleet.ideal_rate, predicted


@pytest.mark.parametrize(("eta", "batch", "group_size", "concurrency", "balance"), [
    (4, 16, 8, "auto", 1.0), (2, 64, 4, "auto", 2.0), (2, 64, 4, "auto", 0.5), (4, 32, 8, 12, 1.0), (0, 64, 8, "auto", 1.0),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (4, 64, 8, "auto", 1.0), (1, 32, 8, "auto", 1.0), (4, 32, 8, 48, 1.0), (0, 64, 4, "auto", 0.5)))])
def test_it_says_what_the_coordinator_comes_to(eta: int, batch: int, group_size: int, concurrency: int | str, balance: float) -> None:
    simulated, predicted = both(Fleet(num_engines=6, slots=32, pause_s=0.05, balance=balance), eta, batch, group_size, concurrency)
    assert predicted.tokens_per_s == pytest.approx(simulated, rel=0.15), predicted


engines = st.builds(Engine, st.floats(1e-4, 1), st.floats(1e-6, 1e-2), st.integers(1, 512), st.floats(0, 60), st.floats(0, 10))
works = st.builds(Work, st.integers(0, 8), st.integers(1, 4096), st.integers(1, 64), st.builds(Lengths, st.floats(2, 8000), st.just(SIGMA),
                                                                                           st.just(32000)),
                  st.one_of(st.none(), st.integers(1, 4096)), st.floats(0.05, 1))


@given(engines, st.integers(1, 4096), works, st.floats(1e-3, 1e4))
def test_whatever_the_numbers(engine: Engine, num_engines: int, work: Work, train_s: float) -> None:
    found = predict(engine, num_engines, work, train_s)
    assert 0 < found.tokens_per_s <= work.tokens / train_s * 1.001
    assert found.tokens_per_s <= num_engines * engine.rate(engine.slots) * 1.001
    assert found.step_s == pytest.approx(work.tokens / found.tokens_per_s)
    assert 0 <= found.slots_used <= 1 and 0 <= found.trainer_waits <= 1 and 0 <= found.age <= work.eta


@given(engines, st.integers(1, 512), works, st.floats(1e-3, 1e4))
def test_more_engines_or_a_faster_trainer_never_bring_less(engine: Engine, num_engines: int, work: Work, train_s: float) -> None:
    found = predict(engine, num_engines, work, train_s).tokens_per_s
    assert predict(engine, 2 * num_engines, work, train_s).tokens_per_s >= 0.98 * found
    assert predict(engine, num_engines, work, train_s / 2).tokens_per_s >= 0.98 * found


@pytest.mark.parametrize(("num_engines", "train_s", "concurrency", "limit"), [
    (1, 1.0, None, "engines"), (64, 1000.0, None, "trainer"), (512, 1.0, None, "staleness"), (64, 1.0, 8, "concurrency")])
def test_it_names_what_limits(num_engines: int, train_s: float, concurrency: int | None, limit: str) -> None:
    work = Work(2, 64, 8, Lengths(200.0, SIGMA, 2048), concurrency)
    assert predict(Engine(0.01, 1e-4, 32, 0.0), num_engines, work, train_s).limit == limit


def test_short_groups_are_limited_by_the_coordinator() -> None:
    work = Work(4, 512, 4, Lengths(8.0, SIGMA, 16), None)
    found = predict(Engine(1e-3, 1e-6, 512, 0.0), 512, work, 0.1)
    assert found.limit == "coordinator" and found.tokens_per_s == pytest.approx(1000 * 4 * 8.0, rel=0.01)
