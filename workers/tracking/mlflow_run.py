"""A run in MLflow (https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html): a server, or files in the run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from workers.config import TrackingConfig
from workers.tracking.tracker import About

PARAMS, LONGEST = 100, 6000
"""Parameters in a request, and characters of a value, that servers take."""


class MlflowRun:
    """See `Tracked`. Without `url` its files are in RUN/tracking/mlruns."""

    def __init__(self, config: TrackingConfig, about: About) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the library's own files are all that a run without a server needs
        uri = config.url or (about.folder / "tracking" / "mlruns").as_uri()
        self._client = MlflowClient(uri)
        self.remote = about.remote or self._create(config, about)
        print(f"MLflow run {self.remote} in {uri}", flush=True)
        self._client.update_run(self.remote, status="RUNNING")

    def _create(self, config: TrackingConfig, about: About) -> str:
        experiment = self._client.get_experiment_by_name(config.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.project)
        made = self._client.create_run(number, run_name=about.name, tags={"headway.folder": str(about.folder)}).info.run_id
        params = [Param(name, str(value)[:LONGEST]) for name, value in about.settings.items()]
        for start in range(0, len(params), PARAMS):
            self._client.log_batch(made, params=params[start:start + PARAMS])
        return made

    def step(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self.remote, metrics=[Metric(name, float(value), now, step) for name, value in values.items()])

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._client.log_dict(self.remote, {"step": step, "samples": rows}, f"heldout/{step}.json")

    def alarm(self, step: int, text: str) -> None:
        self._client.set_tag(self.remote, f"alarm.{step}", text[:LONGEST])

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        if not summary:
            self._client.update_run(self.remote, status="SCHEDULED")  # it goes on later
            return
        self._client.log_dict(self.remote, dict(summary), "summary.json")
        self._client.set_terminated(self.remote, "FAILED" if failed else "FINISHED")
