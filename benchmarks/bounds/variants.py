"""Real runs for benchmarks.bounds: `experiment=tiny` by the launcher, with the embedded engine and the real trainer, under each bound."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.launched import run_to_end

ETA, CONCURRENCY = 4, 32
COMMON = ("experiment=tiny", f"staleness.eta={ETA}", f"rollout.concurrency={CONCURRENCY}", "data.num_heldout=30", "trainer.export_final=false",
          "evaluation.every_steps=0")
VARIANTS: dict[str, tuple[str, ...]] = {
    "admission": (), "hard": ("staleness.bound=hard",), "admission, auto": ("rollout.concurrency=auto",),
    "hard, target 2": ("staleness.bound=hard", "staleness.target=2"),
    "hard, auto, target 2": ("staleness.bound=hard", "rollout.concurrency=auto", "staleness.target=2"),
}


def run_once(overrides: tuple[str, ...], seed: int) -> dict[str, Any]:
    """The summary of one complete run, with the concurrency of its last step. Raises RuntimeError with the launcher's output if it fails."""
    with tempfile.TemporaryDirectory(prefix="headway-benchmark-") as temporary:
        path = Path(temporary) / "run"
        settings = {one.partition("=")[0]: one for one in (*COMMON, *overrides)}  # a key is given once
        run_to_end(*settings.values(), f"run.seed={seed}", f"run.dir={path}")
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((path / "summary.json").read_text())
        return summary | {"concurrency": records[-1]["concurrency"], "waited_s": sum(record["wait_batch_s"] for record in records),
                          "trained_s": records[-1]["seconds"] - records[0]["seconds"]}


def run_variant(name: str, num_seeds: int) -> dict[str, Any]:
    """Runs of one variant with seeds 0, 1, ...: prints their line, returns their figures."""
    runs = [run_once(VARIANTS[name], seed) for seed in range(num_seeds)]
    ages = Counter({age: sum(run["staleness_histogram"].get(str(age), 0) for run in runs)
                    for age in range(max(run["max_staleness"] for run in runs) + 1)})
    total = sum(ages.values())
    accuracy = [run["heldout_after"] for run in runs]
    figures = {
        "variant": name, "accuracy": [round(value, 3) for value in accuracy], "accuracy_mean": round(statistics.mean(accuracy), 4),
        "before": [round(run["heldout_before"], 3) for run in runs], "head_mean": round(sum(age * count for age, count in ages.items()) / total, 3),
        "head_most": max(ages), "head_over": round(sum(count for age, count in ages.items() if age > ETA) / total, 4),
        "concurrency": [run["concurrency"] for run in runs], "seconds": [round(run["trained_s"], 1) for run in runs],
        "wait": round(sum(run["waited_s"] for run in runs) / sum(run["seconds"] for run in runs), 3)}
    print("{variant:<22} held-out accuracy {accuracy} (before {before}), heads: mean age {head_mean}, at most {head_most}, {head_over:.1%} over eta; "
          "concurrency at the end {concurrency}; {seconds} s from step 1 to the last, trainer waits {wait:.1%}".format(**figures), flush=True)
    return figures
