"""What Prometheus reads of a run, over HTTP, and that Grafana's panels ask for nothing else."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from tests.support.report_runs import make
from workers.config import ConfigError, TrackingConfig
from workers.run.folder import RunFolder
from workers.tracking.prometheus_run import PrometheusRun
from workers.tracking.run_follower import figures
from workers.tracking.tracker import About

DASHBOARD = Path(__file__).resolve().parents[4] / "docs" / "grafana.json"
STATUS = {
    "step": 7, "num_steps": 100, "epoch": 2, "lead": 1.5, "buffer": 3, "running": 12, "concurrency": 16, "replicas_ready": 2, "set_aside": 0,
    "rejected": 1, "tokens_generated": 5000, "tokens_trained": 4000, "refused_peers": 0, "malformed_messages": 0,
    "waiting": {"trainer": "a batch", "rollouts": ""}, "alarms": [{"name": "entropy_collapse", "since": 5, "condition": "", "remedy": ""}],
    "workers": [{"name": "rollout 0", "host": "node1", "silent_s": 0.25, "running": 6, "restarts": 1, "tokens_in_flight": 300, "refused": 0}]}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make(tmp_path / "run", None, (0.25, 0.75), 40, "finished")


@pytest.fixture
def told(run: RunFolder) -> Iterator[PrometheusRun]:
    prometheus = PrometheusRun(TrackingConfig(port=0), About("mine", run.path, {}, ""))
    yield prometheus
    prometheus.finish({}, False)


def scrape(told: PrometheusRun) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(f"http://{told.remote}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in text_string_to_metric_families(text)}


def test_figures_of_steps_and_of_now(run: RunFolder, told: PrometheusRun) -> None:
    run.status.unlink(missing_ok=True)
    assert scrape(told) == {}, "before there is anything"
    told.step(3, {"train/reward": 1.5, "train/staleness_histogram.0": 2})
    told.step(4, {"train/reward": 2.5})
    told.step(4, {"evaluation/accuracy": 0.5})
    run.status.write_text(json.dumps(STATUS | {"time": time.time() - 30}))
    found = scrape(told)
    assert found["headway_train_reward"] == [({"run": "mine"}, 2.5)] and "headway_train_staleness_histogram_0" not in found, "not of step 4"
    assert found["headway_evaluation_accuracy"] == [({"run": "mine"}, 0.5)] and found["headway_buffer"] == [({"run": "mine"}, 3.0)]
    assert found["headway_alarm"] == [({"run": "mine", "alarm": "entropy_collapse"}, 1.0)]
    assert found["headway_waiting"] == [({"run": "mine", "part": "trainer"}, 1.0), ({"run": "mine", "part": "rollouts"}, 0.0)]
    assert found["headway_worker_silent_s"] == [({"run": "mine", "worker": "rollout 0", "host": "node1"}, 0.25)]
    assert 30 <= found["headway_status_age_s"][0][1] < 600
    run.status.write_text("{")
    assert "headway_buffer" not in scrape(told), "half a file is none"


def test_the_dashboard_asks_for_what_there_is(run: RunFolder, told: PrometheusRun) -> None:
    record = json.loads(run.metrics.read_text().splitlines()[-1])
    told.step(1, figures(record, "train") | figures(json.loads(run.evaluations.read_text().splitlines()[-1]), "evaluation"))
    run.status.write_text(json.dumps(STATUS | {"time": time.time()}))
    known = scrape(told).keys()
    board = json.loads(DASHBOARD.read_bytes())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [entry["query"] for entry in board["templating"]["list"] if entry["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"\bheadway_\w+", query)}
    assert len(queries) >= 12 and asked and not asked - known, asked - known


def test_a_port_that_is_taken_is_named(run: RunFolder, told: PrometheusRun) -> None:
    port = int(told.remote.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"tracking.port={port}: cannot be listened on"):
        PrometheusRun(TrackingConfig(port=port), About("other", run.path, {}, ""))
