"""From the plan to job specifications: what is submitted, in the terms of the project. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.partition import Plan
from workers.entry import Element
from workers.rundir import RunFolder


@dataclass(frozen=True)
class JobSpec:
    """One job array: `elements` are run side by side, each on `devices_per_element` devices."""

    name: str
    elements: tuple[Element, ...]
    devices_per_element: int

    def describe(self) -> str:
        """One line for people."""
        return f"{self.name}: {len(self.elements)} element(s) x {self.devices_per_element} device(s)"


def job_specs(plan: Plan, run_name: str, run: RunFolder) -> tuple[JobSpec, JobSpec]:
    """The inference array (one element a replica) and the training array (one element over all its devices)."""
    inference = tuple(Element("rollout", str(run.path)) for _ in range(plan.num_replicas))
    return (JobSpec(f"{run_name}-inference", inference, plan.replica_size),
            JobSpec(f"{run_name}-train", (Element("train", str(run.path)),), plan.num_train_devices))
