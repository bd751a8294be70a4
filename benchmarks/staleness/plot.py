"""The plot of benchmarks.staleness, as SVG: final accuracy, learning curves and throughput against eta."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.staleness.figures import ETAS, OBJECTIVES, PAPER, Mean, Record, accuracy, by_seed, symbol, undisturbed

COLORS = {"ppo": "#c44e52", "decoupled_ppo": "#4c72b0"}
PLACES = {eta: place for place, eta in enumerate(ETAS)}


def draw(records: Sequence[Record], speeds: Sequence[Record], path: Path) -> None:
    """Write the figure to `path`. The same figures give the same file."""
    with plt.rc_context({"svg.hashsalt": "headway", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
        _accuracy(axes[0, 0], records)
        _paper(axes[0, 1])
        _curves(axes[1, 0], records)
        _throughput(axes[1, 1], speeds)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def _accuracy(axes: Axes, records: Sequence[Record]) -> None:
    for shift, (objective, name) in zip((-0.06, 0.06), OBJECTIVES.items(), strict=True):
        cells = {eta: runs for eta in ETAS if (runs := [accuracy(run) for run in by_seed(records, objective, eta).values()])}
        places = [PLACES[eta] + shift for eta in cells]
        means = [Mean.of(values) for values in cells.values()]
        axes.errorbar(places, [mean.value for mean in means], [mean.half for mean in means], color=COLORS[objective], marker="o", capsize=3,
                      label=name)
        for place, values in zip(places, cells.values(), strict=True):
            axes.plot([place + shift] * len(values), values, ".", color=COLORS[objective], alpha=0.25, markersize=4)
    _etas(axes, ETAS)
    axes.set(title="Final held-out accuracy: mean, 95% interval, runs", ylabel="greedy accuracy", ylim=(0, 1.02))
    axes.legend(frameon=False, loc="lower left")


def _paper(axes: Axes) -> None:
    for number, (objective, name) in enumerate(OBJECTIVES.items()):
        axes.plot([PLACES[eta] for eta in ETAS], [PAPER[eta][number] for eta in ETAS], color=COLORS[objective], marker="o", label=name)
    _etas(axes, ETAS)
    axes.set(title="The paper's Table 2 (1.5B, AIME24)", ylabel="accuracy, %")
    axes.legend(frameon=False, loc="lower right")


def _curves(axes: Axes, records: Sequence[Record]) -> None:
    """Means over the seeds at the steps that all of them evaluated."""
    for eta, style in (("0", "-"), ("4", "--"), ("16", ":")):
        for objective, name in OBJECTIVES.items():
            runs = list(by_seed(records, objective, eta).values())
            if runs:
                steps = runs[0]["steps"][: min(len(run["steps"]) for run in runs)]
                axes.plot(steps, [statistics.mean(run["accuracy"][place] for run in runs) for place in range(len(steps))], style,
                          color=COLORS[objective], linewidth=1.2, label=f"{name}, η = {symbol(eta)}")
    axes.set(title="Held-out accuracy while training, mean of the seeds", xlabel="step", ylabel="greedy accuracy", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=7)


def _throughput(axes: Axes, speeds: Sequence[Record]) -> None:
    etas = [eta for eta in ETAS if any(speed["eta"] == eta for speed in speeds)]
    rates = [[speed["rate"] for speed in undisturbed(speeds, eta)] for eta in etas]
    for eta, own in zip(etas, rates, strict=True):
        axes.plot([PLACES[eta]] * len(own), own, ".", color="#555555", alpha=0.5)
    axes.plot([PLACES[eta] for eta in etas], [statistics.mean(own) for own in rates], color="#555555", marker="o")
    _etas(axes, etas or ETAS)
    axes.set(title="Throughput of asynchronous runs", ylabel="effective tokens/s")
    axes.set_ylim(bottom=0)


def _etas(axes: Axes, etas: Sequence[str]) -> None:
    axes.set_xticks([PLACES[eta] for eta in etas], [symbol(eta) for eta in etas])
    axes.set_xlabel("η")
