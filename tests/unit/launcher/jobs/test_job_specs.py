"""What is submitted: shapes, chunks of wall time, arrays one after the other, and what fits under a submit limit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.cluster import ContainerKind
from launcher.config.device_split import split
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import JobSpec, even_sizes, fit, job_specs, num_chunks, waves
from launcher.slurm.submit_limits import Room
from workers.config import AllocationConfig, ClusterKind, ConfigError, EngineConfig, EngineParallelConfig, Server
from workers.entry import Element
from workers.run.folder import RunFolder

RUN = RunFolder(Path("/run"))


def config(devices: int = 4, per_node: int = 0, size: int = 1, **run: float) -> FullConfig:
    full = FullConfig()
    full.cluster.kind = ClusterKind.slurm
    full.allocation = AllocationConfig(devices, replica_size=size, devices_per_node=per_node)
    full.cluster.inference.time = full.cluster.train.time = "60"
    for name, value in run.items():
        setattr(full.run, name, value)
    return full


def specs(full: FullConfig, run: RunFolder = RUN) -> tuple[JobSpec, JobSpec]:
    return job_specs(full.plan(), full, run)


def spec(throttle: int, chunks: int) -> JobSpec:
    return JobSpec("inference", "x", Element("rollout", "/run"), throttle, chunks, 1, 1, 1, 3600, 1)


def test_one_element_a_replica_and_one_for_the_whole_gang() -> None:
    inference, train = specs(config(devices=8, max_hours=10))
    assert (inference.throttle, inference.nodes_per_element, inference.tasks_per_node, inference.devices_per_node) == (6, 1, 1, 1)
    assert (train.throttle, train.nodes_per_element, train.tasks_per_node, train.devices_per_node) == (1, 1, 2, 2)
    assert train.element == Element("train", "/run") and inference.element == Element("rollout", "/run")
    # 3600 s less 120 s for saving: 10 h take 11 jobs, and 3 are spare
    assert train.num_chunks == inference.num_chunks == 14 and inference.num_elements == 84


@pytest.mark.parametrize(("devices", "per_node", "size", "nodes", "each"), [(128, 8, 8, 4, 8), (16, 4, 1, 1, 4), (12, 8, 1, 1, 3), (64, 4, 4, 4, 4)])
def test_training_spreads_evenly_over_nodes(devices: int, per_node: int, size: int, nodes: int, each: int) -> None:
    inference, train = specs(config(devices, per_node, size))
    assert (train.nodes_per_element, train.tasks_per_node, train.devices_per_node) == (nodes, each, each)
    assert inference.devices_per_node == size


def test_what_does_not_spread_evenly_names_the_nearest() -> None:
    full = config(36, 8)
    assert split(full.allocation).num_train_devices == 9
    with pytest.raises(ConfigError, match="Use allocation.num_devices=32 or 37, or another allocation.inference_fraction"):
        specs(full)


@given(st.integers(2, 300), st.integers(1, 16), st.floats(0.1, 0.9))
def test_the_remedies_for_what_does_not_spread_evenly_help(devices: int, per_node: int, fraction: float) -> None:
    full = config(devices, per_node)
    full.allocation.inference_fraction = fraction
    try:
        specs(full)
    except ConfigError:
        sizes = even_sizes(full.allocation, full.allocation.devices_per_node)
        assert sizes
        for full.allocation.num_devices in sizes:
            specs(full)


def test_a_replica_over_several_nodes_takes_them_for_each_element() -> None:
    full = config(24, 4, 8)
    full.engine = EngineConfig(Server.sglang, parallel=EngineParallelConfig(tp=8))
    inference, train = specs(full)
    assert (inference.nodes_per_element, inference.tasks_per_node, inference.devices_per_node, inference.throttle) == (2, 1, 4, 2)
    assert "2 nodes x 4 device(s), 2 at a time" in inference.describe() and train.devices_per_element == 8


@pytest.mark.parametrize("path", ["/a/%j", "/a\nb", '/a"b', "/a\\b"])
def test_slurms_patterns_are_no_run_folder(path: str) -> None:
    with pytest.raises(ConfigError, match="run.dir"):
        specs(config(), RunFolder(Path(path)))


def test_a_container_is_shown_no_folder_that_its_list_would_part() -> None:
    full, run = config(), RunFolder(Path("/runs/2026-03-01T10:00:00"))
    specs(full, run)
    full.cluster.train.container.kind = ContainerKind.apptainer
    with pytest.raises(ConfigError, match="run.dir='/runs/2026-03-01T10:00:00': must hold no ':' or ',' with a container"):
        specs(full, run)


def test_on_one_machine_training_has_all_its_devices_whatever_nodes_have() -> None:
    full = config(devices=4)
    full.cluster.kind, full.allocation.inference_fraction, full.allocation.devices_per_node = ClusterKind.local, 0.5, 1
    train = specs(full)[-1]
    assert (train.nodes_per_element, train.devices_per_node, train.element.num_ranks) == (1, 2, 2)


def test_on_one_machine_there_is_one_chunk() -> None:
    full = config(devices=4)
    full.cluster.kind = ClusterKind.local
    inference, train = specs(full)
    assert (inference.num_elements, train.num_elements, train.tasks_per_node, train.time_limit_s) == (3, 1, 1, 86400)


@given(st.floats(0.05, 1000), st.integers(5, 10_000), st.integers(10, 140), st.integers(0, 9))
def test_chunks_cover_the_hours(hours: float, minutes: int, delay: int, spare: int) -> None:
    full = config(max_hours=hours)
    full.cluster.train.time, full.cluster.signal_delay_s, full.cluster.spare_chunks = str(minutes), delay, spare
    chunks = num_chunks(full, "train")
    useful = (minutes * 60 - delay) / 3600
    assert chunks >= 2 and (chunks - spare) * useful >= hours * (1 - 1e-9)
    assert chunks == 2 or (chunks - spare - 1) * useful < hours


@given(st.integers(1, 300), st.integers(1, 200), st.integers(2, 4000))
def test_waves_hold_all_elements_in_whole_chunks(throttle: int, chunks: int, largest: int) -> None:
    if throttle > largest:
        with pytest.raises(ConfigError, match="MaxArraySize"):
            waves(spec(throttle, chunks), largest)
        return
    sizes = waves(spec(throttle, chunks), largest)
    assert all(2 <= size <= largest for size in sizes) and sum(sizes) >= throttle * chunks
    assert all(size % throttle == 0 for size in sizes[:-1]) and sum(sizes) <= max(2, throttle * chunks + 1)


def test_a_cluster_without_arrays_is_refused() -> None:
    with pytest.raises(ConfigError, match="MaxArraySize=0"):
        waves(spec(1, 3), 0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(2, 60)), min_size=1, max_size=2), st.integers(0, 4000))
def test_what_fits_is_as_much_as_may_be_queued(shapes: list[tuple[int, int]], budget: int) -> None:
    full = tuple(spec(*shape) for shape in shapes)
    least = sum(max(2, one.throttle) for one in full)
    room = Room("MaxJobCount=9", budget, frozenset([full[0].role]))
    if budget < least:
        with pytest.raises(ConfigError, match="MaxJobCount=9: you may have .* or ask for a higher limit .cluster.max_submit=N"):
            fit(full, [room])
        return
    cut = fit(full, [room])
    assert sum(one.num_elements for one in cut) <= budget
    assert all(before.num_chunks >= after.num_chunks for before, after in zip(full, cut, strict=True))
    more = tuple(dataclasses.replace(one, num_chunks=min(before.num_chunks, one.num_chunks + 1)) for before, one in zip(full, cut, strict=True))
    assert cut == full or sum(one.num_elements for one in more) > budget, "one more chunk of each would not fit"


@given(st.integers(1, 20), st.integers(2, 60),
       st.lists(st.tuples(st.integers(60, 2000), st.sampled_from(["inference", "train", "both"])), max_size=4))
def test_every_limit_is_kept_by_the_roles_that_it_bears_on(throttle: int, chunks: int, limits: list[tuple[int, str]]) -> None:
    full = dataclasses.replace(spec(throttle, chunks), role="inference"), dataclasses.replace(spec(1, chunks), role="train")
    rooms = [Room("", left, frozenset(["inference", "train"] if roles == "both" else [roles])) for left, roles in limits]
    cut = fit(full, rooms)
    for room in rooms:
        assert sum(one.num_elements for one in cut if one.role in room.roles) <= room.left
    others = [Room("", -5, frozenset(["reward"])), *(room for room in rooms if "train" in room.roles)]
    assert fit(full[1:], others) == fit(full[1:], others[1:]), "limits of roles that are not submitted"
    for before, after in zip(full, cut, strict=True):
        bears = any(before.role in room.roles for room in rooms)
        assert after.num_chunks <= before.num_chunks and (bears or after == before), "others' limits do not count"


def test_the_description_is_for_people() -> None:
    inference, train = specs(config(128, 8, 8, max_hours=math.pi))
    assert train.describe() == "headway-train: 7 element(s) x 4 nodes x 8 device(s), 1 at a time, 7 chunks of 1 h"
    assert "12 at a time" in inference.describe()
