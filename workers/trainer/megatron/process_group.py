"""torch.distributed and Megatron-core's parallel groups, once per process, and what the ranks tell each other.

A single rank keeps its rendezvous store in memory. Gloo still opens a listening socket for every group; those of a single
rank are bound to the loopback interface, as nobody has to reach them. A gang meets at rank 0's store, which listens on
rank 0's address only, and talks over the gang's interface. The ranks make up copies of the model, tp * pp * cp ranks each, in
Megatron's order tp-cp-dp-pp; the first rank of a copy is its leader.

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

from workers.config import ParallelConfig
from workers.trainer.megatron import cpu_backend
from workers.trainer.megatron.gang import Gang
from workers.weights.splitting import expert_tensor_parallel

RENDEZVOUS_TIMEOUT_S = 120.0
COLLECTIVE_TIMEOUT_S = 1800.0
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_copy_group: dist.ProcessGroup | None = None


class GangError(RuntimeError):
    """Ranks that did not find each other. Its text names who, where, how long, and the remedy."""


def initialize(gang: Gang | None = None, parallel: ParallelConfig | None = None) -> None:
    """Make sure that torch.distributed and Megatron's groups exist; `gang` None means a single rank. Repeated calls do nothing.

    Raises GangError where the ranks of `gang` do not meet within `RENDEZVOUS_TIMEOUT_S`, ValueError where groups exist
    already that are not those of `gang` and `parallel`, where its CUDA device does not exist, or where the ranks do not make up whole copies.
    """
    parallel = parallel or ParallelConfig()
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
    if world_size() % parallel.unit:
        raise ValueError(f"{world_size()} ranks cannot hold copies of tp={parallel.tp}, pp={parallel.pp}, cp={parallel.cp}. "
                         f"Start a multiple of {parallel.unit} ranks")
    if not parallel_state.model_parallel_is_initialized():
        with cpu_backend.redirected(), _environment("GLOO_SOCKET_IFNAME", "lo") if world_size() == 1 else contextlib.nullcontext():
            _make_groups(parallel)
    sizes = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_world_size(),
             parallel_state.get_context_parallel_world_size())
    if sizes != (parallel.tp, parallel.pp, parallel.cp):
        raise ValueError(f"the groups of this process have tp, pp, cp = {sizes}, they cannot become {(parallel.tp, parallel.pp, parallel.cp)}. "
                         "Call close() first, or start a new process")


def _make_groups(parallel: ParallelConfig) -> None:
    global _copy_group
    parallel_state.initialize_model_parallel(
        parallel.tp, parallel.pp, context_parallel_size=parallel.cp, expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=expert_tensor_parallel(parallel),
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT_S / 60))
    copies = world_size() // parallel.unit
    for copy in range(copies):
        members = [rank for rank in range(world_size()) if rank // (parallel.tp * parallel.cp) % copies == copy]
        group = dist.new_group(members, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), backend="gloo") if len(members) > 1 else None
        if rank() in members:
            _copy_group = group


def close() -> None:
    """Take the groups down again, in the reverse order. Engines of this process cannot be used afterwards."""
    global _copy_group
    _copy_group = None
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


def num_copies() -> int:
    """How many copies of the model there are (data parallelism)."""
    return parallel_state.get_data_parallel_world_size()


def copy_index() -> int:
    """Which copy of the model this rank is part of."""
    return parallel_state.get_data_parallel_rank()


def is_leader() -> bool:
    """Whether this rank is the first of its copy."""
    return _leader_of_copy() == rank()


def values_count() -> bool:
    """Whether what this rank computes for its tokens counts: ranks that hold other parts of the same matrices compute the same, and
    those that hold earlier layers nothing."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def _leader_of_copy() -> int:
    return copy_index() * parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_context_parallel_world_size()


def broadcast_bytes(payload: bytes | None, source: int = 0) -> bytes:
    """`payload` of rank `source` (elsewhere it is not looked at), on all ranks. All ranks call this together."""
    return _broadcast(payload, source, None) if world_size() > 1 else _given(payload)


def broadcast_in_copy(payload: bytes | None) -> bytes:
    """`payload` of the copy's leader (elsewhere it is not looked at), on all ranks of the copy, which call this together."""
    return _broadcast(payload, _leader_of_copy(), _copy_group) if _copy_group is not None else _given(payload)


def _given(payload: bytes | None) -> bytes:
    assert payload is not None
    return payload


def _broadcast(payload: bytes | None, source: int, group: dist.ProcessGroup | None) -> bytes:
    content = torch.empty(0, dtype=torch.uint8)
    if rank() == source:
        content = torch.frombuffer(bytearray(_given(payload)), dtype=torch.uint8) if payload else content
    length = torch.tensor([len(content)])
    dist.broadcast(length, source, group)
    if rank() != source:
        content = torch.empty(int(length), dtype=torch.uint8)
    if len(content):
        dist.broadcast(content, source, group)
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
    return bool(max_over_ranks(np.array([int(flag)]))[0])


def any_in_copy(flag: bool) -> bool:
    """Whether `flag` is set on any rank of the copy. All its ranks call this together."""
    return bool(_reduced(np.array([int(flag)]), dist.ReduceOp.MAX, _copy_group)[0]) if _copy_group is not None else flag


def sum_over_ranks(values: np.ndarray) -> np.ndarray:
    """Sums over all ranks, element by element, in the array's dtype. All ranks call this together."""
    return _reduced(values, dist.ReduceOp.SUM) if world_size() > 1 else values


def sum_in_copy(values: np.ndarray) -> np.ndarray:
    """Sums over the ranks of this copy, which call this together, element by element, in the array's dtype."""
    return _reduced(values, dist.ReduceOp.SUM, _copy_group) if _copy_group is not None else values


def sum_over_copies(values: np.ndarray) -> np.ndarray:
    """Sums over the copies of what is the same on all ranks of a copy. All ranks call this together."""
    return _reduced(values, dist.ReduceOp.SUM, parallel_state.get_data_parallel_group_gloo()) if num_copies() > 1 else values


def max_over_ranks(values: np.ndarray) -> np.ndarray:
    """Maxima over all ranks, element by element. All ranks call this together."""
    return _reduced(values, dist.ReduceOp.MAX) if world_size() > 1 else values


def _reduced(values: np.ndarray, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None) -> np.ndarray:
    if values.size == 0:
        return values
    tensor: Tensor = torch.from_numpy(values.copy())
    dist.all_reduce(tensor, operation, group)
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
