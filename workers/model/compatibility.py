"""Whether new weights are of the model that is served: by the headers of a folder's files, or by tensors' shapes. No torch.

The embedded engine asks by itself. SGLang takes anything: a tensor that is missing stays the old one, one of a wrong shape is read in part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.model.architecture import Architecture, ModelError, read_architecture
from workers.model.tensors import check_tensors, safetensors_header

TYPES = {"F32", "BF16", "F16"}
"""Types of tensors, in safetensors' terms."""


def check_same_model(folder: Path, architecture: Architecture) -> list[Path]:
    """Check by its headers that `folder` is a complete model of exactly `architecture`, but for what is frozen; returns its safetensors files.

    End-of-sequence ids and the longest position may differ: they change no tensor. Raises `ModelError`.
    """
    found = read_architecture(folder)
    for field in Architecture.__dataclass_fields__:
        ours, theirs = getattr(architecture, field), getattr(found, field)
        if ours != theirs and field not in ("eos_token_ids", "max_positions"):
            raise ModelError(f"{folder}: {field}={theirs!r}, the model that is served has {field}={ours!r}. "
                             "Give weights of the model that is being served, or start a new engine")
    files = check_tensors(folder, architecture, frozen=False)
    names = architecture.tensor_shapes()
    for file in files:
        for name, entry in safetensors_header(file).items():
            if name in names and entry["dtype"] not in TYPES:
                raise ModelError(f"{folder}: tensor {name} has type {entry['dtype']}, supported are {', '.join(sorted(TYPES))}. "
                                 "Save the model in one of these")
    return files


def check_complete(tensors: Mapping[str, Any], architecture: Architecture) -> None:
    """Check that every tensor of `architecture` is there, in its shape. Raises `ModelError`."""
    for name, shape in architecture.tensor_shapes().items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise ModelError(f"tensor {name} {'is missing' if found is None else f'has shape {found}'}: must be there with shape {shape}. "
                             "Send every tensor of the model between begin and end")
