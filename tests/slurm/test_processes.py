"""Which processes belong to a cluster; without SLURM."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import SlurmRun
from workers.run.folder import RunFolder

pytestmark = pytest.mark.quick


@contextlib.contextmanager
def started(cluster: LocalCluster, *command: str) -> Iterator[psutil.Process]:
    """A process that has said a word, with this cluster's environment."""
    process = subprocess.Popen(command, env={**os.environ, "SLURM_CONF": cluster.env["SLURM_CONF"]}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield psutil.Process(int(process.stdout.readline()))
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def test_a_run_sees_no_process_of_another_cluster_whose_run_has_the_same_folder(tmp_path: Path) -> None:
    ours, theirs = LocalCluster(tmp_path / "a"), LocalCluster(tmp_path / "b")
    run = object.__new__(SlurmRun)  # one that is only looked at
    run.cluster, run.run, run.token = ours, RunFolder(tmp_path / "run"), "a token"
    task = ("bash", "-c", "echo $$; sleep infinity; true", str(tmp_path / "run"))
    bare = ("bash", "-c", f"env -i bash -c 'echo $$; sleep infinity; true' {tmp_path / 'run'}; true")  # as what it starts may have it
    with started(ours, *task) as first, started(theirs, *task), started(ours, *bare) as second, started(theirs, *bare):
        assert {process.pid for process in run.processes()} == {first.pid, second.pid, second.ppid()}
    assert run.processes() == []
