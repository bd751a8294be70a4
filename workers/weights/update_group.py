"""A process group for weights alone: rank 0, a training rank, broadcasts; the ranks of the inference servers receive.

    training's rank 0   hosts the store at address:port --+
    a training rank     is rank 0 ------------------------+
    servers, rank 1..   join it --------------------------+--> one communicator, apart from every other group of these processes

It is made as SGLang makes it (sglang/srt/utils/common.py: init_custom_process_group), so that SGLang's servers can be members. torch has no
public call for a group beside the default one among processes that are in no common default group.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class GroupError(RuntimeError):
    """The group could not be made, or a member is gone or silent. The group is of no use any more: close it."""


class Host:
    """The store at which a group meets, on `address` only and a free port. It lasts as long as this object, or a group that was made with it."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Raises `GroupError`."""
        try:
            listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
            self.address, self.port = address, listener.getsockname()[1]
            self.store = dist.TCPStore(address, self.port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
                                       master_listen_fd=listener.detach())
        except (OSError, RuntimeError) as error:
            raise GroupError(f"a weight group cannot be hosted at {address}: {error}") from error

    def wait(self, keys: list[str]) -> None:
        """Wait until all of `keys` are set. Raises `GroupError` where that takes longer than its `timeout_s`."""
        try:
            self.store.clone().wait(keys)  # type: ignore[attr-defined]  # a connection of its own: others use the store meanwhile
        except RuntimeError as error:
            raise GroupError(f"not all of {', '.join(keys)} have come: {error}") from error


def store_at(address: str, port: int, timeout_s: float) -> dist.Store:
    """The store that another process hosts. Raises `GroupError`."""
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise GroupError(f"the store of weight groups at {address}:{port} cannot be reached: {error}") from error


class BroadcastGroup:
    """Membership in a group. Every call blocks: making it `join_s` seconds at most, the others `timeout_s`."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float,
                 join_s: float | None = None, store: dist.Store | None = None) -> None:
        """Join as `rank` and wait for all others; a training rank at a `store` that it has. `backend`: nccl on GPUs, gloo on CPUs; `name` must
        be new; `join_s`: None for `timeout_s`. Raises `GroupError`."""
        self.name, self._backend = name, dist.Backend(backend)
        timeout = timedelta(seconds=join_s or timeout_s)
        try:
            if store is None:
                store, rank, world_size = next(dist.rendezvous(f"tcp://{_host(address)}:{port}", rank, world_size, timeout=timeout))
                store.set_timeout(timeout)
            else:
                # A training rank survives the others' deaths: NCCL would end its process for them.
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            self._group, _ = c10d._new_process_group_helper(
                world_size, rank, [], self._backend, dist.PrefixStore(name, store),
                group_name=name, timeout=timeout)  # type: ignore[arg-type]  # a NewType of str
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"weight group {name}: rank {rank} of {world_size} could not join at {address}:{port} in "
                             f"{timeout.total_seconds():g} s: {error}") from error
        if join_s is not None:
            c10d._set_pg_timeout(timedelta(seconds=timeout_s), self._group)
        c10d._world.pg_group_ranks[self._group] = {member: member for member in range(world_size)}

    def broadcast(self, tensors: Sequence[torch.Tensor], timeout_s: float | None = None) -> None:
        """Rank 0 sends `tensors`, one after the other; everywhere else they are overwritten. `timeout_s`: None for that of the group. Raises
        `GroupError`."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        try:
            for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
                work.wait()
            if tensors and tensors[0].is_cuda:
                torch.cuda.current_stream(tensors[0].device).synchronize()  # waiting has ordered streams only
        except RuntimeError as error:
            raise GroupError(f"weight group {self.name}: a broadcast failed: {error}") from error

    def abort(self) -> None:
        """End what another thread does in the group, with an error there. Gloo has no means: there it ends by itself, in time."""
        if self._backend == dist.Backend.NCCL:
            self._group.abort()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
