"""Who may reach what training ranks talk over: the store at which they meet, and gloo's listening sockets. Neither knows a key: whoever writes in the
store can lead ranks astray, and gloo keeps every connection, until the process has no descriptors left and is aborted.

    rank r  --the address that it comes from--> file r of the gang's roster, in the run folder, which nobody else can write to
    rank 0  waits for all of them --> a filter on its socket: connections from anywhere else are dropped by the kernel, unseen
    rank r  has its groups --> the same filter on what gloo listens at; a single rank's takes nobody

The addresses are those of the gang's nodes: a user of one of these nodes still reaches store and gloo.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from workers.run.files import write_atomic

SO_ATTACH_FILTER, SO_LOCK_FILTER = 26, 44
LOOK_S = 0.1
_LISTENS = "0A"
MAX_ADDRESSES = 2000
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_SOURCE_ADDRESS = 0xFFF00000 + 12
"""In the IPv4 header, which stands before what a filter of a TCP socket sees."""


def sign(roster: Path, rank: int, store: tuple[str, int]) -> None:
    """Say from which address this rank comes to the store at (address, port). Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # nothing is sent
        route.connect(store)
        write_atomic(roster / str(rank), route.getsockname()[0].encode())


def signed(roster: Path, world_size: int, limit_s: float) -> set[str]:
    """The addresses of all ranks but rank 0. Raises TimeoutError, naming those that have not signed within `limit_s` seconds."""
    deadline, ranks = time.monotonic() + limit_s, {str(rank) for rank in range(1, world_size)}
    while missing := ranks - {entry.name for entry in roster.iterdir()}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {', '.join(sorted(missing, key=int))} have not come")
        time.sleep(LOOK_S)
    return {(roster / rank).read_text() for rank in ranks}


def reserve(address: str) -> socket.socket:
    """A socket that has a free port of `address` (IPv4) for itself and refuses connections until `listen`: nobody else is given that port between
    the choice of it and then. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
    except BaseException:
        listener.close()
        raise
    return listener


def listen(listener: socket.socket, sources: Iterable[str], backlog: int) -> None:
    """Let a bound socket take connections from `sources` (IPv4) and its own address alone. Raises OSError, ValueError."""
    _admit_only(listener, {listener.getsockname()[0], *sources})
    listener.listen(backlog)


def listening() -> dict[int, int]:
    """The TCP sockets at which this process listens: their inodes, and a descriptor of each."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]]
    inodes = {int(words[9]) for words in lines if words[3] == _LISTENS}
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was open when they were listed
            name = os.readlink(entry)
            if name.startswith("socket:[") and int(name[8:-1]) in inodes:
                found[int(name[8:-1])] = int(entry.name)
    return found


def seal(known: Iterable[int], sources: Iterable[str]) -> None:
    """Let what this process listens at, but for the sockets of these inodes, take connections from `sources` (IPv4) alone."""
    for descriptor in [descriptor for inode, descriptor in listening().items() if inode not in set(known)]:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            if not listener.getsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER):  # the store's stays as it is
                _admit_only(listener, set(sources))


def gang_addresses(roster: Path, world_size: int, store: str) -> set[str]:
    """Where the ranks come from, once all have signed; `store`: rank 0's address. Raises OSError."""
    return {store, *((roster / str(rank)).read_text() for rank in range(1, world_size))}


def _admit_only(listener: socket.socket, sources: set[str]) -> None:
    if len(sources) > MAX_ADDRESSES:
        raise ValueError(f"{len(sources)} addresses of training ranks: must be at most {MAX_ADDRESSES}")
    program = [(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS)]
    for source in sorted(sources):
        program += [(_JUMP_IF_EQUAL, 0, 1, int(ipaddress.IPv4Address(source))), (_RETURN, 0, 0, 0xFFFFFFFF)]
    program.append((_RETURN, 0, 0, 0))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
        listener.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)
    except OSError as error:  # some sandboxes emulate a kernel without
        print(f"warning: this kernel takes no socket filter ({error}): whoever reaches the ports reaches training's store and gloo", flush=True)
