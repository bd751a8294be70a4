"""The run folder: made, opened, asked to stop, and ended; the only ways that its own files are written. What stands in it: paths.py."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from workers.run.files import is_full, write_atomic, write_once
from workers.run.paths import RunPaths

RESERVE_BYTES = 256 << 10
KEPT_S = 60.0
"""So long it counts that a machine keeps the run going; it says so six times as often."""


class RunFolderError(ValueError):
    """A run folder that cannot be used. Its text names the folder, the rule and the remedy."""


@dataclass(frozen=True)
class RunFolder(RunPaths):
    """One run: its paths, and what is on record of it. `patience_s`: how long this process waits where the folder is full or away (outage.py)."""

    patience_s: float = field(default=0.0, compare=False)

    @staticmethod
    def create(path: Path) -> RunFolder:
        """Make the folder, private to its owner. Raises `RunFolderError` where it exists or cannot be made."""
        path = path.absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir(mode=0o700)
            except FileExistsError as error:
                raise RunFolderError(f"run.dir={path}: exists already; a run starts in a new folder. Choose another run.dir, "
                                     "or leave it empty to get a new name") from error
        except OSError as error:
            raise RunFolderError(f"run.dir={path}: cannot be made ({error.strerror}). Choose a run.dir that you may write to") from error
        run = RunFolder(path)
        try:
            path.chmod(0o700)
            for folder in (run.jobs, run.processes, run.keys, run.epochs, run.rendezvous, run.checkpoints, run.partials):
                folder.mkdir(mode=0o700)
            run.keep_room()
        except (OSError, RunFolderError) as error:
            shutil.rmtree(path)
            raise RunFolderError(f"{run.full_disk()}. Free some space, or choose another run.dir" if is_full(error) else str(error)) from error
        return run

    @staticmethod
    def open(path: Path) -> RunFolder:
        """An existing run folder. Raises `RunFolderError` where it is none, is another user's, or others may enter it."""
        run = RunFolder(path.absolute())
        if not run.config.is_file():
            raise RunFolderError(f"{run.path}: not a run folder (no config.json). Give the folder that the launcher printed")
        status = run.path.stat()
        if status.st_uid != os.geteuid():
            raise RunFolderError(f"{run.path}: belongs to user {status.st_uid}, and this process to user {os.geteuid()}; what stands in a run folder "
                                 "is run as it says. Give a run of your own")
        if status.st_mode & 0o077:
            raise RunFolderError(f"{run.path}: readable by others; it holds the run's keys. Run: chmod 700 {run.path}")
        return run

    def patient(self, minutes: float) -> RunFolder:
        """The same, for a process that waits so long where the folder is full or away."""
        return replace(self, patience_s=60 * minutes)

    def keep_room(self) -> None:
        """Keep some room on the disk for how the run ends: that is to be known where the disk is full, most of all. Raises `RunFolderError`."""
        try:
            write_atomic(self.reserve, os.urandom(RESERVE_BYTES))
        except OSError as error:
            raise RunFolderError(f"run.dir={self.path}: cannot be written to ({error.strerror}). Free some space there") from error

    def write_last(self, path: Path, content: bytes) -> bool:
        """`write_once`, in the room that was kept where there is no other. Raises `OSError` where there is none at all."""
        try:
            return write_once(path, content)
        except OSError as error:
            if not is_full(error) or not self.reserve.exists():
                raise
            self.reserve.unlink(missing_ok=True)
            return write_once(path, content)

    def full_disk(self) -> str:
        """What to say of a disk that is full."""
        return f"run.dir={self.path}: nothing more can be written there, the disk or your quota is full"

    def remove_weights(self, where: str) -> None:
        """Remove all versions on shared storage and in this node's store; to be called when nobody reads them any more."""
        for folder in {self.store("auto"), self.store(where), self.merged("auto"), self.merged(where), self.weights("run"), self.weights(where)}:
            shutil.rmtree(folder, ignore_errors=True)

    def newest_epoch(self) -> int:
        """The newest epoch that has been claimed; 0 before the first."""
        return max((int(entry.name) for entry in self.epochs.iterdir() if entry.name.isdecimal()), default=0)

    def end(self, cause: str, reported_by: str, state: str = "") -> bool:
        """Record why the run ended; only the first record counts. True for the first.

        `state`: 'finished' (default without a `cause`), 'failed' (default with one), or 'drained' (saved, to be resumed).
        """
        state = state or ("failed" if cause else "finished")
        record = {"state": state, "cause": cause, "reported_by": reported_by, "time": time.time()}
        return self.write_last(self.outcome, json.dumps(record).encode())

    def ended(self) -> dict | None:
        """The recorded outcome, or None while the run goes on."""
        try:
            return json.loads(self.outcome.read_bytes())
        except FileNotFoundError:
            return None

    def known_end(self) -> dict | None:
        """The same; None, too, where the run folder cannot be read."""
        with contextlib.suppress(OSError):
            return self.ended()
        return None

    def resumed_at(self) -> float:
        """When the run had ended the last time before it was resumed, seconds since 1970; 0 if it never was. Resuming keeps each
        earlier outcome as outcome.N.json."""
        return max((json.loads(path.read_bytes())["time"] for path in self.path.glob("outcome.*.json")), default=0.0)

    def request_stop(self, reason: str, drain: bool = False) -> None:
        """Ask the run to end; the coordinator looks for this every second. `drain`: save its state first, so that it can be resumed."""
        self.write_last(self.stop, json.dumps({"reason": reason, "drain": drain}).encode())

    def stop_requested(self) -> dict | None:
        """What was asked for with `request_stop` ('reason', 'drain'), or None."""
        try:
            return json.loads(self.stop.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:  # made by hand
            return {"reason": self.stop.read_text(errors="replace").strip() or "by hand", "drain": False}

    def submission(self) -> dict:
        """jobs.json as written at submission: 'cluster', 'complete', and 'arrays' on SLURM or 'jobs' on one machine; {} before that."""
        try:
            return json.loads(self.submitted.read_bytes())
        except FileNotFoundError:
            return {}

    def present_arrays(self) -> list[dict]:
        """The arrays on record, but for those of a cluster on which the run was before it was resumed on another one."""
        arrays = self.submission().get("arrays", [])
        cluster = arrays[-1].get("cluster_name", "") if arrays else ""
        return [array for array in arrays if array.get("cluster_name") in (None, "", cluster)]

    def arrays(self, role: str) -> list[str]:
        """The SLURM job ids of the arrays of `role` ('inference', 'reward' or 'train') that have been submitted so far, and not taken back."""
        return [array["job_id"] for array in self.present_arrays() if array["role"] == role and array["job_id"] and not array.get("withdrawn")]

    def launcher_is_gone(self) -> bool:
        """True if an attached launcher has died: its lock file is there, but nobody holds the lock any more."""
        return self._lock_error(self.launcher_lock) == 0 and self.launcher_lock.exists()

    def is_supervised(self) -> bool:
        """Whether a `headway watch` keeps the run going, by its lock, or by what it said lately."""
        return self._lock_error(self.supervisor_lock) == errno.EWOULDBLOCK or bool(self.kept_elsewhere())

    def keep(self) -> None:
        """Say that this process keeps the run going, now: for those on other machines whom its lock does not reach (none there, or one of each
        machine, as on Lustre with -o localflock)."""
        write_atomic(self.keeper, json.dumps({"host": socket.gethostname()}).encode())

    def kept_elsewhere(self) -> str:
        """The other machine that has said so lately; '' where none has."""
        try:
            host, age_s = json.loads(self.keeper.read_bytes())["host"], abs(time.time() - self.keeper.stat().st_mtime)
        except FileNotFoundError:
            return ""
        return host if host != socket.gethostname() and age_s < KEPT_S else ""

    @staticmethod
    def _lock_error(path: Path) -> int:
        """Why the lock on a file cannot be had: EWOULDBLOCK where it is held, another number where there are no files or locks; 0 where it can."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            return error.errno or errno.EIO
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno or errno.EIO
        finally:
            os.close(descriptor)
        return 0
