"""torch.distributed and Megatron-core's parallel groups, once per process. What the ranks tell each other through them: collectives.py.

A single rank keeps its rendezvous store in memory. Gloo still opens a listening socket for every group; those of a single
rank are bound to the loopback interface and take no connection, as nobody has to reach them. A gang meets at rank 0's store, which listens on
rank 0's address only, for the gang's nodes only (store_guard.py), and talks over the gang's interface. The ranks make up
copies of the model, tp * pp * cp ranks each, in Megatron's order tp-cp-dp-pp; the first rank of a copy is its leader.

Tensors on the CPU go through gloo, with or without CUDA; those on CUDA devices through NCCL. When a rank's process ends,
its gloo connections close, and whoever waits for it there fails at once; one who waits in NCCL is ended by whoever started
the ranks (srun, trainer/local_ranks.py). A rank that is merely silent is given up after `COLLECTIVE_TIMEOUT_S`. Rank 0 must therefore say
something (`collectives.broadcast_bytes`) at least that often while it waits itself.

A rank that leaves in order takes its groups down (`close`). Gloo's threads let go of tensors a moment after the collective has returned, and
need the interpreter for that: one that finds it gone aborts the process, after the work is done.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from workers.config import ParallelConfig
from workers.model.parallel_limits import expert_tensor_parallel
from workers.run import gpus
from workers.trainer.megatron.parallel import cpu_backend, store_guard
from workers.trainer.megatron.parallel.gang import Gang

RENDEZVOUS_TIMEOUT_S = 120.0
COLLECTIVE_TIMEOUT_S = 1800.0
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_FORGOTTEN = ("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO")
"""Groups that Megatron's own clean-up keeps."""

_copy_group: dist.ProcessGroup | None = None


class GangError(RuntimeError):
    """Ranks that did not find each other. Its text names who, where, how long, and the remedy."""


def initialize(gang: Gang | None = None, parallel: ParallelConfig | None = None) -> None:
    """Make sure that torch.distributed and Megatron's groups exist; `gang` None means a single rank. Repeated calls do nothing.

    Raises GangError where the ranks of `gang` do not meet within `RENDEZVOUS_TIMEOUT_S`, ValueError where groups exist
    already that are not those of `gang` and `parallel`, where its CUDA device does not exist, or where the ranks do not make up whole copies.
    """
    parallel = parallel or ParallelConfig()
    expected, before = (0, 1) if gang is None else (gang.rank, gang.world_size), store_guard.listening()
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
        _seal(gang, before)
    sizes = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_world_size(),
             parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1, parallel_state.get_context_parallel_world_size())
    wanted = (parallel.tp, parallel.pp, parallel.vpp, parallel.cp)
    if sizes != wanted:
        raise ValueError(f"the groups of this process have tp, pp, vpp, cp = {sizes}, they cannot become {wanted}. "
                         "Call close() first, or start a new process")


def _seal(gang: Gang | None, before: dict[int, int]) -> None:
    """Nobody but the gang may speak to what gloo has opened since `before`."""
    if gang is None or gang.world_size == 1:
        store_guard.seal(before, ())
    elif gang.roster is not None:
        store_guard.seal(before, store_guard.gang_addresses(gang.roster, gang.world_size, gang.master_addr))


def _make_groups(parallel: ParallelConfig) -> None:
    global _copy_group
    parallel_state.initialize_model_parallel(
        parallel.tp, parallel.pp, parallel.vpp if parallel.vpp > 1 else None, context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep, expert_tensor_parallel_size=expert_tensor_parallel(parallel),
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT_S / 60))
    copies = world_size() // parallel.unit
    for copy in range(copies):
        members = [rank for rank in range(world_size()) if rank // (parallel.tp * parallel.cp) % copies == copy]
        group = dist.new_group(members, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), backend="gloo") if len(members) > 1 else None
        if rank() in members:
            _copy_group = group


def close() -> None:
    """Take the groups down again, and end their threads. Engines of this process cannot be used afterwards; one that is not closed itself
    keeps its groups' threads."""
    global _copy_group
    _copy_group = None
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    for name in _FORGOTTEN:
        setattr(parallel_state, name, None)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what engines were made of refers to its groups in cycles; a group's threads end with the last reference


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
    return leader_of_copy() == rank()


def copy_group() -> dist.ProcessGroup | None:
    """The ranks of this copy, over gloo; None where it has one rank only."""
    return _copy_group


def values_count() -> bool:
    """Whether what this rank computes for its tokens counts: ranks that hold other parts of the same matrices compute the same, and
    those that hold earlier layers nothing."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def leader_of_copy() -> int:
    """The first rank of the copy that this rank is part of."""
    return copy_index() * parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_context_parallel_world_size()


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
    if words := gpus.bind(torch.cuda.current_device()):
        print(f"rank {gang.rank}: {words}", flush=True)


def _join(gang: Gang) -> None:
    for name in _INTERFACES if gang.interface else ():
        os.environ.setdefault(name, gang.interface)  # what a user or a site has set knows more; NCCL reads its own at the first use
    try:
        dist.init_process_group(_backend(), store=_store(gang), rank=gang.rank, world_size=gang.world_size,
                                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    except (OSError, RuntimeError) as error:
        over = f" over {gang.interface}" if gang.interface else ""
        raise GangError(f"rank {gang.rank}: the {gang.world_size} ranks did not meet at {gang.master_addr}:{gang.master_port}{over} within "
                        f"{RENDEZVOUS_TIMEOUT_S:.0f} s ({str(error).splitlines()[0]}). Look for the first error of another rank; else check "
                        "that all ranks were started, that the port is free and that the interface reaches rank 0") from error


def _store(gang: Gang) -> dist.TCPStore:
    """The store where the ranks meet; rank 0 serves it, on its own address only, to the gang's nodes only."""
    deadline = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    if gang.rank > 0:
        if gang.roster is not None:
            store_guard.sign(gang.roster, gang.rank, (gang.master_addr, gang.master_port))
        return dist.TCPStore(gang.master_addr, gang.master_port, gang.world_size, is_master=False, timeout=deadline)
    listener = gang.listener
    if listener is None:
        family = socket.getaddrinfo(gang.master_addr, gang.master_port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((gang.master_addr, gang.master_port), family=family, backlog=gang.world_size + 16)
    if gang.roster is not None:
        store_guard.listen(listener, store_guard.signed(gang.roster, gang.world_size, RENDEZVOUS_TIMEOUT_S), gang.world_size + 16)
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
