"""How workers find the coordinator: one small file for each epoch, written atomically, never changed.

A new name each time, because shared file systems cache entries: readers list the folder and take the newest epoch.
"""

from __future__ import annotations

import msgspec

from workers.run.files import write_once
from workers.run.folder import RunFolder


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a coordinator listens: ZeroMQ endpoints of its ROUTER and its PUB socket."""

    epoch: int
    router: str
    publisher: str


def publish(run: RunFolder, address: Address) -> None:
    """Write the address of this epoch's coordinator."""
    if not write_once(run.rendezvous / f"coordinator.{address.epoch:06d}.json", msgspec.json.encode(address)):
        raise FileExistsError(f"epoch {address.epoch} has a coordinator already. Claim a new epoch")


def newest(run: RunFolder) -> Address | None:
    """The newest coordinator's address, or None if none has started."""
    names = sorted(path.name for path in run.rendezvous.iterdir() if path.name.startswith("coordinator."))
    if not names:
        return None
    return msgspec.json.decode((run.rendezvous / names[-1]).read_bytes(), type=Address)
