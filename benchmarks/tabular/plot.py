"""The plot of benchmarks.tabular, as SVG: what old samples cost, and where gradients point, over divergence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLORS = {"ppo": "#c44e52", "decoupled_ppo": "#4c72b0", "gspo": "#55a868", "grpo": "#8172b2", "icepop": "#ccb974", "m2po": "#64b5cd"}
OTHERS = "#bbbbbb"


def draw(cases: list[dict[str, Any]], gradients: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Write the figure to `path`. The same figures give the same file."""
    with plt.rc_context({"svg.hashsalt": "headway", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        _costs(axes[0], cases)
        _gradients(axes[1], gradients)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def _costs(axes: Axes, cases: list[dict[str, Any]]) -> None:
    for name, color in COLORS.items():
        own = [case for case in cases if case["method"] == name and not case["fresh"]]
        axes.errorbar([case["gap"] for case in own], [case["apart"]["difference"] for case in own], [case["apart"]["half"] for case in own],
                      color=color, marker="o", markersize=3, linestyle="none", elinewidth=0.8, label=name)
    axes.axhline(0, color=OTHERS, linewidth=0.8)
    axes.set(title="Success lost at the end, but for the lag", xlabel="nats a token",
             ylabel="difference, 95% interval", xscale="log")
    axes.legend(frameon=False, fontsize=7, loc="lower left")


def _gradients(axes: Axes, gradients: dict[str, list[dict[str, float]]]) -> None:
    for name, found in sorted(gradients.items(), key=lambda each: each[0] in COLORS):
        axes.plot([one["gap"] for one in found], [one["cosine"] for one in found], color=COLORS.get(name, OTHERS), marker="o", markersize=3,
                  label=name if name in COLORS else None)
    axes.axhline(0, color=OTHERS, linewidth=0.8)
    axes.set(title="Mean gradient against the exact one", xlabel="nats a token", ylabel="cosine")
    axes.legend(frameon=False, fontsize=7, loc="lower left")
