"""Runs Megatron-core on a machine without CUDA, with gloo. Where CUDA is there, nothing of this file takes effect.

Megatron-core names the accelerator itself, through a handful of idioms; each is redirected once:

    torch.cuda.current_device() as a device      -> the CPU device
    device="cuda" literals, .cuda()              -> the CPU device
    tensor.type() == "torch.cuda.FloatTensor"    -> the type's name as CUDA would spell it
    torch.cuda.synchronize()                     -> nothing: there is nothing to wait for
    torch.cuda.current_stream()                  -> None, which suffices where nothing waits in it
    CUDA's generator (kept when recomputing)     -> the CPU's

`redirected()` makes them hold inside a `with` block (a torch-function mode is local to the thread, so every
entry into Megatron goes through it). `HITS` records which functions relied on them; a test pins that list, so that an
upgrade of Megatron-core that adds one is noticed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

STAND_IN = torch.device("cpu")
"""What CUDA is taken to mean; a step without a device (workers/trainer/fake_device/) puts another in its place."""
HITS: set[tuple[str, str]] = set()


def device() -> torch.device:
    """Where models and batches live: this process's CUDA device, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else STAND_IN


def upload(tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
    """`tensor` on device `to`. A copy from the host does not keep the host waiting: it is queued, from pinned memory where that is CUDA's."""
    if to.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(to, non_blocking=True)


@contextlib.contextmanager
def redirected() -> Iterator[None]:
    """Inside the block, Megatron-core's references to CUDA mean the CPU. Does nothing where CUDA is available."""
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.tensor_parallel import random

    places: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", _current_device), (torch.cuda, "synchronize", _synchronize),
        (torch.cuda, "current_stream", _current_stream),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (random, "_get_cuda_rng_state", _get_rng_state), (random, "_set_cuda_rng_state", _set_rng_state)]
    previous = [getattr(module, name) for module, name, _ in places]
    for module, name, own in places:
        setattr(module, name, own)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for (module, name, _), before in zip(places, previous, strict=True):
            setattr(module, name, before)


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if kwargs and _names_cuda(kwargs.get("device")):
            _record("device='cuda'")
            kwargs = {**kwargs, "device": STAND_IN}
        if func is torch.Tensor.cuda:
            _record(".cuda()")
            return args[0].to(STAND_IN)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            _record(".type()")
            return "torch.cuda." + func(*args).rsplit(".", 1)[-1]
        return func(*args, **(kwargs or {}))


def _names_cuda(value: object) -> bool:
    return str(value).startswith("cuda") if isinstance(value, (str, torch.device)) else False


def _current_device() -> torch.device:
    _record("current_device()")
    return STAND_IN


def _synchronize(device: object = None) -> None:
    _record("synchronize()")
    on_synchronize()


def on_synchronize() -> None:
    """Called where Megatron-core waits for the device."""


def _current_stream(device: object = None) -> None:
    _record("current_stream()")


def _get_rng_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    _record("RNG state")
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _record(idiom: str) -> None:
    """Note which function of Megatron-core relied on `idiom`."""
    frame = sys._getframe(2)
    while frame is not None and "/megatron/core/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        HITS.add((frame.f_code.co_filename.split("/megatron/core/")[-1] + ":" + frame.f_code.co_name, idiom))
