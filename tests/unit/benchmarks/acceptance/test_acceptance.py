"""`make gpu` on a machine without a GPU: all is left out, with its reason; and what also runs on CPUs does, in small."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from benchmarks.acceptance import checks, running
from benchmarks.acceptance.running import Result, judge, left_out, run, table

ROOT = Path(__file__).resolve().parents[4]
ALL = (*checks.ONE, *checks.EIGHT)


def acceptance(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    done = subprocess.run([sys.executable, "-m", "benchmarks.acceptance", "--out", str(out), *arguments], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False)
    return done, json.loads(out.read_text())["checks"]


def test_without_a_gpu_all_is_left_out_and_the_table_says_so(tmp_path: Path) -> None:
    done, results = acceptance(tmp_path / "file.json", "--gpus", "8")
    assert done.returncode == 0 and [result["status"] for result in results] == ["skipped"] * len(ALL)
    assert done.stdout.count("skip  ") == len(ALL) and "needs 8 GPUs, there are 0" in done.stdout and ">= 40 GB/s" in done.stdout


@pytest.mark.parametrize(("names", "told"), [
    (("publish", "all-reduce"), {}), pytest.param(("waits",), {"waits": "2 by the fake step"}, marks=pytest.mark.long)])
def test_what_runs_on_cpus_too_runs_in_small(tmp_path: Path, names: tuple[str, ...], told: dict[str, str]) -> None:
    done, results = acceptance(tmp_path / "file.json", "--gpus", "8", "--small", "--only", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {result["name"]: result["status"] for result in results} == dict.fromkeys(names, "measured")
    assert {result["name"]: result["told"] for result in results if result["name"] in told} == told


def test_names_are_told_where_there_is_no_such_check() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.acceptance", "--only", "x"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and "all-reduce" in done.stderr


@pytest.mark.parametrize(("num_gpus", "has_sglang", "small", "name", "words"), [
    (0, True, False, "memory", "needs 1 GPU, there are 0"), (1, False, False, "memory", ""), (1, False, False, "log-probs", "HEADWAY_SGLANG_PYTHON"),
    (1, True, False, "log-probs", ""), (1, True, False, "layouts", "needs 8 GPUs, there is 1"), (0, False, True, "log-probs", ""),
    (0, False, True, "cuda tests", "of GPUs alone")])
def test_what_cannot_run_here_says_why(num_gpus: int, has_sglang: bool, small: bool, name: str, words: str) -> None:
    told = left_out(next(check for check in ALL if check.name == name), num_gpus, has_sglang, small)
    assert told == "" if not words else words in told


def test_a_check_is_judged_by_its_last_line() -> None:
    said = 'noise\n{"value": 0.4, "passed": true, "told": "x"}\n'
    assert judge(said, 0, False) == ("passed", "0.4", "x") and judge(said, 0, True)[0] == "measured" and judge(said, 1, False)[0] == "failed"
    assert judge(said.replace("true", "false"), 0, False)[0] == "failed"
    for broken in ("", "noise", '{"value": 1}', "[]"):
        assert judge(broken, 0, False)[0] == "failed"


def test_a_check_that_takes_too_long_is_ended_with_all_that_it_has_started() -> None:
    script = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True, file=open(sys.argv[1], 'w')); time.sleep(600)"
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"acceptance-{os.getpid()}"
    slow = replace(checks.ONE[0], limit_s=6, arguments=("-c", script, str(file)))
    result = run(slow, small=False)
    assert (result.status, result.told) == ("failed", "not done in 6 s")
    started = int(file.read_text())
    file.unlink()
    with contextlib.suppress(ProcessLookupError):  # Gone, and reaped as well.
        ending = os.pidfd_open(started)
        assert select.select([ending], [], [], 60)[0], "what the check had started still runs a minute after its SIGKILL"
        os.close(ending)


def test_the_table_has_a_row_and_a_reason_for_each() -> None:
    results = [Result("a", "w", ">= 1", "passed", "2", "", 3.0), Result("bb", "w", "<= 9", "failed", "", "broke", 4.4)]
    head, first, second, *rest = table(results).splitlines()
    assert head == "      check  here  reference  seconds" and rest == ["", "bb: broke"]
    assert (first, second) == ("pass  a      2     >= 1       3", "FAIL  bb     -     <= 9       4")


def test_every_program_of_a_check_is_there() -> None:
    for check in ALL:
        module = check.arguments[1].rsplit(".", 1)[1]
        assert (Path(running.__file__).parent / f"{module}.py").is_file()
        assert all((ROOT / argument).exists() for argument in check.arguments[2:] if "/" in argument)
