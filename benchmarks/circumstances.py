"""What is to be known of a measurement to compare it with another one."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import torch

from benchmarks.children import ROOT
from benchmarks.journal import Record


def circumstances() -> Record:
    """When, on what, and with which code something is measured: `began` (UTC), `cpu`, `cores`, `commit` ('' outside of a checkout)."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {"began": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "cpu": f"{names[0] if names else platform.machine()}, "
            f"{torch.backends.cpu.get_cpu_capability()}", "cores": len(os.sched_getaffinity(0)), "commit": found.stdout.strip()}
