"""torch.distributed and Megatron-core's parallel groups, once per process, and what the ranks tell each other.

A single rank keeps its rendezvous store in memory. Gloo still opens a listening socket for every group; those of a single
rank are bound to the loopback interface, as nobody has to reach them. A gang meets at rank 0's store, which listens on
rank 0's address only, and talks over the gang's interface. Ranks are data-parallel: each holds the whole model.

Tensors on the CPU go through gloo, with or without CUDA; those on CUDA devices through NCCL. When a rank's process ends,
its gloo connections close, and whoever waits for it fails at once; a rank that is merely silent is given up after
`COLLECTIVE_TIMEOUT_S`. Rank 0 must therefore say something (`broadcast_bytes`) at least that often while it waits itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from workers.trainer.megatron import cpu_backend
from workers.trainer.megatron.gang import Gang

RENDEZVOUS_TIMEOUT_S = 120.0
COLLECTIVE_TIMEOUT_S = 1800.0
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class GangError(RuntimeError):
    """Ranks that did not find each other. Its text names who, where, how long, and the remedy."""


def initialize(gang: Gang | None = None) -> None:
    """Make sure that torch.distributed and Megatron's groups exist; `gang` None means a single rank. Repeated calls do nothing.

    Raises GangError where the ranks of `gang` do not meet within `RENDEZVOUS_TIMEOUT_S`, ValueError where groups exist
    already that are not those of `gang`, or where its CUDA device does not exist.
    """
    expected = (0, 1) if gang is None else (gang.rank, gang.world_size)
    if not dist.is_initialized():
        if gang is None or gang.world_size == 1:
            with _environment("GLOO_SOCKET_IFNAME", "lo"):
                dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)
        else:
            _choose_device(gang)
            _join(gang)
    if (rank(), world_size()) != expected:
        raise ValueError(f"this process is rank {rank()} of {world_size()} already, it cannot become rank {expected[0]} of {expected[1]}. "
                         "Call close() first, or start a new process")
    if not parallel_state.model_parallel_is_initialized():
        with cpu_backend.redirected(), _environment("GLOO_SOCKET_IFNAME", "lo") if world_size() == 1 else contextlib.nullcontext():
            parallel_state.initialize_model_parallel(distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT_S / 60))


def close() -> None:
    """Take the groups down again, in the reverse order. Engines of this process cannot be used afterwards."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's rank."""
    return dist.get_rank()


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size()


def broadcast_bytes(payload: bytes | None, source: int = 0) -> bytes:
    """`payload` of rank `source` (elsewhere it is not looked at), on all ranks. All ranks call this together."""
    if world_size() == 1:
        assert payload is not None
        return payload
    content = torch.empty(0, dtype=torch.uint8)
    if rank() == source:
        assert payload is not None
        content = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else content
    length = torch.tensor([len(content)])
    dist.broadcast(length, source)
    if rank() != source:
        content = torch.empty(int(length), dtype=torch.uint8)
    if len(content):
        dist.broadcast(content, source)
    return content.numpy().tobytes()


def first_text(text: str) -> str:
    """The text of the lowest rank that has one, on all ranks; '' where none has. All ranks call this together."""
    if world_size() == 1:
        return text
    lowest = torch.tensor([rank() if text else world_size()])
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    source = int(lowest)
    return broadcast_bytes(text.encode(), source).decode() if source < world_size() else ""


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank. All ranks call this together."""
    found = torch.tensor([int(flag)])
    if world_size() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def sum_over_ranks(values: np.ndarray) -> np.ndarray:
    """Sums over all ranks, element by element, in the array's dtype. All ranks call this together."""
    return _reduced(values, dist.ReduceOp.SUM)


def max_over_ranks(values: np.ndarray) -> np.ndarray:
    """Maxima over all ranks, element by element. All ranks call this together."""
    return _reduced(values, dist.ReduceOp.MAX)


def _reduced(values: np.ndarray, operation: dist.ReduceOp.RedOpType) -> np.ndarray:
    if world_size() == 1 or values.size == 0:
        return values
    tensor: Tensor = torch.from_numpy(values.copy())
    dist.all_reduce(tensor, operation)
    return tensor.numpy()


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _choose_device(gang: Gang) -> None:
    """Take CUDA device `local_rank`, or the only one that can be seen: SLURM may have bound one to each task."""
    if not torch.cuda.is_available():
        return
    number = torch.cuda.device_count()
    if gang.local_rank >= number > 1:
        raise ValueError(f"rank {gang.rank} is number {gang.local_rank} on its node, where {number} CUDA devices can be seen. "
                         "Start one rank for each device")
    torch.cuda.set_device(gang.local_rank if number > 1 else 0)


def _join(gang: Gang) -> None:
    if gang.interface:
        os.environ.update(dict.fromkeys(_INTERFACES, gang.interface))  # NCCL reads its own at the first use
    try:
        dist.init_process_group(_backend(), store=_store(gang), rank=gang.rank, world_size=gang.world_size,
                                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    except (OSError, RuntimeError) as error:
        over = f" over {gang.interface}" if gang.interface else ""
        raise GangError(f"rank {gang.rank}: the {gang.world_size} ranks did not meet at {gang.master_addr}:{gang.master_port}{over} within "
                        f"{RENDEZVOUS_TIMEOUT_S:.0f} s ({str(error).splitlines()[0]}). Look for the first error of another rank; else check "
                        "that all ranks were started, that the port is free and that the interface reaches rank 0") from error


def _store(gang: Gang) -> dist.TCPStore:
    """The store where the ranks meet; rank 0 serves it, on its own address only."""
    deadline = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    if gang.rank > 0:
        return dist.TCPStore(gang.master_addr, gang.master_port, gang.world_size, is_master=False, timeout=deadline)
    family = socket.getaddrinfo(gang.master_addr, gang.master_port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((gang.master_addr, gang.master_port), family=family, backlog=gang.world_size + 16)
    return dist.TCPStore(gang.master_addr, gang.master_port, gang.world_size, is_master=True, timeout=deadline,
                         master_listen_fd=listener.detach())


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous
