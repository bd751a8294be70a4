"""The configs of benchmarks that use parts of a run in their own process. `launcher.config.schema.register` must have been called."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir

from launcher.__main__ import CONF
from launcher.config.schema import to_object
from launcher.preflight import device_choice
from workers.config import Config


def composed(overrides: Sequence[str]) -> Config:
    """The composed, settled and checked config, with `overrides` as on the launcher's command line. Raises `ConfigError`."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_object(compose("config", overrides=[*overrides]))
    device_choice.settle(config)
    return config.for_workers()
