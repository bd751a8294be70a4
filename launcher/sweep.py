"""A sweep (`headway -m ...`): one run folder for each combination below the sweep's folder, and sweep.json, which lists them.

    {"runs": [{"index": 0, "overrides": ["staleness.eta=0"], "run": "/path/of/the/run"}, ...]}

On SLURM all runs are submitted at once. `launch.max_concurrent_runs=L` makes L lanes: the arrays of run i wait until those of run
i-L have ended.

The runs of a sweep on this machine come one after the other; when all have ended, report.html shows them side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.config.cluster import ROLES
from workers.config import require
from workers.run.files import write_atomic
from workers.run.folder import RunFolder

FILE = "sweep.json"
REPORT = "report.html"


def check_new(folder: Path, paths: Iterable[Path]) -> None:
    """Raise `ConfigError` where a sweep, or something in the place of one of its runs, is in its folder already."""
    require(not (folder / FILE).exists() and not any(path.exists() for path in paths), "hydra.sweep.dir", str(folder),
            "holds runs of a sweep already; a sweep starts in a folder of its own",
            "Choose another one, or leave it out to get a new name; `headway resume RUN` goes on with one of these runs")


@dataclass(frozen=True)
class Sweep:
    """One combination of a sweep: its number and overrides."""

    folder: Path
    index: int
    overrides: tuple[str, ...]

    def run_path(self, name: str) -> Path:
        """The folder of this combination's run."""
        return self.folder / f"{self.index:03d}-{name}"

    def runs(self) -> list[dict]:
        """The combinations that have been started so far."""
        try:
            return json.loads((self.folder / FILE).read_bytes())["runs"]
        except FileNotFoundError:
            return []

    def add(self, run: RunFolder) -> None:
        """Write down that this combination has been started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entry = {"index": self.index, "overrides": list(self.overrides), "run": str(run.path)}
        write_atomic(self.folder / FILE, json.dumps({"runs": [*self.runs(), entry]}, indent=2).encode())

    def after(self, num_lanes: int) -> tuple[str, ...]:
        """The SLURM jobs of the run before this one in its lane; none with `num_lanes=0`."""
        before = [entry for entry in self.runs() if num_lanes and entry["index"] % num_lanes == self.index % num_lanes]
        if not before:
            return ()
        run = RunFolder(Path(before[-1]["run"]))
        return tuple(array for role in ROLES for array in run.arrays(role))
