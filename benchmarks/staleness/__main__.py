"""What staleness does: eta in {0, 1, 4, 8, 16} (2 and inf with --etas), naive against decoupled PPO, several seeds, real models of tiny size.

    python -m benchmarks.staleness [--model tiny|smollm2] [--out runs/staleness] [--seeds 8] [--no-throughput] [--quick]

    a supervised run (headway experiment=sft_tiny) --> OUT/start: one starting model for all, which is right now and then; SmolLM2: as it is
    runs not yet in OUT/runs.jsonl --> two lanes, each one process a run (run.py) --> OUT/runs.jsonl
    etas not yet in OUT/speeds.jsonl --> real asynchronous runs (throughput.py)   --> OUT/speeds.jsonl
                                         tables (figures.py), OUT/staleness.svg (plot.py), one JSON object

Staleness is injected: the batch of step v is sampled by version max(0, v - eta), all of it; with inf by the starting model. So what is
learned does not depend on the machine, and one seed gives all cells the same prompts and random numbers.
What eta buys is not to be seen there: throughput is measured by complete asynchronous runs, which take as much staleness as they need.

An interrupted command goes on where it was. `OUT` belongs to the settings that it was begun with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.children import Child
from benchmarks.journal import Journal, Record, open_folder
from benchmarks.launched import run_to_end
from benchmarks.staleness.figures import ETAS, OBJECTIVES, accuracy, accuracy_table, by_seed, course_table, speed_table
from benchmarks.staleness.throughput import measure
from workers.model.initialize import make_smollm2

SUMS = ("data.digits=2", "data.num_heldout=200")
START = ("run.num_steps=300", "trainer.batch_groups=128", "trainer.warmup_steps=20", "trainer.microbatch_tokens=4096", "evaluation.every_steps=0")
"""Beside conf/experiment/sft_tiny.yaml: the random tiny model is shown sums of two digits until it has some of them right."""
TASK = ("experiment=tiny", *SUMS, "reward.verifier=numeric", "workflow.max_new_tokens=5", "run.num_steps=100", "trainer.batch_groups=16",
        "trainer.num_minibatches=4", "trainer.lr=5e-5")
"""Beside conf/experiment/tiny.yaml; docs/staleness_study.md says how they were chosen: with eta=8 samples are less than 0.1 nats a token away."""
QUICK_START = (*START, "run.num_steps=2", "trainer.batch_groups=8", "trainer.warmup_steps=0")
QUICK = (*TASK, "run.num_steps=4", "trainer.num_minibatches=1", "trainer.batch_groups=2", "trainer.lr=1e-3", "workflow.group_size=4",
         "reward.verifier=numeric_distance")
"""Rewards that differ from the first step on: without, nothing would move."""
SMOLLM2 = ("experiment=demo", "run.target_accuracy=null", "run.num_steps=40", "trainer.lr_schedule=constant", "trainer.warmup_steps=0",
           "trainer.lr=1.5e-6", "trainer.min_lr=0", "trainer.batch_groups=8")
"""lr 2e-6 with 16 groups: at eta=8 0.08 (naive) and 0.12 nats a token, one seed; 5e-6: 0.11 and 0.2."""
EVERY = 10
TARGET = 0.8
SPEED_ETAS = ("0", "1", "2", "4", "8")
SPEED_STEPS = 18
CHOSEN = ["0", "1", "4", "8", "16"]


def make_start(out: Path, overrides: Sequence[str]) -> Path:
    """The starting model: SmolLM2 without `overrides`, else of a supervised run below `out`, unless that is there. Raises RuntimeError with the
    launcher's output if it fails."""
    if not overrides:
        make_smollm2(out / "smollm2")
        return out / "smollm2"
    run = out / "start"
    model = run / "final_model"
    if not model.exists():
        shutil.rmtree(run, ignore_errors=True)  # of a command that was interrupted
        run_to_end("experiment=sft_tiny", f"run.dir={run}", *SUMS, *overrides)
        if not model.exists():
            raise RuntimeError(f"{run}: the supervised run ended without final_model/. Look at its logs, then try again")
    return model


def train_all(orders: list[dict[str, Any]], journal: Journal, model: Path, lanes: int) -> None:
    """Have the runs made that `journal` does not hold, `lanes` at a time. Raises RuntimeError where one fails; those under way are finished."""
    done = {(record["objective"], record["eta"], record["seed"]) for record in journal.records}
    waiting = deque(order for order in orders if (order["objective"], order["eta"], order["seed"]) not in done)

    def lane() -> None:
        with Child("benchmarks.staleness.run", str(model)) as child:
            while waiting:
                journal.add(record := child.ask(**waiting.popleft()))
                print(f"{OBJECTIVES[record['objective']]:<13} eta {record['eta']:>3} seed {record['seed']}: accuracy {accuracy(record):.3f}, "
                      f"{record['cpu_s'][-1]:.0f} s of CPU time {record['diverged']}; {len(journal.records)} of {len(orders)}", flush=True)

    with ThreadPoolExecutor(lanes) as pool:
        running = [pool.submit(lane) for _ in range(min(lanes, len(waiting)))]
        try:
            for future in running:
                future.result()
        finally:
            waiting.clear()


def report(journal: Journal, speeds: Journal, out: Path, settings: Record) -> dict[str, Any]:
    """Print the tables, draw the plot; returns the last line."""
    print(f"\n{accuracy_table(journal.records, TARGET)}\n\n{course_table(journal.records)}\n")
    print(f"{speed_table(journal.records, speeds.records, TARGET)}\n")
    plot = out / "staleness.svg"
    try:
        from benchmarks.staleness.plot import draw
    except ImportError as error:
        print(f"no plot: {error}. Install matplotlib")
    else:
        draw(journal.records, speeds.records, plot)
        print(plot)
    stale, fresh = (list(by_seed(journal.records, "decoupled_ppo", eta).values()) for eta in ("4", "0"))
    value, against = (sum(map(accuracy, runs)) / len(runs) if runs else None for runs in (stale, fresh))
    return {"name": "held-out accuracy of decoupled PPO at eta=4 against eta=0", "value": rounded(value), "unit": "greedy accuracy",
            "against": rounded(against), "ratio": rounded(value / against) if value is not None and against else None,
            "runs": len(journal.records), **settings}


def rounded(value: float | None) -> float | None:
    """To four places; None where nothing was measured."""
    return None if value is None else round(value, 4)


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help="0.3 million parameters from scratch, or SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"), help="folder of the results; an interrupted command goes on there")
    parser.add_argument("--seeds", type=int, default=8, help="runs of each cell, seeds 1, 2, ...")
    parser.add_argument("--etas", nargs="+", choices=ETAS, default=CHOSEN)
    parser.add_argument("--lanes", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the runs")
    parser.add_argument("--speed-runs", type=int, default=1, help="asynchronous runs of each eta")
    parser.add_argument("--no-throughput", action="store_true", help="leave the asynchronous runs out; they are of --model tiny alone")
    parser.add_argument("--quick", action="store_true", help="two etas, one seed, four tiny steps: only to see that it works")
    options = parser.parse_args()
    if min(options.seeds, options.lanes, options.speed_runs) < 1:
        parser.error(f"--seeds {options.seeds} --lanes {options.lanes} --speed-runs {options.speed_runs}: must be at least 1. Give more")
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    etas, seeds = (("0", "2"), 1) if options.quick else (options.etas, options.seeds)
    out = options.out.resolve()
    start, task = (QUICK_START, QUICK) if options.quick else ((), SMOLLM2) if options.model == "smollm2" else (START, TASK)
    settings: Record = {"start": [*start], "overrides": [*task, *options.set], "every": EVERY}
    open_folder(out, settings)
    orders = [{"objective": objective, "eta": eta, "seed": seed, "overrides": settings["overrides"], "every": EVERY}
              for seed in range(1, seeds + 1) for eta in etas for objective in OBJECTIVES]
    journal, speeds = Journal(out / "runs.jsonl"), Journal(out / "speeds.jsonl")
    train_all(orders, journal, make_start(out, settings["start"]), options.lanes)
    if not (options.quick or options.no_throughput) and (options.model, options.set) == ("tiny", []):  # what it runs is that model, as it is
        have = {(speed["eta"], speed["number"]) for speed in speeds.records}
        measure([(eta, number) for number in range(options.speed_runs) for eta in SPEED_ETAS if (eta, number) not in have], SPEED_STEPS, speeds.add)
    print(json.dumps(report(journal, speeds, out, {**settings, "seeds": seeds})))


if __name__ == "__main__":
    main()
