"""Work that several processes begin at the same moment (they are copies of a server that has no threads, which this process may have), and what may
be asked of a process that ends meanwhile."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import cloudpickle
import psutil

T = TypeVar("T")
CONTEXT = multiprocessing.get_context("forkserver")
NUM_PROCESSES = 6
DEADLINE_S = 120.0


@contextmanager
def beside(work: Callable[[int], Any], num_processes: int) -> Iterator[Any]:
    """`work(index)` in each of `num_processes` processes, which end well with the block; the queue of what they return."""
    barrier, results = CONTEXT.Barrier(num_processes), CONTEXT.Queue()
    task = cloudpickle.dumps(work)
    children = [CONTEXT.Process(target=_do, args=(task, index, barrier, results), daemon=True) for index in range(num_processes)]
    for child in children:
        child.start()
    yield results
    for child in children:
        child.join(DEADLINE_S)
    assert [child.exitcode for child in children] == [0] * num_processes


def together(work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns in `NUM_PROCESSES` processes."""
    with beside(work, NUM_PROCESSES) as results:
        return [results.get(timeout=DEADLINE_S) for _ in range(NUM_PROCESSES)]


def lives(process: psutil.Process) -> bool:
    """Whether it runs; it may end between two questions."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> list[str]:
    """None of a process that has ended since it was seen."""
    return said(process.cmdline, [])


def said(question: Callable[[], T], otherwise: T) -> T:
    """The answer of a process, such as `process.name`; `otherwise` of one that has ended since it was seen."""
    try:
        return question()
    except psutil.NoSuchProcess:
        return otherwise


def _do(task: bytes, index: int, barrier: Any, results: Any) -> None:
    work = cloudpickle.loads(task)
    barrier.wait(DEADLINE_S)
    results.put(work(index))
