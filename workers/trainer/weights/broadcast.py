"""Rank 0's side of new weights by broadcast (weights.transport=nccl). Who is in the group, and when: coordinator/weights/broadcast_group.py.

    link thread    OpenUpdateGroup --> hosts the store, has all ranks open their lanes (lanes.py) --UpdateGroupOpened-->
    its thread     all lanes are joined --UpdateGroupJoined-->
    main thread    broadcast: BroadcastWanted --> Broadcast --> all training ranks send, bucket by bucket
                                              --> BroadcastRefused: this version goes without

Training stands still for a broadcast, at most `ANSWER_S` until it begins and weights.timeout_s while it lasts. What goes wrong ends the group,
never training: weights are offered by zmq all the same.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from workers.messages.broadcasts import (
    Broadcast,
    BroadcastRefused,
    BroadcastWanted,
    LeaveUpdateGroup,
    OpenUpdateGroup,
    UpdateGroupBroken,
    UpdateGroupJoined,
    UpdateGroupOpened,
    lane_name,
)
from workers.messages.parts import Message, Version
from workers.run import gpus_seen
from workers.trainer.orders import BroadcastWeights
from workers.trainer.ranks import Ranks
from workers.trainer.weights.lane import JOIN_S
from workers.trainer.weights.lanes import CloseLanes, Lanes, OpenLanes
from workers.weights.update_group import GroupError, Host

ANSWER_S = 15.0
"""A little more than the coordinator takes at most."""
Send = Callable[[Message], None]


class WeightGroup:
    """The groups of a run, one after the other, as rank 0 leads them; `lanes`: its own part in them. `send`: to the coordinator, from any
    thread."""

    def __init__(self, lanes: Lanes, ranks: Ranks, send: Send) -> None:
        self._lanes, self._ranks, self._send = lanes, ranks, send
        self._library = gpus_seen.nccl_version() if lanes.backend == "nccl" else ""
        self._answers: queue.SimpleQueue[Broadcast | BroadcastRefused] = queue.SimpleQueue()
        self._hosted: HostedGroup | None = None

    # -- link thread ---------------------------------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """What the coordinator says about groups; anything else is ignored."""
        match message:
            case OpenUpdateGroup():
                self._open(message)
            case LeaveUpdateGroup():
                self._leave(message.group, message.cause)
            case Broadcast() | BroadcastRefused():
                self._answers.put(message)

    def _leave(self, group: str, cause: str) -> None:
        hosted = self._hosted
        if hosted is not None and hosted.name == group:
            self._hosted = None  # and with it the store, at which servers may still wait for each other
        self._lanes.leave(CloseLanes(group, cause))

    def _open(self, order: OpenUpdateGroup) -> None:
        lanes, plan = self._lanes, self._lanes.plan
        try:
            host = Host(lanes.address, JOIN_S)
        except GroupError as error:
            self._send(UpdateGroupBroken(order.group, str(error)))
            return
        lanes.open(OpenLanes(order.group, host.address, host.port, order.num_ranks), host.store)
        self._hosted = HostedGroup(order.group, host, len(plan.senders), self._send)
        self._send(UpdateGroupOpened(order.group, host.address, host.port, lanes.backend, plan.buckets, self._library))

    def close(self, wait_s: float) -> None:
        """Leave the group, if there is one; `wait_s`: for the threads of rank 0's lane."""
        self._lanes.close(wait_s)

    # -- main thread ---------------------------------------------------------------------------------------------------

    def broadcast(self, version: Version) -> dict[str, float]:
        """Broadcast the present weights as `version`, if there is a group and all of it is ready.

        Returns metrics: broadcast_s (seconds that this took), broadcast_bytes (0: it was not broadcast).
        """
        started, hosted, sent = time.monotonic(), self._hosted, 0
        if hosted is not None and hosted.joined and self._lanes.in_group(hosted.name):
            try:
                if self._may_begin(version):
                    self._ranks.tell(BroadcastWeights(hosted.name))
                    sent = self._lanes.broadcast(hosted.name)
            except GroupError as error:
                self._leave(hosted.name, str(error))
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


class HostedGroup:
    """A group whose lanes meet at `host`: `joined` when all of them, `num_lanes`, are."""

    def __init__(self, name: str, host: Host, num_lanes: int, send: Send) -> None:
        self.name, self.joined = name, False
        self._host, self._num_lanes, self._send = host, num_lanes, send
        threading.Thread(target=self._await, name=name, daemon=True).start()

    def _await(self) -> None:
        try:
            self._host.wait([lane_name(self.name, lane) for lane in range(self._num_lanes)])
        except GroupError as error:
            del self._host
            self._send(UpdateGroupBroken(self.name, f"training ranks have not joined: {error}"))
            return
        self.joined = True
        self._send(UpdateGroupJoined(self.name))
