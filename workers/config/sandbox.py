"""Config of the sandbox, in which programs that the model wrote are run (docs/sandbox.md)."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

from workers.config.rules import require


class SandboxBackend(str, enum.Enum):
    """What keeps programs from files: the kernel's Landlock; bubblewrap's namespaces; or Landlock, and bubblewrap where there is none."""

    auto = "auto"
    landlock = "landlock"
    bubblewrap = "bubblewrap"


class SandboxPolicy(str, enum.Enum):
    """What happens where the kernel cannot keep programs from files: no program is run, or programs can read files but write none."""

    refuse = "refuse"
    weaken = "weaken"


@dataclass
class SandboxConfig:
    """How programs that the model wrote are run, and what one program may take.

    `wall_s` and `cpu_s`: seconds; `memory_mb`: address space, the interpreter's 30 MB included; `output_kb`: standard output, error and replies
    together; `num_files`: how often it may open a file that may have to be made, each of up to `file_mb`. `python`: absolute path of the
    interpreter (3.11 or newer), '' for this one; programs can import what is installed for it.
    """

    backend: SandboxBackend = SandboxBackend.auto  # what keeps programs from files
    policy: SandboxPolicy = SandboxPolicy.refuse  # what happens where the kernel cannot do that
    wall_s: float = 10.0  # after which a program is killed
    cpu_s: float = 10.0  # of one program
    memory_mb: int = 512  # of one program, with the interpreter's 30
    output_kb: int = 1024  # of standard output, error and replies together
    file_mb: int = 4  # of one file that a program writes
    num_files: int = 64  # how often it may open a file that may have to be made
    python: str = ""  # absolute path of the interpreter; empty: this one

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        for name in ("wall_s", "cpu_s"):
            require(0 < getattr(self, name) <= 86400, f"sandbox.{name}", getattr(self, name), "must be greater than 0, and a day at most",
                    "A program is killed after this time")
        for name, least, most in (("memory_mb", 64, 1 << 20), ("output_kb", 1, 1 << 20), ("file_mb", 1, 1 << 20), ("num_files", 0, 1 << 16)):
            require(least <= getattr(self, name) <= most, f"sandbox.{name}", getattr(self, name), f"must be from {least} to {most}",
                    "It bounds what one program takes")
        require(self.python == "" or os.path.isabs(self.python), "sandbox.python", self.python,
                "must be an absolute path, or '' for this interpreter", "Give the path of a Python 3.11 or newer")
