"""One lane: the process group in which a training rank is rank 0 and all engine ranks follow, and the thread that alone does anything in it."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist
from torch import Tensor

from workers.messages.broadcasts import lane_name
from workers.weights.update_group import BroadcastGroup, GroupError, store_at

JOIN_S = 40.0
"""A little more than the coordinator waits, which has the say."""
ON_THE_WAY = 2
"""So many buckets are in memory besides the one that is being filled."""


class Lane:
    """Lane `number` of `group`, from its making on. Its `num_ranks` ranks meet at address:port, or at `store` where this process hosts it.
    `end`: why it is of no use, '' while it is."""

    def __init__(self, group: str, number: int, num_ranks: int, backend: str, timeout_s: float, *, address: str, port: int,
                 store: dist.Store | None) -> None:
        self.joined, self.end = False, ""
        self._name, self._num_ranks, self._backend, self._timeout_s = lane_name(group, number), num_ranks, backend, timeout_s
        self._address, self._port, self._store = address, port, store
        self._group: BroadcastGroup | None = None
        self._on_the_way: list[tuple[Tensor, float]] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._live, name=self._name, daemon=True)
        self._thread.start()

    def broadcast(self, flat: Tensor, deadline: float) -> None:
        """Have it sent; returns while it may still be on the way. Raises `GroupError`."""
        self._wait(ON_THE_WAY - 1, deadline)
        with self._changed:
            self._on_the_way.append((flat, deadline))
            self._changed.notify_all()

    def finish(self, deadline: float) -> None:
        """Wait until all is sent. Raises `GroupError`."""
        self._wait(0, deadline)

    def leave(self, cause: str, wait_s: float = 0.0) -> None:
        """It is of no use any more; `wait_s`: for its thread to end."""
        with self._changed:
            self.end = self.end or cause
            self._changed.notify_all()
            if self._group is not None and self._on_the_way:
                self._group.abort()
        self._thread.join(wait_s)

    def _wait(self, number: int, deadline: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.end or len(self._on_the_way) <= number, max(0.0, deadline - time.monotonic()))
            if self.end or len(self._on_the_way) > number:
                raise GroupError(self.end or f"the broadcast has taken longer than {self._timeout_s:g} s (weights.timeout_s)")

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            store = self._store or store_at(self._address, self._port, JOIN_S)
            group = self._group = BroadcastGroup(self._address, self._port, 0, self._num_ranks, self._name, self._backend, self._timeout_s, JOIN_S,
                                                 store)
            self.joined = True
            store.set(self._name, "in")
            while (sending := self._next()) is not None:
                flat, deadline = sending
                group.broadcast([flat], max(0.1, deadline - time.monotonic()))
                with self._changed:
                    self._on_the_way.pop(0)
                    self._changed.notify_all()
        except (GroupError, dist.DistError) as error:
            with self._changed:
                self.end = self.end or str(error)
                self._changed.notify_all()
        finally:
            self.joined = False
            with self._changed:
                left, self._group = self._group, None
            if left is not None:
                left.close()

    def _next(self) -> tuple[Tensor, float] | None:
        with self._changed:
            self._changed.wait_for(lambda: self.end or self._on_the_way)
            return None if self.end else self._on_the_way[0]
