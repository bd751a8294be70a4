"""What a step does to its device, counted operator by operator (torch's TorchDispatchMode).

    memory       storages on the device, from the operator that makes them until the last reference goes; in blocks of 512 bytes, as CUDA's
                 caching allocator counts `memory_allocated` (fragments are not seen)
    host waits   places at which the host needs a number from the device, or copies there and waits until it is done
    uploads      copies to the device
    exchanges    collectives by kind and size of their group, messages between pipeline stages, with their bytes

The device is the meta device: what an operator computes is not there. A number that is asked for is 1.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
BLOCK = 512
HOST_READS = ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::repeat_interleave")
"""Operators whose results have shapes that the host has to be told."""
OWN = ("/fake_device/operators.py", "/fake_device/stand_ins.py", "/parallel/cpu_backend.py")
COALESCED = ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_")

ALL_TO_ALL = "alltoall_base_"

Call = tuple[str, tuple[int, ...], tuple[tuple[tuple[int, ...], str], ...]]
"""A collective or message as all of its ranks must see it: kind, ranks, shapes and dtypes; of an all-to-all what each rank gets, and sends."""


@dataclass
class Counts:
    """Of a part of a step. `waits` by place; `exchanges` and `exchanged` (bytes) by kind and number of ranks; `exposed`: bytes of those after the
    last operator of a backward pass, beside which nothing is computed."""

    operators: int = 0
    uploads: int = 0
    uploaded: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    exchanges: Counter[str] = field(default_factory=Counter)
    exchanged: Counter[str] = field(default_factory=Counter)
    exposed: Counter[str] = field(default_factory=Counter)


class Recorder(TorchDispatchMode):
    """Counts while it is entered. `live` and `peak` are bytes on the device; `calls` are the collectives in order."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.counts, self.calls = Counts(), list[Call]()
        self._sizes: dict[int, tuple[weakref.ref, int]] = {}

    def begin(self) -> None:
        """Count from here on; what is on the device stays."""
        self.counts, self.calls, self.peak = Counts(), [], self.live

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """What is done inside is one operator, which is not made up of others on the device."""
        counts, before = self.counts, self.counts.operators
        yield
        counts.operators = before + 1

    def wait(self, place: str = "") -> None:
        """The host waits for the device, at `place` or where the caller is."""
        self.counts.waits[place or caller()] += 1

    def exchange(self, kind: str, ranks: tuple[int, ...], what: list[tuple[tuple[int, ...], str]], number_of_bytes: int) -> None:
        """A collective among `ranks`, or a message from or to a rank, of tensors as `what` describes them."""
        key = f"{kind} x{len(ranks)}"
        number_of_bytes *= len(ranks) > 1  # in place, to itself
        self.counts.exchanges[key] += 1
        self.counts.exchanged[key] += number_of_bytes
        self.counts.exposed[key] += number_of_bytes
        self.calls.append((kind, ranks, tuple(what)))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name: str = func._schema.name if hasattr(func, "_schema") else func.__name__
        leaves = tree_leaves((args, kwargs))
        on_device = any(isinstance(leaf, Tensor) and leaf.device.type == DEVICE.type for leaf in leaves)
        if name.startswith("c10d::"):
            self._collective(name.removeprefix("c10d::"), args, leaves)
            if name.removeprefix("c10d::") in COALESCED and on_device:  # not there for the meta device
                return torch._C._distributed_c10d.Work.boxed(torch._C._distributed_c10d.FakeWork())  # type: ignore[attr-defined]
        elif on_device:
            self.counts.operators += 1
            if torch._C._current_graph_task_id() >= 0 and self.counts.exposed:
                self.counts.exposed.clear()
            if (answer := self._from_device(name, args, kwargs)) is not None:
                return answer
        elif name == "aten::_to_copy" and _is_device(kwargs.get("device")):
            self._upload(args[0], bool(kwargs.get("non_blocking")))
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            self._hold(leaf)
        return out

    def _from_device(self, name: str, args: tuple, kwargs: dict) -> Any:
        """What an operator gives that brings something to the host; None for all others."""
        if name == "aten::_local_scalar_dense":
            self.wait()
            return 1.0 if args[0].dtype.is_floating_point else args[0].dtype is not torch.bool
        if name == "aten::_to_copy" and str(kwargs.get("device")) == "cpu":
            self.wait()
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "aten::copy_" and args[0].device.type == "cpu":
            self.wait()
            return args[0]
        if name == "aten::copy_" and args[1].device.type == "cpu":
            self._upload(args[1], len(args) > 2 and bool(args[2]))
            return args[0]
        if name in HOST_READS and kwargs.get("output_size") is None:
            self.wait()
        return None

    def _upload(self, tensor: Tensor, non_blocking: bool) -> None:
        self.counts.uploads += 1
        self.counts.uploaded += tensor.nbytes
        if not non_blocking:
            self.wait()

    def _collective(self, kind: str, args: tuple, leaves: list[Any]) -> None:
        group = next((leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())), None)  # type: ignore[attr-defined]
        if group is None:
            return
        ranks = tuple(dist.get_process_group_ranks(torch._C._distributed_c10d.ProcessGroup.unbox(group)))  # type: ignore[attr-defined]
        tensors = [leaf for leaf in tree_leaves(args[:2]) if isinstance(leaf, Tensor)]
        size = max((tensor.nbytes for tensor in tensors), default=0)
        if kind != ALL_TO_ALL:
            self.exchange(kind, ranks, [_described(tensor) for tensor in tensors], size)
        else:  # its shapes are the ranks' own; what each has for each other must be what that expects
            received, sent = (tuple(map(int, splits)) for splits in args[3:5])
            kept = str(tuple(tensors[1].shape[1:])), _described(tensors[1])[1]
            self.exchange(kind, ranks, [(sent, "sent"), (received, "received"), ((), " of ".join(kept))], size)

    def _hold(self, leaf: Any) -> None:
        """Count a tensor's storage, once, as long as it lives."""
        if not isinstance(leaf, Tensor) or leaf.device.type != DEVICE.type or leaf.is_sparse:
            return  # what a sparse tensor is made of has been counted
        storage = leaf.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK

        def gone(_: Any) -> None:
            self.live -= size
            del self._sizes[key]

        self._sizes[key] = weakref.ref(storage, gone), size
        self.live += size
        self.peak = max(self.peak, self.live)


def _described(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _is_device(device: object) -> bool:
    return device is not None and torch.device(str(device)).type == DEVICE.type


def caller() -> str:
    """Where in the trainer or in Megatron-core the call comes from: 'megatron/model/moe.py:49'."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        for root in ("/workers/", "/megatron/core/"):
            if root in name and not name.endswith(OWN):
                return f"{root.strip('/')}/{name.split(root)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
