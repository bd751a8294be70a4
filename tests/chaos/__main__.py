"""`make chaos MINUTES=60`: prints what breaks and what has come of it, and fails where something is not as it should be. `SEED`: the same again."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.campaign import campaign
from tests.slurm.cluster import available

parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
parser.add_argument("--minutes", type=float, default=60.0)
parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
parser.add_argument("--keep", type=Path, default=None, help="a folder to keep the run's logs and journal in")
arguments = parser.parse_args()
if reason := available():
    sys.exit(f"no chaos here: {reason}")
seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
print(f"seed {seed}", flush=True)
with tempfile.TemporaryDirectory() as folder:
    findings = campaign(Path(folder), arguments.minutes, seed, lambda text: print(text, flush=True), arguments.keep)
findings.rows.clear()  # they have been printed
print(findings, flush=True)
sys.exit(bool(findings.faults) or not findings.begun)
