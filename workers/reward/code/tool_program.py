"""The Python tool of the `python_tool` workflow: runs a model's program in the sandbox and says what it printed (RewardPool.execute).

Each program is a fresh process: nothing of an earlier one is left. How it ends is a line of its own at the end, so that the model can tell.
"""

from __future__ import annotations

from dataclasses import replace

from workers.reward.code.sandboxes import check_node, seats
from workers.sandbox.outcome import Outcome, shortened

__all__ = ["check_node", "run"]

TIME_SHARE = 0.8
"""Of `reward.timeout_s`, for a program at most: it is stopped before its reward process would be killed."""

MAX_CHARS = 100_000
"""What an answer carries; a workflow shows less of it. Longer output is cut in the middle: the head says what it is, the tail has the traceback."""


def run(code: str) -> str:
    """What the program `code` prints, standard error last, and how it ended if it failed.

    Raises `SandboxError` if the machine cannot run it.
    """
    sandboxes = seats()
    limits = replace(sandboxes.limits, wall_s=min(sandboxes.limits.wall_s, TIME_SHARE * sandboxes.timeout_s))
    outcome = sandboxes.program.run(code, b"", limits)
    parts = (outcome.stdout.decode("utf-8", "replace"), outcome.stderr.decode("utf-8", "replace"), _ending(outcome, limits.wall_s))
    return shortened("\n".join(part.rstrip("\n") for part in parts if part.strip("\n")), MAX_CHARS)


def _ending(outcome: Outcome, wall_s: float) -> str:
    match outcome.status:
        case "ok":
            return ""
        case "error":
            return "" if outcome.stderr else f"[exit code {outcome.exit_code}]"
        case "timeout":
            return f"[stopped: it ran longer than {wall_s:g} s]"
        case "memory":
            return "[stopped: out of memory]"
        case "output":
            return "[stopped: too much output]"
        case "killed":
            return "[killed]"
