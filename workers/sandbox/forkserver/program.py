"""The program itself: its source as `__main__`, in a process that is confined already. Nothing here is trusted any more."""

from __future__ import annotations

import atexit
import linecache
import os
import site
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

NAME = "<program>"
LENGTH_BYTES = 4
REQUESTS, REPLIES = 3, 4
LIBRARIES = ("OMP", "OPENBLAS", "MKL")
ROOT = os.path.abspath(__file__).removesuffix("/workers/sandbox/forkserver/program.py")


def run(source: bytes, *, session: bool) -> int:
    """Run `source` as the interpreter would; returns its exit code. With `session` it finds `__receive__` and `__reply__`."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if session:
        main.__dict__.update(__receive__=_receive, __reply__=_reply)
    code = _guarded(lambda: exec(compile(source, NAME, "exec", dont_inherit=True), main.__dict__), source)
    return _guarded(lambda: _finish(), source) or code


def _finish() -> None:
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads, once those of pools were told to end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _guarded(action: Callable[[], Any], source: bytes) -> int:
    """Exit code of `action`: 0, that of its SystemExit, or 1 with the traceback on standard error."""
    try:
        action()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except MemoryError:
        os.write(2, b"MemoryError\n")  # there may be no room for more
        return 1
    except BaseException as error:  # noqa: BLE001 - whatever a program raises
        _show(error, source)
        return 1
    return 0


def _show(error: BaseException, source: bytes) -> None:
    """The traceback from the program's own first line on, with its lines."""
    lines = source.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[NAME] = (len(source), None, lines, NAME)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def prepare(folder: str, packages: list[str]) -> None:
    """Make this process look like a fresh interpreter: paths, environment, streams; nothing of ours importable."""
    sys.path[:] = [path for path in sys.path if path != ROOT] + packages
    for name in [name for name in sys.modules if name == "workers" or name.startswith("workers.")]:
        del sys.modules[name]
    site.setquit()  # exit(), quit(), which -S leaves out
    sys.argv[:] = ["program"]
    sys.dont_write_bytecode = True
    os.environ.clear()
    os.environ.update(HOME=folder, TMPDIR=folder, PATH="/usr/bin:/bin", LANG="C.UTF-8", **{f"{name}_NUM_THREADS": "1" for name in LIBRARIES})
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "surrogateescape" if fd < 2 else "backslashreplace"
        stream = open(fd, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115 - to the end of the process
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _receive() -> bytes | None:
    """The next request, None after the last."""
    head = _exactly(LENGTH_BYTES)
    return None if head is None else _exactly(int.from_bytes(head, "big"))


def _exactly(num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        piece = os.read(REQUESTS, num_bytes - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _reply(data: bytes) -> None:
    """Answer the request that was received last."""
    view = memoryview(len(data).to_bytes(LENGTH_BYTES, "big") + bytes(data))
    while view:
        view = view[os.write(REPLIES, view):]
