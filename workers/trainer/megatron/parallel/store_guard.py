"""Who may reach the store at which training ranks meet. It knows no key, and whoever writes in it can lead ranks astray.

    rank r  --the address that it comes from--> file r of the gang's roster, in the run folder, which nobody else can write to
    rank 0  waits for all of them --> a filter on its socket: connections from anywhere else are dropped by the kernel, unseen

The addresses are those of the gang's nodes: a user of one of these nodes still reaches the store.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from workers.run.files import write_atomic

SO_ATTACH_FILTER, SO_LOCK_FILTER = 26, 44
LOOK_S = 0.1
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


def listen(address: str, port: int, sources: Iterable[str], backlog: int) -> socket.socket:
    """A socket that takes connections at address:port from `sources` (IPv4) and `address` alone. Raises OSError, ValueError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        _admit_only(listener, {address, *sources})
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


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
        print(f"warning: this kernel takes no socket filter ({error}): whoever reaches the port reaches the training ranks' store", flush=True)
