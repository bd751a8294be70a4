"""`headway stop RUN`: end a run in order, and by force what does not end in time."""

from __future__ import annotations

import sys

from launcher.arguments import parse
from launcher.living import kill, wait_for_end
from workers.rundir import RunFolder

PATIENCE_S = 40.0


def stop(run: RunFolder, reason: str, patience_s: float = PATIENCE_S) -> str:
    """Ask the run to end, wait, and kill what is left after `patience_s`; returns what happened, in words."""
    already = run.ended()
    run.request_stop(reason)
    if wait_for_end(run, patience_s):
        if run.ended() is None:
            run.end(f"stopped: {reason}", "launcher")
        return "had ended already" if already else "stopped"
    run.end(f"stopped by force: {reason}", "launcher")
    return f"stopped by force: {kill(run)} processes had not ended after {patience_s:g} s"


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 0 once nothing of the run is left."""
    run, _ = parse("stop", __doc__ or "", arguments)
    print(f"{run.path}: {stop(run, 'by headway stop')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
