"""What rank 0 of a training element tells the others to do with it: each order is a broadcast of some bytes (ranks.py, follower.py)."""

from __future__ import annotations

import msgspec

from workers.messages.from_coordinator import Finish
from workers.messages.from_worker import CheckpointRequest
from workers.messages.parts import Version


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Take training step `step`; the leaders fetch their shares of its batch."""

    step: int


class WriteWeights(msgspec.Struct, frozen=True, tag=True):
    """Give rank 0 the weights, to export."""


class WriteAdapters(msgspec.Struct, frozen=True, tag=True):
    """Give rank 0 the adapters, to export."""


class MeasureHeldout(msgspec.Struct, frozen=True, tag=True):
    """Take part in measuring the held-out loss of a supervised run."""


class StillThere(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do yet."""


class PublishWeights(msgspec.Struct, frozen=True, tag=True):
    """Publish `version`. Older ones than `needed` are fetched by nobody; `shared`: copy it to shared storage as well."""

    version: Version
    needed: Version
    shared: bool


class ShareWeights(msgspec.Struct, frozen=True, tag=True):
    """Copy `version`, the last one that was published, to shared storage as well."""

    version: Version


class BroadcastWeights(msgspec.Struct, frozen=True, tag=True):
    """Send the weights to the engines in `group`."""

    group: str


Order = (TrainStep | PublishWeights | ShareWeights | BroadcastWeights | WriteWeights | WriteAdapters | MeasureHeldout | StillThere | CheckpointRequest
         | Finish)
