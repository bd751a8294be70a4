"""The split of devices: the rule, its limits, and the errors that name the nearest possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.device_split import plan, split
from workers.config import AllocationConfig, ConfigError, ParallelConfig


@given(st.integers(2, 1024), st.floats(0.01, 0.99), st.sampled_from([1, 2, 4, 8]), st.integers(1, 16))
def test_a_split_covers_the_devices_and_leaves_both_sides_something(devices: int, fraction: float, size: int, unit: int) -> None:
    if devices < size + unit:
        return
    plan = split(AllocationConfig(devices, fraction, size, devices_per_node=8), unit)
    assert plan.num_replicas >= 1 and plan.num_train_devices >= unit
    assert plan.num_train_devices % unit == 0 and 0 <= plan.num_unused < unit
    assert plan.num_inference_devices + plan.num_train_devices + plan.num_unused == devices
    assert plan.num_replicas == 1 or plan.num_inference_devices <= fraction * devices + 1e-6


@pytest.mark.parametrize(("devices", "size", "unit", "expected"), [
    (2, 1, 1, (1, 1)), (3, 1, 1, (2, 1)), (4, 1, 1, (3, 1)), (8, 1, 1, (6, 2)), (8, 2, 1, (3, 2)), (8, 4, 1, (1, 4)), (128, 8, 32, (12, 32)),
    (16, 1, 8, (8, 8)),
])
def test_the_papers_fraction(devices: int, size: int, unit: int, expected: tuple[int, int]) -> None:
    plan = split(AllocationConfig(devices, 0.75, size), unit)
    assert (plan.num_replicas, plan.num_train_devices) == expected


def test_decimal_fractions_are_not_missed_by_a_hair() -> None:
    assert split(AllocationConfig(10, 0.7)).num_replicas == 7
    assert split(AllocationConfig(100, 0.29)).num_replicas == 29


@pytest.mark.parametrize(("allocation", "unit", "words"), [
    (AllocationConfig(1), 1, "num_devices=2"), (AllocationConfig(0), 1, "num_devices=2"), (AllocationConfig(4, replica_size=4), 1, "num_devices=5"),
    (AllocationConfig(8, replica_size=3, devices_per_node=8), 1, r"\[1, 2, 4, 8\]"), (AllocationConfig(8), 8, "num_devices=9"),
    (AllocationConfig(4, min_replicas=4), 1, "min_replicas=3"), (AllocationConfig(8, replica_size=0), 1, "replica_size"),
])
def test_impossible_splits_name_the_nearest_possible(allocation: AllocationConfig, unit: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        split(allocation, unit)


@pytest.mark.parametrize(("parallel", "words"), [
    (ParallelConfig(tp=2, dp=2), r"dp=2: the split leaves training 8 devices, which hold 4 copies of tp=2.*Use trainer.parallel.dp=4"),
    (ParallelConfig(tp=4, cp=2, dp=3), r"hold 1 copy of tp=4, pp=1, cp=2"), (ParallelConfig(pp=2, ep=8), "ep=8: must divide the 4 devices"),
    (ParallelConfig(tp=32), "num_devices=33"),
])
def test_parallel_training_that_does_not_come_out_even_is_refused(parallel: ParallelConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(AllocationConfig(32), parallel)


def test_copies_of_the_model_that_fit_are_taken() -> None:
    assert plan(AllocationConfig(32), ParallelConfig(tp=2, pp=2, cp=2, ep=2, dp=1)).num_train_devices == 8
    assert plan(AllocationConfig(32), ParallelConfig(tp=2, ep=8)).num_train_devices == 8
