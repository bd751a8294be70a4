"""What probes have found: folders that nodes of a partition see as this host does, so that a run need not wait for a free node to be told so again.

Kept for `KEPT_S` in the user's own cache folder, by host, cluster and partition. Without a readable file nothing is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path

from workers.run.files import write_atomic

KEPT_S = 7 * 86400.0


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway" / "shared_folders.json"


def _read() -> dict[str, float]:
    try:
        found = json.loads(_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return {key: float(at) for key, at in found.items() if isinstance(at, int | float)} if isinstance(found, dict) else {}


def _key(cluster: str, partition: str, folder: Path) -> str:
    return json.dumps([platform.node(), cluster, partition, str(folder)])


def remember(cluster: str, partition: str, folder: Path, now: float) -> None:
    """`folder` is shared with a node of the partition. Where this cannot be written down, it is not."""
    kept = {key: at for key, at in _read().items() if now - at < KEPT_S}
    with contextlib.suppress(OSError):
        _file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(_file(), json.dumps({**kept, _key(cluster, partition, folder): now}, indent=1).encode())


def is_shared(cluster: str, partition: str, folder: Path, now: float) -> bool:
    """Whether a probe has found this of `folder`, or of one that it is in."""
    known = _read()
    return any(0 <= now - known.get(_key(cluster, partition, place), float("-inf")) < KEPT_S for place in (folder, *folder.parents))
