"""A run's present figures for Prometheus (https://prometheus.github.io/client_python): an HTTP endpoint, read as often as it likes.

    metrics.jsonl, evaluations.jsonl --the last line of each--> headway_train_NAME, headway_evaluation_NAME
    status.json, at every scrape ---------------------------> headway_STATE, headway_worker_...

It tells what docs/grafana.json shows and an operator pages on. Histories are Prometheus's to keep.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from workers.config import ConfigError, TrackingConfig
from workers.run.folder import RunFolder
from workers.tracking.tracker import About

STATES = {
    "step": "training steps done", "num_steps": "training steps to do", "epoch": "incarnation of the training job",
    "lead": "steps ahead that are admitted",
    "buffer": "finished groups that wait for a batch", "running": "groups being sampled", "concurrency": "groups that may be sampled at once",
    "replicas_ready": "rollout workers that take work", "set_aside": "groups that were given up", "rejected": "groups that were rejected",
    "tokens_generated": "by all engines so far", "tokens_trained": "so far", "refused_peers": "connections without the run's keys",
    "malformed_messages": "messages that cannot be read"}
"""Figures of status.json."""
WORKER_STATES = {"silent_s": "seconds since it was heard", "running": "groups that it samples", "restarts": "of its engines",
                 "tokens_in_flight": "of its samples", "refused": "of its results"}


class PrometheusRun:
    """See `Tracked`. `remote`: where it listens, HOST:PORT."""

    def __init__(self, config: TrackingConfig, about: About) -> None:
        self._run, self._name, self._values = RunFolder(about.folder), about.name, dict[str, float]()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(config.port, config.interface, registry)
        except OSError as error:
            raise ConfigError(f"tracking.port={config.port}: cannot be listened on at tracking.interface={config.interface} ({error}). "
                              "0 takes any free port") from error
        self.remote = f"{config.interface}:{self._server.server_port}"
        print(f"Prometheus: http://{self.remote}/metrics", flush=True)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        parts = {name.partition("/")[0] for name in values}
        others = {name: value for name, value in self._values.items() if name.partition("/")[0] not in parts}
        self._values = {**others, **values}  # a scrape reads the one or the other

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Text is not for Prometheus."""

    def alarm(self, step: int, text: str) -> None:
        """Which are active stands in status.json."""

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What a scrape is answered."""
        for name, value in sorted(self._values.items()):
            yield self._gauge(metric_name(name), f"{name} (docs/metrics.md)", {(): value})
        status = self._status()
        for name, what in STATES.items():
            if isinstance(status.get(name), int | float):
                yield self._gauge(f"headway_{name}", what, {(): status[name]})
        if status:
            yield self._gauge("headway_status_age_s", "seconds since the coordinator wrote its status", {(): max(0.0, time.time() - status["time"])})
            yield self._gauge("headway_alarm", "1 while it is active", {(alarm["name"],): 1.0 for alarm in status.get("alarms", ())}, "alarm")
            yield self._gauge("headway_waiting", "1 while a part waits, 0 while it works; what for: headway status",
                              {(part,): float(bool(what)) for part, what in status.get("waiting", {}).items()}, "part")
            for name, what in WORKER_STATES.items():
                yield self._gauge(f"headway_worker_{name}", what, {
                    (worker["name"], worker["host"]): float(worker[name]) for worker in status.get("workers", ())}, "worker", "host")

    def _status(self) -> dict[str, Any]:
        try:
            return json.loads(self._run.status.read_bytes())
        except (OSError, ValueError):  # not there yet, or the run folder is away
            return {}

    def _gauge(self, name: str, what: str, values: Mapping[tuple[str, ...], float], *labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, what, labels=["run", *labels])
        for label, value in values.items():
            family.add_metric([self._name, *label], value)
        return family


def metric_name(name: str) -> str:
    """The name of a figure as trackers show it, as Prometheus takes it: 'train/reward' is headway_train_reward."""
    return "headway_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
