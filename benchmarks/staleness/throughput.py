"""Throughput against eta, of real asynchronous runs: the workload and the measure of benchmarks.async_vs_sync, with other etas."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.async_vs_sync import WARM_UP, Variant, make_model, run_once
from benchmarks.staleness.figures import Record


def measure(wanted: Sequence[tuple[str, int]], steps: int, keep: Callable[[Record], None]) -> None:
    """Run each of `wanted`, (eta, number of the run), and give `keep` its figures. Raises RuntimeError where a run fails."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model")
        for eta, number in wanted:
            figures = run_once(Variant(f"eta {eta}", int(eta)), folder, steps, WARM_UP)
            keep({"eta": eta, "number": number, "rate": round(figures.rate, 1), "staleness": round(figures.staleness, 2),
                  "step_s": round(figures.step_s, 3), "wait_s": round(figures.wait_s, 3), "others_cores": round(figures.others, 2)})
