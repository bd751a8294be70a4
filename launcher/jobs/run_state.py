"""How a run stands, in one word, for every command that says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from launcher.jobs.liveness import host_elsewhere, on_slurm, still_there
from launcher.slurm.queries import QueueEntry, asked_once
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError

TO_COME = ("running", "waiting")
"""States of a run of which more is to come by itself."""


def state(run: RunFolder, outcome: Mapping[str, object]) -> str:
    """By its `outcome`: finished, stopped, failed, drained; without one (empty): running, waiting, gone, or '?' where SLURM cannot be asked.

    Raises OSError, ValueError, KeyError and TypeError where its folder does not say what was submitted."""
    if outcome:
        by_hand = outcome.get("state") == "failed" and str(outcome.get("cause")).startswith("stopped")
        return "stopped" if by_hand else str(outcome.get("state") or "?")
    try:
        left = still_there(run)
    except SlurmError:
        return "?"
    if not left:
        return "running" if host_elsewhere(run) else "gone"
    return "waiting" if on_slurm(run) and all(isinstance(one, QueueEntry) and one.state.waiting for one in left) else "running"


@contextmanager
def told_once(runs: Iterable[RunFolder]) -> Iterator[None]:
    """For a block that tells the states of `runs`: where SLURM's controller does not answer, it is asked once, not for each of them."""
    with asked_once() if any(_is_open(run) for run in runs) else nullcontext():
        yield


def _is_open(run: RunFolder) -> bool:
    try:
        return not run.outcome.exists() and on_slurm(run)
    except (OSError, ValueError):
        return False
