"""The processes of benchmarks.weights that broadcast: training ranks that send what a plan says, and engine ranks that take it.

    python -m benchmarks.weights.lanes send PARENT     rank 0 of one lane; the first of them hosts the store of all
    python -m benchmarks.weights.lanes take PARENT     a rank in every lane

Over gloo, by the calls that training and embedded engines make. Engine ranks put what comes in its place in memory, as the zmq way does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.children import Child, answer_orders
from workers.config import Config, ParallelConfig
from workers.messages.broadcasts import lane_name
from workers.model.architecture import Architecture
from workers.trainer.weights.lane import Lane
from workers.weights.update_group import BroadcastGroup, Host

if TYPE_CHECKING:
    from workers.trainer.weights.sending_plan import SendingPlan

GROUP, TIMEOUT_S = "benchmark", 300.0
NUM_RANKS, LAYOUT = 4, ParallelConfig()
BYTES_ACKED = 120
"""Where the kernel's tcp_info has them (linux/tcp.h)."""


def plan_of(size: int) -> SendingPlan:
    """For a model of about `size` bytes in bfloat16, of SmolLM2-135M's shape but for the number of its layers, trained in four copies."""
    from workers.trainer.weights.sending_plan import SendingPlan  # not in the children, which would begin with Megatron-core

    layers = max(1, round((size - 2 * 49_152 * 576) / (2 * 3_540_096)))
    config = Config()
    config.trainer.parallel, config.engine.dtype = LAYOUT, config.engine.dtype.bfloat16
    return SendingPlan(config, Architecture(
        family="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=layers, num_heads=9, num_kv_heads=3, head_dim=64,
        max_positions=8192, rms_norm_eps=1e-5, tied=True, rope_theta=1e5, rope_scaling=None, eos_token_ids=()), NUM_RANKS)


class Lanes:
    """A trainer's ranks and `receivers` engine ranks that stay; a turn is one version."""

    def __init__(self, stack: contextlib.ExitStack, size: int, receivers: int) -> None:
        self._plan = plan_of(size)
        self.sizes = [[bucket.lane, 2 * sum(torch.Size(piece.shape).numel() for piece in bucket.pieces)] for bucket in self._plan.buckets]
        self._senders = [stack.enter_context(Child("benchmarks.weights.lanes", "send")) for _ in self._plan.senders]
        self._takers = [stack.enter_context(Child("benchmarks.weights.lanes", "take")) for _ in range(receivers)]
        port = self._senders[0].ask(host=True)["port"]
        for number, child in enumerate(self._senders):
            child.order(join=port, lane=number, num_ranks=1 + receivers)
        for number, child in enumerate(self._takers, 1):
            child.order(join=port, lanes=len(self._senders), rank=number, num_ranks=1 + receivers)
        for child in (*self._senders, *self._takers):
            child.answer()
        for child in self._senders:
            child.ask(fill=self.sizes)

    def turn(self) -> dict[str, float]:
        """Seconds until all have everything; what the ranks have sent, in copies of the model, whose `bytes` these are, and the most of one beside
        their mean."""
        for child in (*self._senders, *self._takers):
            child.order(buckets=self.sizes)
        answers = [child.answer() for child in (*self._senders, *self._takers)]
        sent = [answer["sent"] for answer in answers[:len(self._senders)]]
        return {"seconds": max(answer["seconds"] for answer in answers), "egress_copies": sum(sent) / sum(size for _, size in self.sizes),
                "most_of_mean": max(sent) * len(sent) / sum(sent), "bytes": sum(size for _, size in self.sizes)}


class Sender:
    """One lane, as a training rank has it."""

    def __init__(self) -> None:
        self._host: Host | None = None
        self._lane: Lane | None = None
        self._weights: list[torch.Tensor] = []

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """`host` the store; `join` a lane; `fill` its buckets; send them."""
        if "host" in order:
            self._host = Host("127.0.0.1", TIMEOUT_S)
            return {"port": self._host.port}
        if "join" in order:
            self._number = order["lane"]
            self._lane = Lane(GROUP, self._number, order["num_ranks"], "gloo", TIMEOUT_S, address="127.0.0.1", port=order["join"],
                              store=self._host.store if self._host else None)
            return {}
        assert self._lane is not None
        if "fill" in order:
            self._weights = [torch.randint(255, (size,), dtype=torch.uint8) for lane, size in order["fill"] if lane == self._number]
            return {}
        before, started = acked(), time.perf_counter()
        for held in self._weights:
            self._lane.broadcast(held.clone(), time.monotonic() + TIMEOUT_S)
        self._lane.finish(time.monotonic() + TIMEOUT_S)
        return {"seconds": time.perf_counter() - started, "sent": acked() - before}


class Taker:
    """A rank of an engine."""

    def __init__(self) -> None:
        self._groups: list[BroadcastGroup] = []
        self._memory: dict[int, torch.Tensor] = {}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """`join` all lanes; take all `buckets`."""
        if "join" in order:
            self._groups = [BroadcastGroup("127.0.0.1", order["join"], order["rank"], order["num_ranks"], lane_name(GROUP, lane), "gloo", TIMEOUT_S)
                            for lane in range(order["lanes"])]
            return {}
        started = time.perf_counter()
        for number, (lane, size) in enumerate(order["buckets"]):
            flat = torch.empty(size, dtype=torch.uint8)
            self._groups[lane].broadcast([flat])
            self._memory.setdefault(number, torch.empty_like(flat)).copy_(flat)
        return {"seconds": time.perf_counter() - started}


def acked() -> int:
    """Bytes that the peers of all TCP connections of this process have got from it so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as other:  # not a socket, or gone
            if other.type == socket.SOCK_STREAM and other.family in (socket.AF_INET, socket.AF_INET6):
                total += struct.unpack_from("Q", other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8), BYTES_ACKED)[0]
    return total


def main() -> None:
    """Answer orders until there are no more."""
    answer_orders((Sender() if sys.argv[1] == "send" else Taker()).answer)
    os._exit(0)  # groups end with their processes


if __name__ == "__main__":
    main()
