"""Runs SLURM's commands, on login and on compute nodes alike.

Commands are looked up on PATH. While slurmctld is restarting, a call is tried again for `PATIENCE_S`; everything else that goes
wrong is a `SlurmError` that names the command. What users set for their own eyes does not change what we read, and all commands
look at the one cluster that sbatch submits to (launcher/jobs/submit.py takes the same variables from it).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import time
from collections.abc import Iterator

TIMEOUT_S = 60.0
PATIENCE_S = 60.0
RETRY_S = 2.0
AWAY = ("Unable to contact slurm controller", "Unexpected message received", "Socket timed out", "Connection refused",
        "Transport endpoint is not connected", "Zero Bytes were transmitted", "Slurm backup controller in standby mode", "slurm_persist_conn_open",
        "failed to open persistent connection")
"""Complaints while slurmctld is away (scontrol requeue, hold, release and update: "Unexpected message"), and while slurmdbd is."""
NO_CLUSTER = ("Could not establish a configuration source", "Unable to process configuration file")
"""Complaints where SLURM's commands are installed, but belong to no cluster."""
ENDED = ("Invalid job id specified", "already finished", "already completing or completed", "no longer pending execution")
"""Complaints about jobs that are over."""
PRIVATE = ("SQUEUE_", "SACCT_", "SACCTMGR_", "SINFO_", "SCONTROL_", "SCANCEL_", "SBATCH_", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT",
           "SLURM_BITSTR_LEN")


COMMENT = "headway: "
"""How comments begin that an element has SLURM show."""


class SlurmError(RuntimeError):
    """A command of SLURM that did not do what it should. Its text names the command, what it said, and the remedy."""


class OtherCluster(SlurmError):
    """What is asked for are jobs of another cluster than the one whose commands these are."""


def user_name(uid: str) -> str:
    """The name of a user, or its number in words where this machine does not know it."""
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return f"user {uid}"


_known: list[SlurmError] = []


@contextlib.contextmanager
def away(error: SlurmError) -> Iterator[None]:
    """In this block every command fails with `error` at once: that nobody answers is known, and asking takes SLURM ten seconds each time."""
    _known.append(error)
    try:
        yield
    finally:
        _known.remove(error)


def run(*command: str, stdin: str = "", tolerate: tuple[str, ...] = (), patience_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM. `tolerate`: complaints, any of which makes a failure a success; `patience_s`: how long to try again
    while SLURM's daemon is away (None: `PATIENCE_S`; 0 for what people wait for, and can do without). Raises `SlurmError`."""
    if _known:
        raise _known[-1]
    if (settings := os.environ.get("SLURM_CONF")) and not os.path.exists(settings):  # SLURM itself would look for it for a minute
        raise SlurmError(f"SLURM_CONF={settings}: no such file. Log in to a node of the cluster, or correct it")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)} | {"LC_ALL": "C"}
    deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
    while True:
        try:
            result = subprocess.run(command, input=stdin, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
                                    env=environment)
        except FileNotFoundError as error:
            raise SlurmError(f"{command[0]}: not found on PATH. Log in to a node of the cluster, or load its SLURM module") from error
        except OSError as error:
            raise SlurmError(f"{' '.join(command)}: cannot be run now ({error.strerror}). Ask again later; the run goes on without") from error
        except subprocess.TimeoutExpired as error:
            raise SlurmError(f"{' '.join(command)}: no answer within {TIMEOUT_S:g} s. Ask again later; the run goes on without") from error
        said = f"{result.stderr}\n{result.stdout}".strip() if result.returncode else ""
        if result.returncode == 0 or any(complaint in said for complaint in tolerate):
            return result
        if any(words in said for words in NO_CLUSTER):
            raise SlurmError(f"{command[0]}: SLURM is installed here, but this machine belongs to no cluster (there is no slurm.conf). Log in to a "
                             "node of the cluster, or set SLURM_CONF")
        if not any(words in said for words in AWAY) or time.monotonic() >= deadline:
            raise SlurmError(f"{' '.join(command)}: exit status {result.returncode}: {said or 'it said nothing'}")
        time.sleep(RETRY_S)
