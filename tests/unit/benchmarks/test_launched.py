"""Runs of a benchmark end with it."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.launched import run_to_end

CHILD = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit('in order')); print('ready', flush=True); signal.pause()"
BENCHMARK = f"""
import subprocess, sys
from benchmarks.launched import ended_with_us
with ended_with_us([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True) as process:
    process.stdout.readline()
    print(process.pid, flush=True)
    process.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_ends_a_benchmark_ends_its_run_in_order(number: signal.Signals) -> None:
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert benchmark.stdout is not None
    child = psutil.Process(int(benchmark.stdout.readline()))
    benchmark.send_signal(number)
    _, said = benchmark.communicate(timeout=60)
    assert benchmark.returncode and "in order" in said and not child.is_running()


def test_a_run_that_fails_is_told_with_what_it_said() -> None:
    with pytest.raises(RuntimeError, match=r"run.num_steps=0: the run ended with status 2:\n\n.*must be at least 1"):
        run_to_end("run.num_steps=0")
