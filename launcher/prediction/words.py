"""A prediction in words: what will come out, what limits it, what would give more, and all that was assumed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.config.schema import FullConfig
from launcher.prediction.assumptions import UNITS, Assumptions
from launcher.prediction.device_speeds import DeviceSpeed
from launcher.prediction.forecast import Forecast
from launcher.views.queue_view import duration
from workers.config import Control

LIMITS = {
    "engines": "the engines, whose slots are full: more devices for inference",
    "trainer": "the trainer: more devices for training",
    "staleness": "staleness.eta and trainer.batch_groups: so few groups may be in flight that engines have free slots",
    "concurrency": "rollout.concurrency: engines have free slots (auto finds how many groups they need)",
    "coordinator": "the coordinator's time for finished groups: longer answers, or larger groups",
}
MEASURED = {"engine_factor": "times as long as assumed for decoding", "trainer_factor": "times as long as assumed for training",
            "pause_s": "s that new weights stop an engine", "publish_s": "s that they stop training"}


def outcome(config: FullConfig, found: Forecast, num_steps: int) -> list[str]:
    """What will come out."""
    seen, eta = found.prediction, config.staleness.eta
    less = ", or as much less as staleness.control=divergence allows" if config.staleness.control is Control.divergence else ""
    lines = [f"predicted: {seen.tokens_per_s:,.0f} tokens/s trained, {seen.step_s:.3g} s a step, mean age {seen.age:.1f} steps (eta={eta}{less}), "
             f"{seen.slots_used:.0%} of the engines' slots in use; the trainer waits {seen.trainer_waits:.0%} of the time",
             f"limited by {LIMITS[seen.limit]}",
             f"{num_steps} steps: {duration(num_steps * seen.step_s)}, {found.gpu_hours(num_steps):,.3g} device-hours"]
    if found.arrival_s > seen.step_s:
        lines.append(f"a version takes {found.arrival_s:.0f} s to all nodes, longer than a step: engines skip versions, and tokens are older")
    return lines


def others(better: Iterable[tuple[str, float]]) -> list[str]:
    """What would give more."""
    return [f"{keys} would give {times:.2f} times as many tokens" for keys, times in better]


def assumed(assumptions: Assumptions, generates: DeviceSpeed, trains: DeviceSpeed) -> list[str]:
    """All that was assumed, each with where it is from."""
    lines = [f"  {'engines':<16}{generates.said}: {_device(generates)}", f"  {'training':<16}{trains.said}: {_device(trains)}"]
    for name, value in values(assumptions, generates, trains).items():
        if value is not None and not (name in MEASURED and name not in assumptions.said):
            lines.append(f"  {name:<16}{value:.4g} {(UNITS | MEASURED)[name]} ({assumptions.said.get(name, 'usual')})")
    return lines


def values(assumptions: Assumptions, generates: DeviceSpeed, trains: DeviceSpeed) -> dict[str, Any]:
    """Its numbers by name, those that count with these devices."""
    lengths = {"mean_tokens": assumptions.lengths.mean, "sigma": assumptions.lengths.sigma}
    return {name: lengths.get(name, getattr(assumptions, name, None)) for name in (*UNITS, *MEASURED)
            if name != "cpu_gflops" or not (generates.is_gpu and trains.is_gpu)}


def _device(device: DeviceSpeed) -> str:
    return f"{device.flops / 1e12:.3g} TFLOPS, {device.bandwidth / 1e9:.3g} GB/s"
