"""`make soak STEPS=10000`: prints a table, and fails where anything grows."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.soak.campaign import campaign

parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
parser.add_argument("--steps", type=int, default=10_000)
arguments = parser.parse_args()
with tempfile.TemporaryDirectory() as folder:
    findings = campaign(Path(folder) / "run", arguments.steps)
print(findings, flush=True)
sys.exit(bool(findings.faults))
