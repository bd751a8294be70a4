"""jobs.json of a run on SLURM: every array, written down before and after its sbatch.

    {"cluster": "slurm", "token": "8 hex digits of this run", "complete": false while a submission is under way, "time": ...,
     "arrays": [{"role", "name", "job_id" (null until sbatch has answered), "num_elements", "throttle", "gpus_per_element",
                 "nodes_per_element", "time_limit_s", "submitted", "cluster_name"}, ...]}

Names are unique, so that an array whose id was lost is found by its name. A record without an id is dropped only where sbatch has
definitely refused the array: SLURM may queue one, seconds later, whose sbatch got no answer. `complete` stays true while more is
submitted to a run that goes on: whatever becomes of that, the run is whole.
"""

from __future__ import annotations

import json
import secrets
import time

from launcher.config.cluster import GpuRequest
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import JobSpec
from launcher.slurm import queries
from workers.run.files import write_atomic
from workers.run.folder import RunFolder


class ArrayRecords:
    """One submission of arrays to a run, perhaps not its first. `going_on`: the run goes on whatever becomes of it."""

    def __init__(self, run: RunFolder, config: FullConfig, going_on: bool = False) -> None:
        self._run = run
        self._config = config
        self._going_on = going_on
        content = run.submission()
        self._token = content.get("token") or secrets.token_hex(4)
        self._earlier: list[dict] = content.get("arrays", [])
        self._mine: list[dict] = []
        self.last, self.cluster_name = "the first array", ""

    def begin(self, spec: JobSpec, num_elements: int) -> str:
        """Write down an array that is about to be submitted; returns its name."""
        numbers = [int(array["name"].rsplit("-", 1)[1]) for array in [*self._earlier, *self._mine] if array["role"] == spec.role]
        name = f"{self._config.run.name}-{self._token}-{spec.role}-{max(numbers, default=0) + 1}"
        gpus = 0 if self._config.cluster.role(spec.role).gpus is GpuRequest.none else spec.devices_per_element
        self._mine.append({"role": spec.role, "name": name, "job_id": None, "num_elements": num_elements,
                           "throttle": min(spec.throttle, num_elements), "gpus_per_element": gpus, "nodes_per_element": spec.nodes_per_element,
                           "time_limit_s": spec.time_limit_s, "submitted": time.time(), "cluster_name": self.cluster_name})
        self.last = name
        self._write(complete=False)
        return name

    def submitted(self, name: str, job_id: str) -> None:
        """sbatch has answered."""
        next(array for array in self._mine if array["name"] == name)["job_id"] = job_id
        self._write(complete=False)

    def complete(self) -> None:
        """All of this submission is in the queue."""
        self._write(complete=True)

    def found(self) -> list[str]:
        """The job ids of this submission, also of arrays whose answer was lost. Raises `SlurmError`."""
        for array in self._mine:
            _find(array)
        return [array["job_id"] for array in self._mine if array["job_id"]]

    def withdraw(self, refused: bool) -> list[str]:
        """This submission has been cancelled. Returns the names of arrays that may still appear; `refused`: there are none, forget them."""
        if refused:
            self._mine = [array for array in self._mine if array["job_id"]]
        for array in self._mine:
            array["withdrawn"] = bool(array["job_id"])  # by us: nobody has cancelled the run
        self._write(complete=True)
        return [array["name"] for array in self._mine if not array["job_id"]]

    def _write(self, complete: bool) -> None:
        content = {"cluster": self._config.cluster.kind.value, "complete": complete or self._going_on, "time": time.time(), "token": self._token,
                   "arrays": self._earlier + self._mine, "jobs": []}
        write_atomic(self._run.submitted, json.dumps(content, indent=2).encode())


def unanswered(run: RunFolder) -> list[dict]:
    """The arrays of which nobody knows whether SLURM has taken them."""
    return [array for array in run.submission().get("arrays", []) if not array["job_id"]]


def settle(run: RunFolder) -> dict[str, float]:
    """Look by name for arrays whose answer was lost, and write down the ids of those that are there; for the run's keeper alone.

    Returns when the newest of each role was submitted, seconds since 1970: of those that were without an id. Raises `SlurmError`.
    """
    content = run.submission()
    lost = [array for array in content.get("arrays", []) if not array["job_id"]]
    if not lost or not content["complete"]:  # whoever submits just now writes the file
        return {}
    since: dict[str, float] = {}
    for array in lost:
        # One that is there now may have come after the look at the queue: it counts as new.
        when = time.time() if _find(array) else array["submitted"]
        since[array["role"]] = max(when, since.get(array["role"], 0.0))
    if any(array["job_id"] for array in lost):
        write_atomic(run.submitted, json.dumps(content, indent=2).encode())
    return since


def _find(array: dict) -> bool:
    """Give a record without an id the one that its name has in SLURM; false if there is none. Raises `SlurmError`."""
    if not array["job_id"] and (ids := queries.jobs_named(array["name"])):
        array["job_id"] = ids[-1]
    return bool(array["job_id"])
