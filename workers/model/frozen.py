"""The tensors of a model folder that nothing trains: versions of a run's weights do not have them, and they stay as the starting model has them.

In the bfloat16 of a version they would be others: what decides among experts are differences in their last digits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from workers.model.architecture import Architecture, ModelError


def read_frozen(folder: Path, architecture: Architecture) -> dict[str, torch.Tensor]:
    """`architecture.frozen_shapes()` of `folder`, float32, on the CPU. Raises `ModelError`."""
    shapes, found = architecture.frozen_shapes(), {}
    try:
        for path in sorted(folder.glob("*.safetensors")) if shapes else ():
            with safe_open(path, framework="pt") as opened:
                found.update({name: opened.get_tensor(name).float() for name in shapes.keys() & set(opened.keys())})
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: a safetensors file cannot be read ({error}). Copy the model again") from error
    for name, shape in shapes.items():
        if name not in found or tuple(found[name].shape) != shape:
            raise ModelError(f"{folder}: tensor {name} of shape {shape} is missing. Copy the model again")
    return found
