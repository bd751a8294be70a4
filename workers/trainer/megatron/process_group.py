"""torch.distributed and Megatron-core's parallel groups, once per process.

A single rank keeps its rendezvous store in memory. Gloo still opens a listening socket for every group; those of a single
rank are bound to the loopback interface, as nobody has to reach them. More ranks (not used yet: the trainer runs as one
rank) would be initialised by whoever starts them, before the engine is made, and taken over as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from workers.trainer.megatron import cpu_backend


def initialize() -> None:
    """Make sure that torch.distributed and Megatron's groups exist. Repeated calls do nothing."""
    with _loopback_only():
        _initialize()


def close() -> None:
    """Take the groups down again, in the reverse order. Engines of this process cannot be used afterwards."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    previous = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        if previous is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = previous


def _initialize() -> None:
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != 1:
        raise ValueError(f"the trainer was started with {dist.get_world_size()} ranks, it supports 1. Start a single process")
    if not parallel_state.model_parallel_is_initialized():
        with cpu_backend.redirected():
            parallel_state.initialize_model_parallel()
