"""`headway logs RUN ROLE [WHICH]`: the newest log of a part of a run. ROLE: inference, reward, train, coordinator or engine.

WHICH picks one of several: the number of a worker ('rollout 2' or 'reward 2' in `headway status`: 2), that of a training element in its
array (on one machine: that of a training rank), or any SLURM element ('1234_5', or '1234_5_1' for its second process; on one machine: a job's
number, 'job 1234' at the start). With --follow it goes on as the log does, and changes to the next log when there is one.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import psutil

from launcher.arguments import Parser, add_run, open_run, refuse
from launcher.jobs.liveness import job_ids, on_slurm, submitted_jobs
from workers.run.folder import RunFolder
from workers.slurm.command import OtherCluster, SlurmError

ROLES = ("inference", "reward", "train", "coordinator", "engine")
POLL_S = 0.5
CHUNK = 1 << 16


class NoLog(ValueError):
    """There is no such log. Its text says what there is."""


def newest_log(run: RunFolder, role: str, which: str = "") -> Path:
    """The newest log of `role`, of the one part of it that `which` names. Raises `NoLog`."""
    found = list(run.jobs.glob(f"{role}*.log")) if role in ("coordinator", "engine") else _job_logs(run, role)
    if which:
        keys = _keys(run, role, which)
        found = [path for path in found if any(_named(path, key) for key in keys)]
    found = [path for path in found if path.name.endswith("_0_log.out")] or found  # the first process speaks for a gang, or for a replica
    existing = [path for path in found if path.exists()]
    if not existing:
        there = ", ".join(sorted(path.name for path in run.jobs.glob("*log*"))) or "nothing"
        raise NoLog(f"{run.jobs}: no log of {role}{f' {which}' if which else ''} yet. There is: {there}")
    return max(existing, key=lambda path: path.stat().st_mtime)


def _job_logs(run: RunFolder, role: str) -> list[Path]:
    if on_slurm(run):
        try:
            arrays = job_ids(run)[role]
        except OtherCluster:  # files can be read from everywhere
            arrays = run.arrays(role)
        return [path for array in arrays for path in run.jobs.glob(f"{array}_*_log.out")]
    ranks = run.jobs.glob("rank*.log") if role == "train" else ()
    return [*(Path(job["log"]) for job in submitted_jobs(run) if job["name"].endswith(f"-{role}")), *ranks]


def _named(path: Path, key: str) -> bool:
    """'1234_5' names 1234_5_0_log.out and engine-1234_5.log, and not 1234_51_0_log.out."""
    stem = path.name.removesuffix(".log").removesuffix("_log.out")
    return f"_{key}_" in f"_{stem.replace('-', '_').replace('.', '_')}_"


def _keys(run: RunFolder, role: str, which: str) -> list[str]:
    """What the name of the log holds: the element, or for a worker's number its element, its process or its job."""
    if not which.isdecimal():
        return [which]
    if role == "train":
        if not on_slurm(run):
            return ["0" if which == "0" else f"rank{which}"]
        return [f"{array}_{which}" for array in run.arrays("train")]
    name = f"{'reward' if role == 'reward' else 'rollout'} {which}"
    worker: dict = {}
    with contextlib.suppress(FileNotFoundError):
        worker = next((one for one in json.loads(run.status.read_bytes())["workers"] if one["name"] == name), {})
    if worker.get("job"):
        return [worker["job"], str(worker["pid"])] if role == "engine" else [f"{worker['job']}_0"]
    if worker and role == "engine":
        return [str(worker["pid"])]
    with contextlib.suppress(psutil.NoSuchProcess, KeyError):  # submitit's process for the job, which its log is named after
        return [str(process.pid) for process in psutil.Process(worker["pid"]).parents()]
    here = [] if on_slurm(run) else [str(job["job_id"]) for job in submitted_jobs(run) if job["name"].endswith(f"-{role}")]
    if which in here:
        return [which]
    raise NoLog(f"{name}: {'its process has ended' if worker else 'no such worker'}. `headway status {run.path}` lists them; "
                + (f"the jobs of {role} here were {', '.join(here)}" if here else "an element of SLURM is named like 1234_5"))


def tail(path: Path, num_lines: int) -> tuple[bytes, int]:
    """The last lines of a file, and its length."""
    with path.open("rb") as file:
        position = end = file.seek(0, 2)
        content = b""
        while position > 0 and content.count(b"\n") <= num_lines:
            size = min(CHUNK, position)
            position -= size
            file.seek(position)
            content = file.read(size) + content
    return b"".join(content.splitlines(keepends=True)[-num_lines:] if num_lines else []), end


def follow(run: RunFolder, role: str, which: str, path: Path, offset: int) -> None:
    """Print what is added to the log, and to its successors, until the run has ended and nothing more comes."""
    quiet_since = time.monotonic()
    while run.ended() is None or time.monotonic() - quiet_since < 2:
        with path.open("rb") as file:
            file.seek(offset)
            added = file.read()
        if added:
            _write(added)
            offset, quiet_since = offset + len(added), time.monotonic()
        elif (newest := _successor(run, role, which, path)) != path:
            print(f"==> {newest}", file=sys.stderr)
            path, offset = newest, 0
        else:
            time.sleep(POLL_S)


def _successor(run: RunFolder, role: str, which: str, path: Path) -> Path:
    """The log to go on with; the same one while nothing says which is the next: a worker that left is not listed until it is back."""
    try:
        return newest_log(run, role, which)
    except NoLog:
        return path


def _write(content: bytes) -> None:
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 2 where there is no such log."""
    parser = add_run(Parser(prog="headway logs", description=(__doc__ or "").splitlines()[0]))
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("which", metavar="WHICH", nargs="?", default="", help="the number of a worker, or a SLURM element like 1234_5")
    parser.add_argument("--follow", "-f", action="store_true", help="go on as the log does")
    parser.add_argument("--lines", "-n", type=int, default=100, help="how many lines of its end (default 100)")
    options = parser.parse_intermixed_args(arguments)
    run = open_run(options.run)
    try:
        path = newest_log(run, options.role, options.which)
        print(f"==> {path}", file=sys.stderr)
        content, offset = tail(path, max(0, options.lines))
        _write(content)
        if options.follow:
            follow(run, options.role, options.which, path, offset)
    except (NoLog, SlurmError) as error:
        return refuse(str(error))
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
