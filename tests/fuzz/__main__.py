"""`make fuzz MINUTES=60`: a long campaign; prints what it has found, and fails where it has found anything."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.fuzz.campaign import campaign

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
parser.add_argument("--minutes", type=float, default=60.0)
parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
arguments = parser.parse_args()
seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
with tempfile.TemporaryDirectory() as folder:
    findings = campaign(Path(folder) / "run", arguments.minutes, seed)
print(findings, flush=True)
sys.exit(bool(findings.faults))
