"""Modules that configs may name (`reward.verifier=workers.reward.matching:number`) and that moved: old paths work for one release, and say so."""

from __future__ import annotations

import warnings

_REWARD = "workers.reward"
MOVED = {
    f"{_REWARD}.verifiers": f"{_REWARD}.verifiers.registry",
    **{f"{_REWARD}.{name}": f"{_REWARD}.verifiers.{name}"
       for name in ("answers", "bounded", "formats", "gym", "matching", "mathematics", "notation")},
    f"{_REWARD}.code": f"{_REWARD}.code.verifier",
    f"{_REWARD}.python_tool": f"{_REWARD}.code.tool_program",
}
"""From the old path of a module to the present one. To be removed after release 0.2."""


def current(path: str) -> str:
    """The import path "package.module:function" as it is now; warns (FutureWarning) where `path` is an old one."""
    module, _, function = path.partition(":")
    if module not in MOVED:
        return path
    now = f"{MOVED[module]}:{function}"
    warnings.warn(f"{path} is now {now}; the old path works until release 0.2. Change it in your config", FutureWarning, stacklevel=2)
    return now
