"""jobs.json of a run on SLURM: every array, written down before and after its sbatch.

    {"cluster": "slurm", "token": "8 hex digits of this run", "complete": false while a submission is under way, "time": ...,
     "arrays": [{"role", "name", "job_id" (null until sbatch has answered), "num_elements", "throttle", "gpus_per_element",
                 "nodes_per_element", "time_limit_s", "submitted"}, ...]}

Names are unique, so that an array whose id was lost is found by its name.
"""

from __future__ import annotations

import json
import secrets
import time

from launcher import slurm
from launcher.cluster import GpuRequest
from launcher.jobs import JobSpec
from launcher.schema import FullConfig
from workers.files import write_atomic
from workers.rundir import RunFolder


class ArrayRecords:
    """One submission of arrays to a run, perhaps not its first."""

    def __init__(self, run: RunFolder, config: FullConfig) -> None:
        self._run = run
        self._config = config
        content = run.submission()
        self._token = content.get("token") or secrets.token_hex(4)
        self._earlier: list[dict] = content.get("arrays", [])
        self._mine: list[dict] = []
        self.last = "the first array"

    @property
    def is_first(self) -> bool:
        """True if the run had no arrays before."""
        return not self._earlier

    def begin(self, spec: JobSpec, num_elements: int) -> str:
        """Write down an array that is about to be submitted; returns its name."""
        numbers = [int(array["name"].rsplit("-", 1)[1]) for array in [*self._earlier, *self._mine] if array["role"] == spec.role]
        name = f"{self._config.run.name}-{self._token}-{spec.role}-{max(numbers, default=0) + 1}"
        gpus = 0 if self._config.cluster.role(spec.role).gpus is GpuRequest.none else spec.devices_per_element
        self._mine.append({"role": spec.role, "name": name, "job_id": None, "num_elements": num_elements,
                           "throttle": min(spec.throttle, num_elements), "gpus_per_element": gpus, "nodes_per_element": spec.nodes_per_element,
                           "time_limit_s": spec.time_limit_s, "submitted": time.time()})
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
        return [job_id for array in self._mine for job_id in ([array["job_id"]] if array["job_id"] else slurm.jobs_named(array["name"]))]

    def withdraw(self) -> None:
        """This submission has been cancelled; arrays that SLURM has never known are forgotten."""
        self._mine = [array for array in self._mine if array["job_id"]]
        self._write(complete=True)

    def _write(self, complete: bool) -> None:
        content = {"cluster": self._config.cluster.kind.value, "complete": complete, "time": time.time(), "token": self._token,
                   "arrays": self._earlier + self._mine, "jobs": []}
        write_atomic(self._run.submitted, json.dumps(content, indent=2).encode())
