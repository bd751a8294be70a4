"""Config of the trackers that a run's metrics go to besides its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from workers.config.choices import Tracker
from workers.config.rules import require


@dataclass
class TrackingConfig:
    """Trackers that follow the run, each by a process of its own (docs/tracking.md): one that is slow, or dies, is no matter to the run.

    TensorBoard's files are always written. Keys and passwords are the libraries' own business: WANDB_API_KEY, MLFLOW_TRACKING_TOKEN and the like.
    """

    to: list[Tracker] = field(default_factory=list)  # trackers, several at once: wandb, mlflow, trackio, prometheus
    project: str = "headway"  # W&B's project, MLflow's experiment
    url: str = ""  # where the tracker is; '': W&B's own server, or what its settings say; MLflow, trackio: files in the run folder
    offline: bool = False  # true: W&B writes files alone (`wandb sync` sends them); it does so too where its server cannot be reached
    port: int = 9400  # where Prometheus finds the figures, on training's first node; 0: a free one
    interface: str = "127.0.0.1"  # the address that they are told at; whoever can reach it can read them

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(len(set(self.to)) == len(self.to), "tracking.to", [one.value for one in self.to], "names a tracker twice", "Name each once")
        require(bool(self.project.strip()) or not self.to, "tracking.project", self.project, "must not be empty", "headway is the default")
        told = {*self.to} - {Tracker.prometheus}
        require(not self.url or (self.url.startswith(("http://", "https://")) and len(told) == 1), "tracking.url", self.url,
                "must be http://... or https://..., and of one tracker", "'' takes the library's own settings")
        require("@" not in urlsplit(self.url).netloc and "?" not in self.url, "tracking.url", "...", "must hold no user, password or token",
                "The libraries read these from variables of their own: TRACKIO_WRITE_TOKEN, MLFLOW_TRACKING_TOKEN, WANDB_API_KEY")
        require(0 <= self.port < 65536, "tracking.port", self.port, "must be from 0 to 65535", "0 takes any free port")
        require(bool(self.interface.strip()), "tracking.interface", self.interface, "must be an address of the node", "0.0.0.0 is all of them")
