"""Where the trainer's versions of the weights lie: in the memory of its nodes, and on storage that all nodes share where workers read files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from workers.config import ClusterKind, Config, Transport
from workers.run.folder import RunFolder


class Places(NamedTuple):
    """`store`: root of the node's store. `shared`: for copies, where workers read files; None where they read those in the store itself."""

    store: Path
    shared: Path | None


def places(run: RunFolder, config: Config) -> Places:
    """On one machine all workers see its memory, so nothing is copied; a folder that weights.transport=disk is given is filled all the same."""
    where, disk = config.weights.dir, config.weights.transport is Transport.disk
    if config.cluster.kind is ClusterKind.local and not (disk and where != "auto"):
        return Places(run.store(where), None)
    return Places(run.store("auto"), run.weights(where)) if disk else Places(run.store(where), run.weights("run"))
