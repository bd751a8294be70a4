"""Bytes from any rank to rank 0, and from rank 0 to all, outside of all collectives: for threads that run beside training.

They go through the store where the ranks met, over connections of their own.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from workers.trainer.megatron.parallel import collectives, process_group

LISTEN_S = 0.25
"""So often a rank looks whether there is a notice: a store whose `wait` ends without one says so in the log."""


class MailboxError(RuntimeError):
    """A rank that has not sent what rank 0 waits for."""


class Mailbox:
    """One message of each rank to rank 0. All ranks make it together; then each calls `post`, from any thread, and rank 0 `collect`."""

    def __init__(self) -> None:
        self._rank, self._world_size = process_group.rank(), process_group.world_size()
        self._own = b""
        if self._world_size > 1:
            self._name, self._store = _place()

    def post(self, content: bytes) -> None:
        """Send this rank's message."""
        if self._rank == 0:
            self._own = content
        else:
            self._store.set(self._key(self._rank), content)

    def collect(self, timeout_s: float) -> list[bytes]:
        """The messages of all ranks, in order, on rank 0. Raises `MailboxError` where one has not come in `timeout_s` seconds."""
        found = [self._own]
        for rank in range(1, self._world_size):
            try:
                self._store.wait([self._key(rank)], timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise MailboxError(f"rank {rank} has not reported within {timeout_s:g} s. Look at its log") from error
            found.append(self._store.get(self._key(rank)))
            self._store.delete_key(self._key(rank))
        return found

    def _key(self, rank: int) -> str:
        return f"mailbox/{self._name}/{rank}"


class Notices:
    """What rank 0 says to the other ranks; whoever listens hears all of it, in order. All ranks make it together; one thread of each uses it."""

    def __init__(self) -> None:
        self._number, self._closed = 0, threading.Event()
        self._alone = process_group.world_size() == 1
        if not self._alone:
            self._name, self._store = _place()

    def say(self, content: bytes) -> None:
        """Rank 0 says something."""
        if not self._alone:
            self._store.set(self._key(), content)
            self._number += 1

    def hear(self) -> bytes | None:
        """The next notice, on any other rank, whenever it comes; None where this has been closed, or rank 0 is gone."""
        with contextlib.suppress(dist.DistNetworkError):
            while not self._closed.wait(LISTEN_S):
                if self._store.check([self._key()]):
                    content: bytes = self._store.get(self._key())
                    self._number += 1
                    return content
        return None

    def close(self) -> None:
        """Nothing is heard any more."""
        self._closed.set()

    def _key(self) -> str:
        return f"notices/{self._name}/{self._number}"


def _place() -> tuple[str, Any]:
    """A name of its own on all ranks, which call this together, and a connection to their store."""
    name = collectives.broadcast_bytes(uuid.uuid4().hex.encode() if process_group.rank() == 0 else None).decode()
    return name, dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
