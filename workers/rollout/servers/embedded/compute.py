"""What the engine needs of whatever computes its tokens. No torch: the synthetic engine supplies another one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from workers.rollout.servers.embedded.requests import Copy, Request, Segment
from workers.weights.architecture import Architecture, ModelError, check_tensors, read_architecture, safetensors_header

_DTYPES = {"F32", "BF16", "F16"}


class Compute(Protocol):
    """Computes the steps that the scheduler plans. All calls come from the engine's thread, inside `on_thread()`."""

    def on_thread(self) -> AbstractContextManager[object]:
        """Entered once, on the engine's thread, around everything else."""

    def apply(self, copies: Sequence[Copy], capacity: int) -> None:
        """Carry out `copies` in order, then make the cache hold `capacity` positions a row."""

    def prefill(self, segments: Sequence[Segment]) -> None:
        """Compute what later steps need of `segments`."""

    def decode(self, requests: list[Request]) -> tuple[list[int], list[float]]:
        """The next token of each request and its log-prob; `requests[i]` owns row i."""

    def replace_weights(self, folder: Path, keep_cache: bool) -> None:
        """Take `folder`'s weights. Raises `ModelError` and keeps the present ones if it does not hold this model's."""


def check_same_model(folder: Path, architecture: Architecture) -> list[Path]:
    """Check by its headers that `folder` is a complete model of exactly `architecture`; returns its safetensors files.

    End-of-sequence ids and the longest position may differ: they change no tensor. Raises `ModelError`.
    """
    found = read_architecture(folder)
    for field in Architecture.__dataclass_fields__:
        ours, theirs = getattr(architecture, field), getattr(found, field)
        if ours != theirs and field not in ("eos_token_ids", "max_positions"):
            raise ModelError(f"{folder}: {field}={theirs!r}, the engine was started with {field}={ours!r}. "
                             "Give weights of the model that is being served, or start a new engine")
    files = check_tensors(folder, architecture)
    names = architecture.tensor_shapes()
    for file in files:
        for name, entry in safetensors_header(file).items():
            if name in names and entry["dtype"] not in _DTYPES:
                raise ModelError(f"{folder}: tensor {name} has type {entry['dtype']}, supported are {', '.join(sorted(_DTYPES))}. "
                                 "Save the model in one of these")
    return files
