"""`make fuzz MINUTES=60`: a long campaign; prints what it has found, and fails where it has found anything."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.fuzz.campaign import campaign

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
parser.add_argument("--minutes", type=float, default=60.0)
parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
parser.add_argument("--keep", type=Path, default=None, help="a folder for the run's logs and journal, where anything is found")
arguments = parser.parse_args()
seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
with tempfile.TemporaryDirectory() as folder:
    findings = campaign(Path(folder) / "run", arguments.minutes, seed)
    if findings.faults and arguments.keep is not None:
        shutil.copytree(Path(folder) / "run", arguments.keep, ignore=shutil.ignore_patterns("checkpoints", "keys"), dirs_exist_ok=True)
print(findings, flush=True)
sys.exit(bool(findings.faults))
