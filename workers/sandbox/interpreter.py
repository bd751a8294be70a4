"""The interpreter that runs programs, and what of it they can read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from workers.sandbox.outcome import SandboxError

OLDEST = (3, 11)
_ASK_S = 60.0
_ASK = """
import json, os, sys, sysconfig
paths, config = sysconfig.get_paths(), sysconfig.get_config_var
print(json.dumps({
    "version": sys.version_info[:2],
    "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "libraries": [path for path in (paths["stdlib"], paths["platstdlib"], config("LIBDIR")) if path],
    "packages": list(dict.fromkeys([paths["purelib"], paths["platlib"]]))}))
"""


@dataclass(frozen=True)
class Interpreter:
    """`executable`: the real file, not a virtual environment's link; `libraries`: what it needs; `packages`: what is installed for it."""

    executable: str
    libraries: list[str]
    packages: list[str]


def ask(python: str) -> Interpreter:
    """What the interpreter at `python` ('': this one) says of itself. Raises `SandboxError` if it does not run, or is too old."""
    command = [python or sys.executable, "-I", "-c", _ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True, stdin=subprocess.DEVNULL)
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxError(f"sandbox.python={python!r}: {command[0]} does not run ({error}). "
                           f"Give the path of a Python {_dotted(OLDEST)} or newer") from None
    if tuple(answer["version"]) < OLDEST:
        raise SandboxError(f"sandbox.python={python!r}: is Python {_dotted(answer['version'])}; programs need {_dotted(OLDEST)} or newer")
    return Interpreter(answer["executable"], answer["libraries"], answer["packages"])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
