"""One cluster for all tests of a session; each test finds it as new.

All tests take half an hour together: only those marked `quick` run, unless HEADWAY_SLURM_ALL=1 (make test-slurm).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TOLD
from tests.slurm.cluster import LocalCluster, available

ALL = "HEADWAY_SLURM_ALL"
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: a test on a SLURM cluster that always runs; the others with HEADWAY_SLURM_ALL=1 only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get(ALL) == "1":
        return
    left_out = [item for item in items if item.path.parent == HERE and item.get_closest_marker("quick") is None
                and not any(arg.endswith(f"::{item.name}") for arg in config.args)]  # a test that is asked for by its name runs
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    if left_out:
        config.stash.setdefault(TOLD, []).append(
            f"tests/slurm: {len(left_out)} longer tests on a real SLURM cluster were left out. All of them: make test-slurm")


@pytest.fixture(scope="session")
def one_cluster() -> Iterator[LocalCluster]:
    reason = available()
    if reason is not None:
        pytest.skip(f"no SLURM cluster on this machine: {reason}")
    cluster = LocalCluster(NTRN=2)
    cluster.up()
    yield cluster
    cluster.down()


@pytest.fixture
def cluster(one_cluster: LocalCluster) -> Iterator[LocalCluster]:
    yield one_cluster
    one_cluster.reset()
