"""Bytes from any rank to rank 0, outside of all collectives: for threads that run beside training.

They go through the store where the ranks met, over a connection of their own.
"""

from __future__ import annotations

import uuid
from datetime import timedelta

import torch.distributed as dist

from workers.trainer.megatron.parallel import collectives, process_group


class MailboxError(RuntimeError):
    """A rank that has not sent what rank 0 waits for."""


class Mailbox:
    """One message of each rank to rank 0. All ranks make it together; then each calls `post`, from any thread, and rank 0 `collect`."""

    def __init__(self) -> None:
        self._rank, self._world_size = process_group.rank(), process_group.world_size()
        self._own = b""
        if self._world_size > 1:
            self._name = collectives.broadcast_bytes(uuid.uuid4().hex.encode() if self._rank == 0 else None).decode()
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

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
