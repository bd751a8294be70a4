"""A training rank's part in sending new weights to the engines (weights.transport=nccl). What is decided about groups is rank 0's (broadcast.py).

    a thread             rank 0's notices: OpenLanes, CloseLanes
    the lane's thread    joins, as rank 0 of a process group with all engine ranks; bucket after bucket to them (lane.py)
    main thread          broadcast, all ranks together: one bucket is put together on its sender (sending_plan.py) while others travel

A group has a lane for each training rank that sends, so that nothing is brought to one of them first. What goes wrong anywhere ends the
group on all ranks, never training.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from workers.config import Config, Server
from workers.model.architecture import Architecture
from workers.trainer.megatron.hf_conversion import Shard
from workers.trainer.megatron.model.model import DTYPES
from workers.trainer.megatron.parallel import collectives, process_group
from workers.trainer.megatron.parallel.mailbox import Notices
from workers.trainer.weights.lane import Lane
from workers.trainer.weights.sending_plan import SendingPlan
from workers.transport.addresses import address_of, interface_of
from workers.weights.shard_plan import BUCKET_BYTES
from workers.weights.update_group import GroupError

Weights = Callable[[Iterable[tuple[Shard, int]]], Iterator[list[Tensor]]]


class OpenLanes(msgspec.Struct, frozen=True, tag=True):
    """Join `group`: each lane has `num_ranks` ranks, which meet at address:port."""

    group: str
    address: str
    port: int
    num_ranks: int


class CloseLanes(msgspec.Struct, frozen=True, tag=True):
    """`group` is of no use any more."""

    group: str
    cause: str


class Lanes:
    """This rank's lane, in one group after the other; all ranks make it together. `weights`: MegatronEngine.iter_shards; `limit`: bytes of a
    bucket."""

    def __init__(self, config: Config, architecture: Architecture, weights: Weights, limit: int = BUCKET_BYTES) -> None:
        self.plan = SendingPlan(config, architecture, process_group.world_size(), limit)
        self._rank, self._weights, self._timeout_s = process_group.rank(), weights, config.weights.timeout_s
        on_gpus = torch.cuda.is_available() and config.engine.server is Server.sglang and config.engine.device != "cpu"
        self.backend, self._device = ("nccl", torch.device("cuda", torch.cuda.current_device())) if on_gpus else ("gloo", torch.device("cpu"))
        self._dtype = DTYPES[config.engine.dtype]
        self.address = address_of(config.transport.interface)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface_of(self.address))
        self._number = self.plan.senders.index(self._rank) if self._rank in self.plan.senders else None
        self._group = ""
        self._lane: Lane | None = None
        self._changing = threading.RLock()  # the coordinator's word and a failed broadcast may come at once
        self._notices = Notices()
        self._listener = threading.Thread(target=self._listen, name="lanes", daemon=True)
        if self._rank and self._number is not None:
            self._listener.start()

    def open(self, order: OpenLanes, store: dist.Store | None = None) -> None:
        """Begin to join a group, instead of the one that there is; rank 0, which hosts it at `store`, tells the others."""
        with self._changing:
            self.leave(CloseLanes(self._group, "there is another one"))
            if self._number is not None:
                self._lane = Lane(order.group, self._number, order.num_ranks, self.backend, self._timeout_s, address=order.address, port=order.port,
                                  store=store)
            self._group = order.group
            self._tell(order)

    def in_group(self, group: str) -> bool:
        """Whether this rank has been told of `group`, and not that it is of no use any more."""
        return self._group == group

    def leave(self, order: CloseLanes, wait_s: float = 0.0) -> None:
        """Leave the group, if it is this one; rank 0 tells the others. `wait_s`: for the lane's thread to end."""
        with self._changing:
            if order.group == self._group != "":
                self._group = ""
                if self._lane is not None:
                    self._lane.leave(order.cause, wait_s)
                self._lane = None  # and with it the store, at which servers may still wait for each other
                self._tell(order)

    def close(self, wait_s: float) -> None:
        """This rank leaves, and hears nothing more. `wait_s`: for its threads to end."""
        self.leave(CloseLanes(self._group, "the trainer leaves"), wait_s)
        self._notices.close()
        if self._listener.is_alive():
            self._listener.join(wait_s)

    def broadcast(self, group: str) -> int:
        """Send the present weights through `group`; all ranks call this together. Returns the bytes that each engine has got. Raises `GroupError`,
        on all ranks alike."""
        lane, deadline = self._lane, time.monotonic() + self._timeout_s
        ready = self._number is None or (self._group == group and lane is not None and lane.joined)
        if problem := collectives.first_text("" if ready else (lane and lane.end) or f"training rank {self._rank} is not in group {group}"):
            raise GroupError(problem)
        pieces = self._weights(one for bucket in self.plan.sending for one in bucket)
        try:
            for bucket in self.plan.sending:
                flat = self._filled(bucket, pieces)
                if lane is not None and flat is not None:
                    lane.broadcast(flat, deadline)
            if lane is not None:
                lane.finish(deadline)
        except GroupError as error:
            problem = str(error)
        finally:
            for _ in pieces:  # other ranks need this one's shares in any case
                pass
        if problem := collectives.first_text(problem):
            raise GroupError(problem)
        return sum(self.plan.sent)

    def _filled(self, bucket: list[tuple[Shard, int]], pieces: Iterator[list[Tensor]]) -> Tensor | None:
        """A bucket, on the rank that sends it. The others have their part in it."""
        flat, start = None, 0
        for _, tensors in zip(bucket, pieces, strict=False):
            if tensors and flat is None:
                size = sum(math.prod(piece.shape) for shard, _ in bucket for piece in shard.pieces)
                flat = torch.empty(size, dtype=self._dtype, device=self._device)
            for tensor in tensors:
                assert flat is not None
                flat[start:start + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
                start += tensor.numel()
        assert flat is None or start == len(flat)
        return None if flat is None else flat.view(torch.uint8)

    def _tell(self, order: OpenLanes | CloseLanes) -> None:
        if self._rank == 0:
            self._notices.say(msgspec.msgpack.encode(order))

    def _listen(self) -> None:
        while (content := self._notices.hear()) is not None:
            order = msgspec.msgpack.decode(content, type=OpenLanes | CloseLanes)
            if isinstance(order, OpenLanes):
                self.open(order)
            else:
                self.leave(order)
