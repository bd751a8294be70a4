"""The run folder: every path of a run in one class, and the only ways that files in it are written.

    run folder (0700)
      config.json            the composed config, as the workers read it       launcher
      config.yaml            the same, for people                              launcher
      jobs.json              submitted jobs                                     launcher
      jobs/                  submitit's files and the logs of every job         submitit
      processes/             the processes of the run on this machine           every process
      keys/                  CURVE keys (0600)                                  workers/transport/keys.py
      model/                 the starting model, where it was made on the spot  workers/prepare.py
      epochs/000001          claimed by one incarnation of the trainer each     trainer
      epochs/000001.end      how that incarnation ended                         trainer
      rendezvous/            where the coordinator of an epoch listens          coordinator
      checkpoints/7.120/     the state after step 120, complete or not there    trainer, coordinator
      partials/              groups that workers could not hand over            rollout workers
      status.json            what every part is doing now                       coordinator
      metrics.jsonl          one line a training step; tensorboard/ the same    coordinator
      evaluations.jsonl      one line an evaluation                             coordinator
      heldout_samples.jsonl  answers to some held-out prompts, a line an evaluation  coordinator
      consumed.jsonl         which prompts each training step has consumed      coordinator
      outcome.json           why the run ended; the first writer wins           anyone
      exports/120/           the model after step 120, a Hugging Face folder    trainer
      final_model/           the trained model, a Hugging Face folder           trainer
      summary.json           the figures of the whole run                       coordinator
      report.html            the run as a page, at its end                      coordinator, launcher
      weights/               weights as files, where workers read them as such  trainer
      evaluation/            what an evaluation alone has judged so far         workers/evaluation/chunks.py
      evaluation.json        its figures; samples.jsonl: every answer, judged   workers/evaluation/result.py
      stop                   its presence asks the run to end                   launcher
      reserve                room for the outcome, should the disk be full      launcher
      launcher.lock          held by the launcher while it stays attached       launcher
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from workers.run.files import is_full, write_atomic, write_once

MEMORY = Path("/dev/shm")
RESERVE_BYTES = 256 << 10


class RunFolderError(ValueError):
    """A run folder that cannot be used. Its text names the folder, the rule and the remedy."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

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
        """An existing run folder. Raises `RunFolderError` where it is none, or others may enter it."""
        run = RunFolder(path.absolute())
        if not run.config.is_file():
            raise RunFolderError(f"{run.path}: not a run folder (no config.json). Give the folder that the launcher printed")
        if run.path.stat().st_mode & 0o077:
            raise RunFolderError(f"{run.path}: readable by others; it holds the run's keys. Run: chmod 700 {run.path}")
        return run

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

    @property
    def reserve(self) -> Path:
        """Room that is given up to record how the run ended."""
        return self.path / "reserve"

    @property
    def config(self) -> Path:
        """The composed config as the workers read it."""
        return self.path / "config.json"

    @property
    def config_yaml(self) -> Path:
        """The composed config for people."""
        return self.path / "config.yaml"

    @property
    def submitted(self) -> Path:
        """The jobs that the launcher submitted."""
        return self.path / "jobs.json"

    @property
    def jobs(self) -> Path:
        """submitit's files and the logs."""
        return self.path / "jobs"

    @property
    def processes(self) -> Path:
        """One file a process of the run: its id and time of creation."""
        return self.path / "processes"

    @property
    def keys(self) -> Path:
        """CURVE keys."""
        return self.path / "keys"

    @property
    def model(self) -> Path:
        """A starting model made for this run."""
        return self.path / "model"

    @property
    def epochs(self) -> Path:
        """Claims of epochs."""
        return self.path / "epochs"

    @property
    def checkpoints(self) -> Path:
        """Complete states of the run, one folder a step."""
        return self.path / "checkpoints"

    @property
    def partials(self) -> Path:
        """Finished and unfinished groups that workers could not hand over to a coordinator."""
        return self.path / "partials"

    @property
    def consumed(self) -> Path:
        """One JSON line a training step: the indices of the prompts that it consumed."""
        return self.path / "consumed.jsonl"

    @property
    def rendezvous(self) -> Path:
        """Addresses of coordinators."""
        return self.path / "rendezvous"

    @property
    def status(self) -> Path:
        """What every part is doing now."""
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        """One JSON line a training step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON line an evaluation."""
        return self.path / "evaluations.jsonl"

    @property
    def evaluation(self) -> Path:
        """What the elements of an evaluation alone (run.kind=evaluation) have judged so far; there in such a run only."""
        return self.path / "evaluation"

    @property
    def evaluation_result(self) -> Path:
        """The figures of an evaluation alone."""
        return self.path / "evaluation.json"

    @property
    def samples(self) -> Path:
        """Every answer of an evaluation alone, one JSON line each."""
        return self.path / "samples.jsonl"

    @property
    def heldout_samples(self) -> Path:
        """One JSON line an evaluation: what was answered to the first held-out prompts."""
        return self.path / "heldout_samples.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def outcome(self) -> Path:
        """Why the run ended."""
        return self.path / "outcome.json"

    @property
    def summary(self) -> Path:
        """The figures of the whole run."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The run as a page; `headway report` writes it."""
        return self.path / "report.html"

    @property
    def exports(self) -> Path:
        """The model at several steps, a Hugging Face folder each; not there before the first."""
        return self.path / "exports"

    @property
    def final_model(self) -> Path:
        """The trained model."""
        return self.path / "final_model"

    @property
    def stop(self) -> Path:
        """Its presence asks the run to end."""
        return self.path / "stop"

    @property
    def launcher_lock(self) -> Path:
        """Held by the launcher while it stays attached."""
        return self.path / "launcher.lock"

    def weights(self, where: str) -> Path:
        """The folder of published weights for `weights.dir`: memory-backed ('auto'), in here ('run'), or below a given folder."""
        if where == "run":
            return self.path / "weights"
        parent = (MEMORY if MEMORY.is_dir() else self.path) if where == "auto" else Path(where)
        return parent / f"headway-{os.getuid()}-{hashlib.sha256(str(self.path).encode()).hexdigest()[:16]}"

    def store(self, where: str) -> Path:
        """The root of this node's store (workers/weights/store.py) for `weights.dir`. On storage that nodes may share, each has its own."""
        if where == "auto" and MEMORY.is_dir():
            return self.weights(where)
        parent = self.path if where in ("auto", "run") else Path(where)
        return parent / f"headway-{os.getuid()}-{hashlib.sha256(f'{self.path}@{socket.gethostname()}'.encode()).hexdigest()[:16]}"

    def remove_weights(self, where: str) -> None:
        """Remove all versions on shared storage and in this node's store; to be called when nobody reads them any more."""
        for folder in {self.store("auto"), self.store(where), self.weights("run"), self.weights(where)}:
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

    def arrays(self, role: str) -> list[str]:
        """The SLURM job ids of the arrays of `role` ('inference', 'reward' or 'train') that have been submitted so far."""
        return [array["job_id"] for array in self.submission().get("arrays", []) if array["role"] == role and array["job_id"]]

    def launcher_is_gone(self) -> bool:
        """True if an attached launcher has died: its lock file is there, but nobody holds the lock any more."""
        try:
            descriptor = os.open(self.launcher_lock, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # held; or a file system without locks, on which nobody can tell
            return False
        finally:
            os.close(descriptor)
        return self.launcher_lock.exists()
