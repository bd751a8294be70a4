"""Config of the containers in which an agent's shell commands are run (docs/shell_agent.md)."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

from workers.config.rules import require


class ContainerBackend(str, enum.Enum):
    """What makes containers without root: bubblewrap, Apptainer, or the first of them that works on the node."""

    auto = "auto"
    bubblewrap = "bubblewrap"
    apptainer = "apptainer"


@dataclass
class ContainerConfig:
    """A container of one command, and what all its processes together may take."""

    backend: ContainerBackend = ContainerBackend.auto  # what makes containers
    image: str = ""  # absolute path of the root file system: a folder, or Apptainer's image; empty: the system's programs, for bubblewrap
    wall_s: float = 30.0  # [s] of one command, and of the tests
    memory_mb: int = 1024  # resident memory of all processes together; address space of each
    disk_mb: int = 64  # of the file system in memory that holds the repository and /tmp
    num_processes: int = 64  # processes and threads at once

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        for name, least, most in (("wall_s", 0.1, 86400), ("memory_mb", 64, 1 << 20), ("disk_mb", 1, 1 << 16), ("num_processes", 8, 1 << 14)):
            require(least <= getattr(self, name) <= most, f"workflow.container.{name}", getattr(self, name), f"must be from {least} to {most}",
                    "It bounds what a command takes")
        require(not self.image or os.path.isabs(self.image), "workflow.container.image", self.image, "must be an absolute path, or ''",
                "Give a folder with a root file system, or Apptainer's image")
        require(bool(self.image) or self.backend is not ContainerBackend.apptainer, "workflow.container.image", self.image,
                "must be given with workflow.container.backend=apptainer",
                "Give an image (.sif), or a folder, with bash, coreutils, GNU tar and util-linux")
