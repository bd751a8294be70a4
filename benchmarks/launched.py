"""A run of a benchmark, by the launcher, to its end; a signal that ends the benchmark ends the run with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.children import ROOT
from launcher.interrupts import interruptible


@contextlib.contextmanager
def ended_with_us(command: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process, told to end, once, where the block is left before it has ended; SIGINT, SIGTERM and SIGHUP leave it. `options`: of Popen."""
    with interruptible():
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0, **options)  # not in reach of a terminal's Ctrl-C
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate()


def run_to_end(*overrides: str, **environment: str) -> None:
    """`headway --plain OVERRIDES`, of which nothing is shown. Raises RuntimeError with its output if it fails."""
    usual = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with ended_with_us([sys.executable, "-m", "launcher", "--plain", *overrides], env=os.environ | usual | environment,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(overrides)}: the run ended with status {process.returncode}:\n{output[-3000:]}\n{errors[-3000:]}")
