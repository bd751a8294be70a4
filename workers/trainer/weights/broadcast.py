"""Rank 0's side of new weights by broadcast (weights.transport=nccl). Who is in the group, and when: coordinator/weights/broadcast_group.py.

    link thread    OpenUpdateGroup ------> HostedGroup
    its thread     listens --UpdateGroupOpened--> joins, rank 0 --UpdateGroupJoined-->   bucket after bucket to all other ranks
    main thread    broadcast: BroadcastWanted --> Broadcast --> gathers one bucket while another one travels
                                              --> BroadcastRefused: this version goes without

Training stands still for a broadcast, at most `ANSWER_S` until it begins and weights.timeout_s while it lasts. What goes wrong ends the group,
never training: weights are offered by zmq all the same.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from workers.config import Config, Server
from workers.messages.broadcasts import (
    Broadcast,
    BroadcastRefused,
    BroadcastWanted,
    LeaveUpdateGroup,
    OpenUpdateGroup,
    UpdateGroupBroken,
    UpdateGroupJoined,
    UpdateGroupOpened,
)
from workers.messages.parts import Message, Version
from workers.model.architecture import Architecture
from workers.run import gpus_seen
from workers.trainer.megatron.hf_conversion.names import all_hf_tensors
from workers.trainer.megatron.model.model import DTYPES
from workers.transport.addresses import address_of, interface_of
from workers.weights.buckets import BUCKET_BYTES, bucket_bytes, into_buckets
from workers.weights.update_group import BroadcastGroup, GroupError, Host

ANSWER_S = 15.0
"""A little more than the coordinator takes at most."""
JOIN_S = 40.0
"""A little more than the coordinator waits, which has the say."""
ON_THE_WAY = 2
"""So many buckets are in memory besides the one that is being filled."""
Send = Callable[[Message], None]
Weights = Callable[[], Iterator[tuple[str, Tensor]]]


class WeightGroup:
    """Rank 0's places in the groups of a run, one after the other. `weights` gives the present ones, under their Hugging Face names; `send`: to the
    coordinator, from any thread; `limit`: bytes of a bucket."""

    def __init__(self, config: Config, architecture: Architecture, weights: Weights, send: Send, limit: int = BUCKET_BYTES) -> None:
        self._config, self._shapes, self._weights, self._send = config, architecture.tensor_shapes(), weights, send
        names = (name for tensors in all_hf_tensors(architecture) for name in tensors.names)  # as the engine gives them
        self._buckets = into_buckets(names, self._shapes, config.engine.dtype, limit)
        on_gpus = torch.cuda.is_available() and config.engine.server is Server.sglang and config.engine.device != "cpu"
        self._backend, self._device = ("nccl", torch.device("cuda", torch.cuda.current_device())) if on_gpus else ("gloo", torch.device("cpu"))
        self._library = gpus_seen.nccl_version() if on_gpus else ""
        self._address = address_of(config.transport.interface)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface_of(self._address))
        self._answers: queue.SimpleQueue[Broadcast | BroadcastRefused] = queue.SimpleQueue()
        self._hosted: HostedGroup | None = None

    # -- link thread ---------------------------------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """What the coordinator says about groups; anything else is ignored."""
        match message:
            case OpenUpdateGroup():
                self.close("there is another one")
                self._hosted = HostedGroup(message, self._address, self._backend, self._library, self._buckets, self._config.weights.timeout_s,
                                           self._send)
            case LeaveUpdateGroup() if self._hosted is not None and self._hosted.name == message.group:
                self.close(message.cause)
            case Broadcast() | BroadcastRefused():
                self._answers.put(message)

    def close(self, cause: str = "the trainer leaves", wait_s: float = 0.0) -> None:
        """Leave the group, if there is one; `wait_s`: for its thread."""
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.leave(cause, wait_s)

    # -- main thread ---------------------------------------------------------------------------------------------------

    def broadcast(self, version: Version) -> dict[str, float]:
        """Broadcast the present weights as `version`, if there is a group and all of it is ready.

        Returns metrics: broadcast_s (seconds that this took), broadcast_bytes (0: it was not broadcast).
        """
        started, hosted, sent = time.monotonic(), self._hosted, 0
        if hosted is not None and hosted.joined:
            try:
                if self._may_begin(version):
                    sent = self._broadcast(hosted, self._weights())
            except GroupError as error:
                hosted.leave(str(error))
                self._send(UpdateGroupBroken(hosted.name, str(error)))
                print(f"version {version} was not broadcast to the end: {error}. Workers get it by zmq", flush=True)
        return {"broadcast_s": time.monotonic() - started, "broadcast_bytes": float(sent)}

    def _may_begin(self, version: Version) -> bool:
        self._send(BroadcastWanted(version))
        deadline = time.monotonic() + ANSWER_S
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
                if answer.version == version:
                    if isinstance(answer, BroadcastRefused):
                        print(f"version {version} is not broadcast: {answer.cause}. Workers get it by zmq", flush=True)
                    return isinstance(answer, Broadcast)
        raise GroupError(f"the coordinator has not said in {ANSWER_S:g} s whether it may be")

    def _broadcast(self, hosted: HostedGroup, tensors: Iterator[tuple[str, Tensor]]) -> int:
        deadline, sent = time.monotonic() + self._config.weights.timeout_s, 0
        try:
            for names in self._buckets:
                flat = self._fill(names, tensors)
                hosted.broadcast(flat, deadline)
                sent += len(flat)
            hosted.finish(deadline)
        finally:
            for _ in tensors:  # the other training ranks bring them in any case
                pass
        return sent

    def _fill(self, names: list[str], tensors: Iterator[tuple[str, Tensor]]) -> Tensor:
        flat = torch.empty(bucket_bytes(names, self._shapes, self._config.engine.dtype), dtype=torch.uint8, device=self._device)
        values, start = flat.view(DTYPES[self._config.engine.dtype]), 0
        for expected in names:
            name, tensor = next(tensors)
            if name != expected:
                raise GroupError(f"{name} has come instead of {expected}")
            values[start:start + tensor.numel()].copy_(tensor.detach().flatten())
            start += tensor.numel()
        return flat


class HostedGroup:
    """One group, from its making on, and the thread that alone does anything in it."""

    def __init__(self, order: OpenUpdateGroup, address: str, backend: str, library: str, buckets: list[list[str]], timeout_s: float,
                 send: Send) -> None:
        self.name, self.joined = order.group, False
        self._num_ranks, self._address, self._backend, self._buckets = order.num_ranks, address, backend, buckets
        self._library = library
        self._timeout_s, self._send = timeout_s, send
        self._group: BroadcastGroup | None = None
        self._on_the_way: list[tuple[Tensor, float]] = []
        self._end = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._live, name=self.name, daemon=True)
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
        """The group is of no use any more; `wait_s`: for its thread to end."""
        with self._changed:
            self._end = self._end or cause
            self._changed.notify_all()
            if self._group is not None and self._on_the_way:
                self._group.abort()
        self._thread.join(wait_s)

    def _wait(self, number: int, deadline: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._end or len(self._on_the_way) <= number, max(0.0, deadline - time.monotonic()))
            if self._end or len(self._on_the_way) > number:
                raise GroupError(self._end or f"the broadcast has taken longer than {self._timeout_s:g} s (weights.timeout_s)")

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            host = Host(self._address, JOIN_S)
            self._send(UpdateGroupOpened(self.name, host.address, host.port, self._backend, self._buckets, self._library))
            group = self._group = BroadcastGroup(host.address, host.port, 0, self._num_ranks, self.name, self._backend, self._timeout_s,
                                                 JOIN_S, host)
            self.joined = True
            self._send(UpdateGroupJoined(self.name))
            while (sending := self._next()) is not None:
                flat, deadline = sending
                group.broadcast([flat], max(0.1, deadline - time.monotonic()))
                with self._changed:
                    self._on_the_way.pop(0)
                    self._changed.notify_all()
        except GroupError as error:
            self._send(UpdateGroupBroken(self.name, str(error)))
            with self._changed:
                self._end = self._end or str(error)
                self._changed.notify_all()
        finally:
            self.joined = False
            with self._changed:
                left, self._group = self._group, None
            if left is not None:
                left.close()

    def _next(self) -> tuple[Tensor, float] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._end or self._on_the_way)
            return None if self._end else self._on_the_way[0]
