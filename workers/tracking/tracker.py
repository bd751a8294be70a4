"""What a tracker is told of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from workers.config import ConfigError, Tracker, TrackingConfig

PACKAGES = {Tracker.wandb: ("wandb", "wandb"), Tracker.mlflow: ("mlflow", "mlflow-skinny"), Tracker.trackio: ("trackio", "trackio"),
            Tracker.prometheus: ("prometheus_client", "prometheus-client")}
"""What is imported, and what is installed for it."""


class Tracked(Protocol):
    """A run in a tracker, which may raise whatever its library does. `remote`: its id there."""

    remote: str

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a training step, or of an evaluation: names as in docs/metrics.md, behind 'train/' or 'evaluation/'."""

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Answers to held-out prompts."""

    def alarm(self, step: int, text: str) -> None:
        """An alarm that was raised, or is over."""

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        """Nothing follows from this process; `summary` is empty where the run goes on later."""


@dataclass(frozen=True)
class About:
    """What a run is introduced with. `settings`: all keys of its config, with their values; `remote`: its id of an earlier incarnation, or ''."""

    name: str
    folder: Path
    settings: Mapping[str, Any]
    remote: str


def check_installed(config: TrackingConfig) -> None:
    """Raises `ConfigError` where the package of a tracker is not there."""
    for tracker in config.to:
        module, package = PACKAGES[tracker]
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"tracking.to=[{tracker.value}]: {package} is not installed here. Install it on all nodes (pip install {package}, or "
                              f"Headway's extra [{tracker.value}]), or leave it out")
