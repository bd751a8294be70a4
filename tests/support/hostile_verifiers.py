"""Verifiers that misbehave, for the reward pool's tests. `reference` tells some of them where to leave a note."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from workers.run import process_tree

FOREVER_S = 3600
_kept_servers: list[subprocess.Popen] = []


def good(prompt: str, completion: str, reference: str) -> float:
    return float(completion)


def process_id(prompt: str, completion: str, reference: str) -> float:
    """Leave the process id in the file `reference`."""
    Path(reference).write_text(str(os.getpid()))
    return 1.0


def truth(prompt: str, completion: str, reference: str) -> float:
    return True


def raises(prompt: str, completion: str, reference: str) -> float:
    raise LookupError("no such thing")


def raises_its_completion(prompt: str, completion: str, reference: str) -> float:
    raise ValueError(completion + "\ud800")


def raises_once(prompt: str, completion: str, reference: str) -> float:
    """Raise unless the file `reference` is there, and make it."""
    if Path(reference).exists():
        return 1.0
    Path(reference).touch()
    raise LookupError("the first time")


def hangs(prompt: str, completion: str, reference: str) -> float:
    """Say so on the pipe `reference` (opening it waits for a reader), then hang, deaf to polite signals."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if reference:
        Path(reference).write_text(str(os.getpid()))
    time.sleep(FOREVER_S)
    return 1.0


def hangs_once(prompt: str, completion: str, reference: str) -> float:
    """The first time, say so on the pipe `reference` and hang; later, return."""
    mark = Path(f"{reference}.mark")
    if mark.exists():
        return 1.0
    mark.touch()
    return hangs(prompt, completion, reference)


def hangs_with_children(prompt: str, completion: str, reference: str) -> float:
    """Leave the ids of a child and of an escaped grandchild in `reference`, then hang."""
    forks_and_returns(prompt, completion, reference)
    time.sleep(FOREVER_S)
    return 1.0


def forks_and_returns(prompt: str, completion: str, reference: str) -> float:
    """Leave the ids of a child and of a grandchild in a session of its own in `reference`; both live on."""
    child = os.fork()
    if child == 0:
        time.sleep(FOREVER_S)
        os._exit(0)
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        grandchild = os.fork()
        if grandchild == 0:
            time.sleep(FOREVER_S)
        else:
            os.write(write_end, str(grandchild).encode())
        os._exit(0)
    Path(reference).write_text(f"{child} {int(os.read(read_end, 20))}")
    return 1.0


def keeps_a_server(prompt: str, completion: str, reference: str) -> float:
    """Start two processes, and keep one of them; leave their ids in `reference`."""
    kept, orphan = (subprocess.Popen(["sleep", str(FOREVER_S)]) for _ in range(2))
    process_tree.keep(kept.pid)
    _kept_servers.append(kept)
    Path(reference).write_text(f"{kept.pid} {orphan.pid}")
    return 1.0


def both_return(prompt: str, completion: str, reference: str) -> float:
    """Return in a forked copy too."""
    return 0.25 if os.fork() == 0 else 0.75


def runs_program(prompt: str, completion: str, reference: str) -> float:
    return float(subprocess.run([sys.executable, "-c", "print(0.5)"], capture_output=True, check=True, text=True).stdout)


def memory_bomb(prompt: str, completion: str, reference: str) -> float:
    return float(len(bytearray(64 << 30)))


def exits(prompt: str, completion: str, reference: str) -> float:
    os._exit(7)


def leaves(prompt: str, completion: str, reference: str) -> float:
    sys.exit("done")


def segfaults(prompt: str, completion: str, reference: str) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def prints(prompt: str, completion: str, reference: str) -> float:
    """Write to standard output by all means."""
    print("\x00\x00\x00\x05hello", flush=True)
    os.write(1, b"\x00\x00\x00\x01x\n")
    subprocess.run(["echo", "from a program"], check=True)
    return 1.0


def meets(prompt: str, completion: str, reference: str) -> float:
    """Return once another process is here too: both connect to the socket `reference` and are let go together."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(reference)
        channel.recv(1)
    return 1.0


def text(prompt: str, completion: str, reference: str) -> float:
    return "1.0"  # type: ignore[return-value]


def nothing(prompt: str, completion: str, reference: str) -> float:
    return None  # type: ignore[return-value]


def not_a_number(prompt: str, completion: str, reference: str) -> float:
    return float("nan")


def too_much(prompt: str, completion: str, reference: str) -> float:
    return 1.5
