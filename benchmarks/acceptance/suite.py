"""Tests that must all pass here, and of which none may be left out: `suite PATH ...`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.acceptance.running import tell


def main(*paths: str) -> None:
    """Run, count, and tell."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *paths], stdout=sys.stderr, check=False,
                       env={**os.environ, "HEADWAY_SGLANG_DEVICE": "cuda", "HEADWAY_TEST_GPU": "1"})
        suites = list(ElementTree.parse(report).getroot().iter("testsuite")) if report.exists() else []
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")}
    bad = counts["failures"] + counts["errors"] + counts["skipped"]
    tell(f"{counts['tests'] - bad} of {counts['tests']}", counts["tests"] > 0 and not bad,
         f"{counts['failures'] + counts['errors']} failed, {counts['skipped']} left out" if bad else "")


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if not argument.startswith("--")])
