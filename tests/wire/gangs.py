"""Processes that are the ranks of a gang, as tests start them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from workers.trainer.megatron import collectives, process_group
from workers.trainer.megatron.gang import Gang

ROOT = Path(__file__).resolve().parents[2]
SETTLED_S = 300.0


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def run_ranks(module: str, folder: Path, world: int, *arguments: str, codes: list[int] | None = None) -> list[str]:
    """Run `python -m MODULE FOLDER RANK WORLD PORT ARGUMENTS...` for every rank, to the end of all; returns what each has printed. `codes`: how
    they must end, by default well."""
    port, deadline = free_port(), time.monotonic() + SETTLED_S
    logs, processes = [folder / f"{module.rsplit('.', 1)[1]}.{rank}of{world}.log" for rank in range(world)], []
    try:
        for rank, path in enumerate(logs):
            with path.open("wb") as log:
                processes.append(subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", module, str(folder), str(rank), str(world), str(port), *arguments],
                    cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
        ends = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    printed = [path.read_text() for path in logs]
    assert ends == (codes or [0] * world), "\n".join(text[-3000:] for text in printed)
    return printed


def in_turn(layouts: Iterable[str], rank: int, world: int, port: int) -> Iterator[tuple[str, Gang]]:
    """Each of `layouts` with a gang of its own, for this rank; the groups of the one before are taken down."""
    for layout in layouts:
        gang = Gang(rank, world, local_rank=rank, master_addr="127.0.0.1", master_port=port, interface="lo")
        yield layout, gang
        port = int(collectives.broadcast_bytes(str(free_port()).encode() if rank == 0 else None))  # where they meet next
        process_group.close()
