"""What the runs of benchmarks.staleness come to: means over seeds, their intervals, and the table beside the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scipy.stats import t as student_t

from benchmarks.journal import Record
from benchmarks.quiet import QUIET

ETAS = ("0", "1", "2", "4", "8", "16", "inf")
OBJECTIVES = {"ppo": "naive PPO", "decoupled_ppo": "decoupled PPO"}
"""Files in conf/algorithm, and what the paper calls them."""
PAPER = {"0": (42.0, 42.0, 128.7), "1": (41.8, 42.1, 269), "2": (40.0, 41.8, 357), "4": (23.3, 42.2, 357), "8": (35.7, 41.0, 372),
         "16": (35.8, 38.7, 382), "inf": (34.0, 36.9, 397)}
"""AReaL (arXiv 2505.24298), Table 2 and Figure 5: AIME24 without and with the decoupled objective (at eta=0 they are one), k tokens/s."""


@dataclass(frozen=True)
class Mean:
    """A mean of `num` values; `half` is half of its 95% interval by Student's t, NaN for a single value."""

    value: float
    half: float
    num: int

    @staticmethod
    def of(values: Sequence[float]) -> Mean:
        """Raises `statistics.StatisticsError` where there are no values."""
        freedom = len(values) - 1
        half = float(student_t.ppf(0.975, freedom)) * statistics.stdev(values) / math.sqrt(len(values)) if freedom else math.nan
        return Mean(statistics.mean(values), half, len(values))

    def text(self, digits: int = 3, sign: str = "") -> str:
        """As a cell of a table."""
        return f"{self.value:{sign}.{digits}f}" + ("" if math.isnan(self.half) else f" ± {self.half:.{digits}f}")


def accuracy(record: Record) -> float:
    """Held-out accuracy after the last step."""
    return record["accuracy"][-1]


def course(record: Record) -> float:
    """Mean held-out accuracy of all evaluations after the start: how soon it was learnt, too."""
    return statistics.mean(record["accuracy"][1:])


def steps_to(record: Record, target: float) -> int | None:
    """The first evaluated step with an accuracy of at least `target`; None: it was never reached."""
    return next((step for step, value in zip(record["steps"], record["accuracy"], strict=True) if value >= target), None)


def cpu_to(record: Record, target: float) -> float | None:
    """Seconds of CPU time until then, from the start of the run's process."""
    return next((spent for spent, value in zip(record["cpu_s"], record["accuracy"], strict=True) if value >= target), None)


def by_seed(records: Iterable[Record], objective: str, eta: str) -> dict[int, Record]:
    """The runs of one cell."""
    return {record["seed"]: record for record in records if (record["objective"], record["eta"]) == (objective, eta)}


def against_fresh(records: Sequence[Record], objective: str, eta: str, figure: Callable[[Record], float] = accuracy) -> Mean | None:
    """`figure` less that of the same seed at eta=0 by the same objective; None without such pairs."""
    fresh, stale = by_seed(records, objective, "0"), by_seed(records, objective, eta)
    pairs = [figure(stale[seed]) - figure(fresh[seed]) for seed in sorted(fresh.keys() & stale.keys())]
    return Mean.of(pairs) if pairs else None


def between(records: Sequence[Record], eta: str, figure: Callable[[Record], float] = accuracy) -> Mean | None:
    """`figure` of the decoupled objective less that of the naive one, of the same seed."""
    naive, decoupled = by_seed(records, "ppo", eta), by_seed(records, "decoupled_ppo", eta)
    pairs = [figure(decoupled[seed]) - figure(naive[seed]) for seed in sorted(naive.keys() & decoupled.keys())]
    return Mean.of(pairs) if pairs else None


def summary(records: Sequence[Record], target: float) -> list[Record]:
    """One row for each eta and objective that has runs. `steps`, `cpu_s`: medians of all of them, infinite where half did not reach `target`."""
    rows = []
    for eta in ETAS:
        for objective in OBJECTIVES:
            runs = list(by_seed(records, objective, eta).values())
            if not runs:
                continue
            reached = [math.inf if (step := steps_to(run, target)) is None else step for run in runs]
            spent = [math.inf if (seconds := cpu_to(run, target)) is None else seconds for run in runs]
            rows.append({
                "eta": eta, "objective": objective, "num": len(runs), "accuracy": Mean.of([accuracy(run) for run in runs]),
                "difference": against_fresh(records, objective, eta), "reached": sum(map(math.isfinite, reached)),
                "steps": statistics.median(reached), "cpu_s": statistics.median(spent),
                "gap": statistics.mean(statistics.mean(run["gaps"]) for run in runs),
                "diverged": sum(bool(run["diverged"]) for run in runs)})
    return rows


def accuracy_table(records: Sequence[Record], target: float) -> str:
    """Final accuracy, its difference from eta=0, and how far the policy that sampled lies from the one in training (nats a token, mean over the
    run), beside the paper's, in Markdown."""
    rows = {(row["eta"], row["objective"]): row for row in summary(records, target)}
    lines = ["| η | naive PPO | against its η = 0 | nats | decoupled PPO | against its η = 0 | nats | decoupled − naive | paper: naive → decoupled |",
             "|---|---|---|---|---|---|---|---|---|"]
    for eta in ETAS:
        cells = []
        for objective in OBJECTIVES:
            row = rows.get((eta, objective))
            broke = f" ({row['diverged']} broke off)" if row and row["diverged"] else ""
            cells += [row["accuracy"].text() + broke, row["difference"].text(sign="+") if eta != "0" and row["difference"] else "-",
                      f"{row['gap']:.3f}"] if row else ["-"] * 3
        apart = between(records, eta)
        naive, decoupled, _ = PAPER[eta]
        paper = f"{naive:.1f}" if eta == "0" else f"{naive:.1f} → {decoupled:.1f}"
        lines.append(f"| {symbol(eta)} | {' | '.join(cells)} | {apart.text(sign='+') if apart else '-'} | {paper} |")
    return "\n".join(lines)


def course_table(records: Sequence[Record]) -> str:
    """Accuracy over the whole course, in Markdown."""
    lines = ["| η | naive PPO, over the course | against its η = 0 | decoupled PPO | against its η = 0 | decoupled − naive |",
             "|---|---|---|---|---|---|"]
    for eta in ETAS:
        cells = []
        for objective in OBJECTIVES:
            runs, apart = list(by_seed(records, objective, eta).values()), against_fresh(records, objective, eta, course)
            cells += [Mean.of([course(run) for run in runs]).text() if runs else "-", apart.text(sign="+") if apart and eta != "0" else "-"]
        apart = between(records, eta, course)
        if apart:
            lines.append(f"| {symbol(eta)} | {' | '.join(cells)} | {apart.text(sign='+')} |")
    return "\n".join(lines)


def speed_table(records: Sequence[Record], speeds: Sequence[Record], target: float) -> str:
    """Steps and CPU time to the target, and throughput, in Markdown."""
    rows = {(row["eta"], row["objective"]): row for row in summary(records, target)}
    lines = [f"| η | naive: steps to {target:g} (runs that reach it) | CPU s | decoupled: steps to {target:g} | CPU s | "
             "effective tokens/s | staleness | over η = 0 | paper: k tokens/s (over η = 0) |", "|---|---|---|---|---|---|---|---|---|"]
    fresh = [speed["rate"] for speed in undisturbed(speeds, "0")]
    for eta in ETAS:
        cells = []
        for objective in OBJECTIVES:
            row = rows.get((eta, objective))
            half = row is not None and math.isfinite(row["steps"])
            reached = "-" if not row else f"{row['steps']:g} ({row['reached']} of {row['num']})" if half else f"- ({row['reached']} of {row['num']})"
            cells += [reached, f"{row['cpu_s']:.0f}" if row and half else "-"]
        own = undisturbed(speeds, eta)
        rate = statistics.mean(speed["rate"] for speed in own) if own else None
        cells += [f"{rate:.0f}" if rate else "-", f"{statistics.mean(speed['staleness'] for speed in own):.1f}" if own else "-",
                  f"{rate / statistics.mean(fresh):.2f}" if rate and fresh else "-"]
        lines.append(f"| {symbol(eta)} | {' | '.join(cells)} | {PAPER[eta][2]:g} ({PAPER[eta][2] / PAPER['0'][2]:.2f}) |")
    return "\n".join(lines)


def undisturbed(speeds: Sequence[Record], eta: str) -> list[Record]:
    """The asynchronous runs at `eta` beside which hardly anything else ran; all of them if there is none."""
    own = [speed for speed in speeds if speed["eta"] == eta]
    return [speed for speed in own if speed["others_cores"] <= QUIET] or own


def symbol(eta: str) -> str:
    """How it is written in a table."""
    return "∞" if eta == "inf" else eta
