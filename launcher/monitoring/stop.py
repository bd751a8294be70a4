"""`headway stop RUN`: end a run in order, and by force what does not end in time. `--drain` saves its state first, for `headway resume`.

    stop file --> coordinator, within a second --> checkpoint (--drain), outcome.json, everybody leaves
    no coordinator on SLURM (training waits in the queue): nothing to save that is not saved; pending elements are cancelled,
    the outcome is recorded here, and inference elements leave when they find it
    not gone after a while: SIGKILL, or scancel
"""

from __future__ import annotations

import sys
import time

from launcher.arguments import FAILED, Parser, add_run, open_run, refuse
from launcher.jobs.liveness import POLL_S, cancel, host_elsewhere, kill, on_slurm, queue, still_there, wait_for_end
from launcher.slurm.accounting import newest_checkpoint
from launcher.slurm.queries import QueueEntry
from launcher.views import evaluation_view
from workers.config import load
from workers.run.checkpoints import can_go_on
from workers.run.files import is_full
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError

PATIENCE_S = 90.0
"""On a busy machine: its parts leave within seconds on a free one, and are then given up one by one, the last after 40 s."""


def stop(run: RunFolder, reason: str, patience_s: float | None = None, drain: bool = False) -> str:
    """Ask the run to end, wait, and end by force what is left after `patience_s`; returns what happened, in words.

    Raises `SlurmError`; the request then stands, and a coordinator acts on it all the same.
    """
    if patience_s is None:  # a step and a checkpoint have to fit in
        patience_s = PATIENCE_S + (load(run.config).cluster.signal_delay_s if drain or on_slurm(run) else 0)
    already = run.ended()
    try:
        return _stop(run, reason, patience_s, drain, already)
    except OSError as error:
        if not is_full(error):
            raise
        return f"{run.full_disk()}; stopped by force: {kill(run)} {_things(run)} had not ended"


def _stop(run: RunFolder, reason: str, patience_s: float, drain: bool, already: dict | None) -> str:
    _ask(run, reason, drain)
    if host := host_elsewhere(run):
        return _wait_for_other(run, host, patience_s, already)
    in_time = _wait_on_slurm(run, reason, drain, patience_s) if on_slurm(run) else wait_for_end(run, patience_s)
    if in_time:
        _record(run, f"stopped: {reason}", drain)
        if on_slurm(run):
            run.remove_weights(load(run.config).weights.dir)  # of an earlier incarnation: where none lives, nobody else does
        return _describe(run, already)
    num_left = len(still_there(run))
    _record(run, f"stopped by force: {reason}", drain)
    kill(run)
    left = still_there(run)
    return (f"stopped by force: {num_left} {_things(run)} had not ended after {patience_s:g} s"
            + (f", and {len(left)} are still there" if left else ""))


def _wait_for_other(run: RunFolder, host: str, patience_s: float, already: dict | None) -> str:
    """Nothing of the run is here: its coordinator, on `host`, acts on the request, and records the end."""
    deadline = time.monotonic() + patience_s
    while run.ended() is None:
        if time.monotonic() > deadline or not host_elsewhere(run):
            return f"the run is on {host}, has been asked to end, and has not. Look there: headway stop {run.path}"
        time.sleep(POLL_S)
    return _describe(run, already)


def _things(run: RunFolder) -> str:
    return "elements" if on_slurm(run) else "processes"


def _ask(run: RunFolder, reason: str, drain: bool) -> None:
    """Leave the request; one that is not to drain replaces one that is."""
    earlier = run.stop_requested()
    if earlier is not None and earlier["drain"] and not drain:
        run.stop.unlink(missing_ok=True)
    run.request_stop(reason, drain)


def _record(run: RunFolder, cause: str, drain: bool) -> None:
    """Record the end where no coordinator has: drained if there is a checkpoint to go on from."""
    if run.ended() is None:
        saved = can_go_on(run)
        run.end(cause if saved or not drain else f"{cause}; there was no checkpoint yet", "launcher", "drained" if drain and saved else "")


def told(run: RunFolder, outcome: dict, ended_by: str = "") -> str:
    """That a run was stopped, by whom, and how it goes on; '' for one that was not. `ended_by`: a signal that the launcher got; SIGTERM to its
    process group reaches the trainer too, which then may end first, and say so."""
    cause = f"stopped: by {ended_by}" if ended_by and "SIGTERM" in outcome["cause"] else str(outcome["cause"])
    if outcome["state"] != "failed" or not cause.startswith("stopped"):
        return ""
    checkpoint = newest_checkpoint(run)
    where = f"from the checkpoint of step {checkpoint.step}" if checkpoint else "from the start, as there is no checkpoint yet"
    left = f"go on {where}: headway resume {run.path}"
    if run.evaluation.is_dir():
        left = evaluation_view.goes_on(evaluation_view.progress(run), run.path)
    return f"the run was {cause.replace('stopped: ', 'stopped ', 1)}" + (f"; {left}" if left else "")


def _describe(run: RunFolder, already: dict | None) -> str:
    outcome, checkpoint = run.ended() or {}, newest_checkpoint(run)
    left = evaluation_view.goes_on(evaluation_view.progress(run), run.path)
    if left and already is None:
        return f"{'drained' if outcome.get('state') == 'drained' else 'stopped'}: {left}"
    if already is not None:
        return "had ended already"
    if outcome.get("state") == "drained":
        return f"drained at step {checkpoint.step if checkpoint else 0}; go on with: headway resume {run.path}"
    return "stopped"


def _wait_on_slurm(run: RunFolder, reason: str, drain: bool, patience_s: float) -> bool:
    """Wait until no element is left, and cancel those that wait for their turn as soon as no coordinator can tell them."""
    deadline = time.monotonic() + patience_s
    while any((now := queue(run)).values()):
        if run.ended() is None and not _with_nodes(now["train"]):
            cancel(run, pending_only=True)
            if not _with_nodes(queue(run)["train"]):  # else one began just now: it finds the request
                _record(run, f"stopped: {reason}", drain)
        elif run.ended() is not None and any(entry.state.waiting for entries in now.values() for entry in entries):
            cancel(run, pending_only=True)
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _with_nodes(entries: list[QueueEntry]) -> bool:
    return any(not entry.state.waiting for entry in entries)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 0 once nothing of the run is left."""
    parser = add_run(Parser(prog="headway stop", description=(__doc__ or "").splitlines()[0]))
    parser.add_argument("--drain", action="store_true", help="save the run's state first, so that `headway resume` can go on from there")
    options = parser.parse_args(arguments)
    run = open_run(options.run)
    try:
        print(f"{run.path}: {stop(run, 'by headway stop --drain' if options.drain else 'by headway stop', drain=options.drain)}")
        return 1 if still_there(run) else 0
    except SlurmError as error:
        return refuse(f"{error}\nThe request to stop stands: the coordinator acts on it")
    except KeyboardInterrupt:
        print(f"\nheadway: not waiting any longer; the request to stop stands. headway status {run.path} shows what is left", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
