"""Functions of the user's own (verifier, workflow, agent, filter, data adapter): imported by path, and their errors told in their own lines."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workers.config import ConfigError
from workers.run.moved import current
from workers.run.texts import well_formed

MAX_CAUSE_CHARS = 1000
NUM_FRAMES = 4
AGAIN_S = 10.0
_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_PACKAGES = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
_PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_INSTALLED = _PACKAGES + _PYTHON


class TookTooLong(Exception):
    """Raised by `in_time` within whatever runs."""


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the code within, at the line where it then is, once it has taken so long; again and again where that is swallowed.

    To be used in the main thread. Code that does not come back to the interpreter is not interrupted."""
    def late(*_: object) -> None:
        raise TookTooLong(f"it had not come to its end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def import_function(path: str, key: str) -> Callable[..., Any]:
    """The function with the import path "package.module:function". Raises `ConfigError`, which names `key`, whatever stands against it."""
    module_name, _, function_name = current(path).partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ModuleNotFoundError as error:
        missing = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        place = "" if missing else own_lines(error)
        raise ConfigError(f"{key}={path!r}: module {module_name} cannot be imported ({error}). Put its folder on PYTHONPATH, or correct the "
                          f"import path{place}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={path!r}: module {module_name} cannot be imported. {told(error)}") from error
    if not callable(function):
        raise ConfigError(f"{key}={path!r}: module {module_name} has no function {function_name!r}. Correct the import path")
    return function


def told(error: BaseException) -> str:
    """What was raised, and where: a line for each call in the user's own files."""
    error = first(error)
    return well_formed(f"{type(error).__name__}: {error}"[:MAX_CAUSE_CHARS] + own_lines(error))


def own_lines(error: BaseException) -> str:
    """The innermost calls in files that are neither ours, nor Python's, nor those of installed packages; where there is none, in packages."""
    frames = [frame for frame in traceback.extract_tb(first(error).__traceback__) if not frame.filename.startswith((_OURS, "<frozen"))]
    own = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)] or [
        frame for frame in frames if not frame.filename.startswith(_PYTHON)]
    return "".join(f"\n  {frame.filename}, line {frame.lineno}, in {frame.name}" + (f": {frame.line}" if frame.line else "")
                   for frame in own[-NUM_FRAMES:])


def first(error: BaseException) -> BaseException:
    """The error, or the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
