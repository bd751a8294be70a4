"""A run in Weights & Biases (https://docs.wandb.ai/ref/python): online where its server can be reached, else as files for `wandb sync`."""

from __future__ import annotations

import os
import secrets
import socket
import time
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import wandb

from workers.config import TrackingConfig
from workers.tracking.tracker import About

REACH_S = 5.0


class WandbRun:
    """See `Tracked`. Its files are in RUN/tracking/wandb."""

    def __init__(self, config: TrackingConfig, about: About) -> None:
        self.remote = about.remote or secrets.token_hex(4)
        if config.url:
            os.environ["WANDB_BASE_URL"] = config.url
        offline = config.offline or not reachable(wandb.setup().settings.base_url)
        folder = about.folder / "tracking"
        print(f"W&B run {self.remote}" + (f", offline: wandb sync {folder}/wandb/offline-run-*" if offline else ""), flush=True)
        while any(folder.glob(f"wandb/*run-{time.strftime('%Y%m%d_%H%M%S')}-{self.remote}")):
            time.sleep(0.1)  # a folder is called by its second: another within the same would be written over
        self._run = wandb.init(
            project=config.project, name=about.name, id=self.remote, resume="allow", dir=folder, config=dict(about.settings),
            notes=f"run folder {about.folder}", mode="offline" if offline else "online",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True, init_timeout=60))
        for part in ("train", "evaluation"):
            self._run.define_metric(f"{part}/*", step_metric=f"{part}/step")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values))

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        columns: list[str | int] = ["step", "prompt_id", "prompt", "reference", "response", "score"]
        self._run.log({"heldout": wandb.Table(columns=columns, data=[[step, *(row.get(str(name)) for name in columns[1:])] for row in rows])})

    def alarm(self, step: int, text: str) -> None:
        self._run.alert(title=f"step {step}", text=text)

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=int(failed))


def reachable(url: str) -> bool:
    """Whether something answers there within seconds, or the proxy that leads there."""
    parts = urlsplit(url)
    if not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(urllib.request.getproxies().get(parts.scheme, url))
    try:
        with socket.create_connection((parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), REACH_S):
            return True
    except OSError:
        return False
