"""Processes that are the ranks of a gang, as tests start them."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import tests.support.megatron_case  # noqa: F401
import workers.trainer.worker  # noqa: F401
from tests.wire.ports import free_port
from workers.trainer.megatron.parallel import collectives, process_group
from workers.trainer.megatron.parallel.gang import Gang

SETTLED_S = 800.0
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
"""Ranks are forked from a process that has done their imports and nothing else: done by each of them, these are most of what it does."""


def start_rank(module: str, log: Path, *arguments: str) -> BaseProcess:
    """`python -m MODULE ARGUMENTS...` with this process's environment, output to `log`; it may be killed and waited for."""
    process = FORKS.Process(target=_main, args=(module, log, arguments, dict(os.environ)), daemon=True)
    process.start()
    return process


def _main(module: str, log: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
    with log.open("wb") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    gc.freeze()  # what was imported is not looked through again each time that a rank takes its groups down
    warnings.simplefilter("ignore")
    importlib.import_module(module).main()


def await_ranks(processes: Sequence[BaseProcess], timeout_s: float) -> list[int | None]:
    """Exit codes when all have ended, negative for signals; None of those that have not, which are killed."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def run_ranks(module: str, folder: Path, world: int, *arguments: str, codes: list[int] | None = None) -> list[str]:
    """Run `python -m MODULE FOLDER RANK WORLD PORT ARGUMENTS...` for every rank, to the end of all; returns what each has printed. `codes`: how
    they must end, by default well."""
    port, name = str(free_port()), module.rsplit(".", 1)[1]
    logs = [folder / f"{name}.{rank}of{world}.log" for rank in range(world)]
    processes = [start_rank(module, path, str(folder), str(rank), str(world), port, *arguments) for rank, path in enumerate(logs)]
    ends = await_ranks(processes, SETTLED_S)
    printed = [path.read_text() for path in logs]
    assert ends == (codes or [0] * world), "\n".join([str(ends), *(text[-3000:] for text in printed)])
    return printed


def in_turn(layouts: Iterable[str], rank: int, world: int, port: int) -> Iterator[tuple[str, Gang]]:
    """Each of `layouts` with a gang of its own, for this rank; the groups of the one before are taken down."""
    for layout in layouts:
        gang = Gang(rank, world, local_rank=rank, master_addr="127.0.0.1", master_port=port, interface="lo")
        yield layout, gang
        port = int(collectives.broadcast_bytes(str(free_port()).encode() if rank == 0 else None))  # where they meet next
        process_group.close()
