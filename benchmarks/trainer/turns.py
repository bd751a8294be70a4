"""What all systems of benchmarks.trainer share: the hyper-parameters of their optimizers, and when they step and answer."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TextIO

import torch

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-6, (0.9, 0.95), 1e-5, 0.05, 1.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Turns:
    """Steps when told to, and their time; what libraries print goes to standard error."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._started = self._ended = (0.0, 0.0)

    def wait(self) -> None:
        """Until the next line; ends the process where no more come. A step begins."""
        if not sys.stdin.readline():
            os._exit(0)
        self.begin()

    def begin(self) -> None:
        """The step begins only here."""
        self._started = _now()

    def end(self) -> None:
        """The step is done."""
        self._ended = _now()

    def answer(self, grad_norm: float) -> None:
        """Give the figures of the step that was just made."""
        seconds, cpu_seconds = (end - start for start, end in zip(self._started, self._ended, strict=True))
        resident = int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
        peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else resident
        self._answers.write(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "grad_norm": grad_norm, "peak_mib": peak / 2**20}) + "\n")


def _now() -> tuple[float, float]:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()
