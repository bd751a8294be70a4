"""A run of a benchmark, by the launcher, to its end; a signal that ends the benchmark ends the run with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.children import ROOT
from launcher.interrupts import interruptible


@contextlib.contextmanager
def ended_with_us(process: subprocess.Popen) -> Iterator[None]:
    """Tell `process` to end, and wait for that, where the block is left before it has ended; SIGINT, SIGTERM and SIGHUP leave it."""
    with interruptible():
        try:
            yield
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def run_to_end(*overrides: str, **environment: str) -> None:
    """`headway --plain OVERRIDES`, of which nothing is shown. Raises RuntimeError with its output if it fails."""
    usual = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen([sys.executable, "-m", "launcher", "--plain", *overrides], cwd=ROOT, env=os.environ | usual | environment,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with ended_with_us(process):
        output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(overrides)}: the run ended with status {process.returncode}:\n{output[-3000:]}\n{errors[-3000:]}")
