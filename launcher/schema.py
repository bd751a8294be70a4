"""The one typed config: the launcher's parts around workers/config.py's, registered in Hydra's ConfigStore.

Hydra merges conf/ and the command line into these dataclasses, so an unknown key or a value of the wrong type fails at
compose time; `check` then applies the rules of workers/config.py and the split.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.partition import Plan, split
from workers import config as workers


class ClusterKind(str, enum.Enum):
    """Where jobs run."""

    local = "local"


@dataclass
class ClusterConfig:
    """How jobs are submitted."""

    kind: ClusterKind = ClusterKind.local
    max_hours: float = 24.0

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        workers.require(0.05 <= self.max_hours <= 10_000, "cluster.max_hours", self.max_hours, "must be from 0.05 to 10000",
                        "It is the wall time after which jobs are ended")


@dataclass
class LaunchConfig:
    """What the launcher does after composing."""

    dry_run: bool = False
    detach: bool = False
    plain: bool = False


@dataclass
class FullConfig(workers.Config):
    """Everything that can be set on the command line."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def check(self) -> None:
        """Check all parts. Raises `ConfigError`."""
        self.cluster.check()
        super().check()

    def plan(self) -> Plan:
        """The split of the devices. Raises `ConfigError`."""
        return split(self.allocation)

    def for_workers(self) -> workers.Config:
        """The part that the workers read."""
        return workers.Config(**{part.name: getattr(self, part.name) for part in dataclasses.fields(workers.Config)})


def register() -> None:
    """Make the schema known to Hydra under the name that conf/config.yaml begins with."""
    ConfigStore.instance().store(name="headway_schema", node=FullConfig)


def to_object(composed: DictConfig) -> FullConfig:
    """The composed config as dataclasses, checked. Raises `ConfigError`."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise workers.ConfigError(f"{error.full_key or 'config'}: {error.msg or error}. Give it on the command line or in conf/") from error
    assert isinstance(config, FullConfig)
    config.check()
    return config
