"""The processes of a local gang, from rank 0's point of view."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import psutil

from workers.run.folder import RunFolder
from workers.slurm.job import Place
from workers.trainer.local_ranks import LocalGang, place


def test_the_first_rank_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    run, told, once = RunFolder.create(tmp_path / "run"), list[str](), threading.Event()
    run.config.write_text("nonsense")
    gang = LocalGang(run, 3, 7, lambda cause: (told.append(cause), once.set()))
    assert once.wait(60)
    gang.join()
    assert told == [gang.first_failure(0)]
    first, *words = told[0].splitlines()
    assert first.startswith("training rank ") and first.endswith("exited with status 1")
    assert "not a readable run config" in words[-1]
    assert sorted(path.name for path in run.jobs.iterdir()) == ["rank1.log", "rank2.log"]


def test_ranks_die_with_rank_0(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    code = ("import sys, pathlib\nfrom workers.run.folder import RunFolder\nfrom workers.trainer.local_ranks import LocalGang\n"
            "gang = LocalGang(RunFolder(pathlib.Path(sys.argv[1])), 2, 1, print)\nprint(gang._others[0].pid, flush=True)\nsys.stdin.read()")
    run.config.write_text("{}")  # all defaults: it waits for rank 0 to say where to meet
    with subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as zero:
        assert zero.stdout is not None
        other = psutil.Process(int(zero.stdout.readline()))
        zero.kill()
    gone, _ = psutil.wait_procs([other], timeout=120)
    assert gone


def test_a_rank_has_the_device_of_its_number() -> None:
    assert place(2, 4, 5) == Place(job="local", name="local", array="", restarts=5, rank=2, world_size=4, local_rank=2)
