"""A run in trackio (https://huggingface.co/docs/trackio): a database in the run folder, or a server of its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from workers.config import ConfigError, TrackingConfig
from workers.tracking.tracker import About


class TrackioRun:
    """See `Tracked`. Without `url` its database is in RUN/tracking/trackio."""

    def __init__(self, config: TrackingConfig, about: About) -> None:
        folder = about.folder / "tracking" / "trackio"
        os.environ["TRACKIO_DIR"] = str(folder)  # read when it is imported
        import trackio

        if config.url and not os.environ.get("TRACKIO_WRITE_TOKEN"):
            raise ConfigError(f"tracking.url={config.url}: trackio's server takes nothing without a token. Set TRACKIO_WRITE_TOKEN where the run "
                              "is started")
        self._trackio, self.remote = trackio, about.remote or f"{about.name}-{secrets.token_hex(4)}"
        print(f"trackio run {self.remote}" + (f" at {config.url}" if config.url else f": TRACKIO_DIR={folder} trackio show"), flush=True)
        trackio.init(project=config.project, name=self.remote, server_url=config.url or None, config=dict(about.settings), resume="allow",
                     embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        columns = ["prompt_id", "prompt", "reference", "response", "score"]
        self._trackio.log({"heldout": self._trackio.Table(columns=columns, data=[[row.get(name) for name in columns] for row in rows])}, step=step)

    def alarm(self, step: int, text: str) -> None:
        self._trackio.alert(title=f"step {step}", text=text)

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        figures = {f"summary/{name}": value for name, value in summary.items() if isinstance(value, int | float | str)}
        if figures:
            self._trackio.log(figures)
        self._trackio.finish()
