"""How programs are confined on this machine: decided once, from the config and what the machine has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from workers.config import SandboxBackend, SandboxConfig
from workers.sandbox import interpreter
from workers.sandbox.confinement import probe
from workers.sandbox.confinement.confine import Settings
from workers.sandbox.interpreter import Interpreter
from workers.sandbox.outcome import SandboxError

SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime",
          "/dev/urandom", "/dev/random")
"""What interpreters need of the system. Not /etc else, not /proc, not /sys."""


@dataclass(frozen=True)
class Guard:
    """`bubblewrap`: its path, '' without it; `weaknesses`: sentences, to be said aloud."""

    interpreter: Interpreter
    settings: Settings
    bubblewrap: str
    weaknesses: list[str]

    def wrapper(self, work: Path, checkout: Path) -> list[str]:
        """What the server's command begins with: nothing, or bubblewrap with the server's files, and `work` to write in. There is no /proc."""
        if not self.bubblewrap:
            return []
        seen = dict.fromkeys([*self.settings.readable, self.interpreter.executable, str(checkout / "workers")])
        binds = [part for path in seen if os.path.exists(path) and not path.startswith("/dev/") for part in ("--ro-bind", path, path)]
        return [self.bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *binds, "--dev", "/dev",
                "--remount-ro", "/dev",
                "--bind", str(work), str(work), "--remount-ro", "/", "--chdir", "/", "--"]


def choose(config: SandboxConfig) -> Guard:
    """The guard for `config` here. Raises `SandboxError`, naming what is missing and the remedy."""
    machine = probe.probe(config.backend)
    verdict = probe.judge(config, machine)
    if verdict.missing:
        raise SandboxError(" ".join(verdict.missing))
    python = interpreter.ask(config.python)
    bubblewrap = machine.bubblewrap
    abi = machine.landlock if config.backend is not SandboxBackend.bubblewrap or bubblewrap else 0
    settings = Settings(readable=list(dict.fromkeys([*SYSTEM, *python.libraries, *python.packages])), packages=python.packages,
                        landlock=abi, writes=bool(abi or bubblewrap), counted=machine.notifications)
    return Guard(python, settings, bubblewrap, verdict.weaker)
