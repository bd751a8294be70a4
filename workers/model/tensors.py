"""The tensors of a Hugging Face model folder: the headers of its safetensors files, compared with its architecture, and what tells models of one
architecture apart. Without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from blake3 import blake3

from workers.model.architecture import Architecture, ModelError

MAX_HEADER_BYTES = 100_000_000
SAMPLED_BYTES = 4096


def safetensors_header(path: Path) -> dict[str, dict]:
    """The header of one safetensors file: name -> {dtype, shape, data_offsets}. Raises `ModelError` if broken or cut short."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values() if isinstance(entry["shape"], list)), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"{path.stat().st_size} bytes instead of {8 + length + end}")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        raise ModelError(f"{path}: broken safetensors file ({error}). Copy the model again") from error
    return header


def check_tensors(folder: Path, architecture: Architecture, frozen: bool = True) -> list[Path]:
    """Check that `folder` holds every tensor of `architecture` with the right shape, the `frozen` ones, too; returns its safetensors files.

    Raises `ModelError` naming the first tensor that is missing or of the wrong shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no *.safetensors file. Give the folder of a Hugging Face model in safetensors format")
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        found.update({name: tuple(entry["shape"]) for name, entry in safetensors_header(file).items()})
    for name, shape in (architecture.tensor_shapes() | (architecture.frozen_shapes() if frozen else {})).items():
        if name not in found:
            raise ModelError(f"{folder}: tensor {name} is missing. Copy the model again")
        if found[name] != shape:
            raise ModelError(f"{folder}: tensor {name} has shape {found[name]}, config.json asks for {shape}. "
                             "Take both from the same model")
    return files


def fingerprint(files: list[Path], architecture: Architecture) -> str:
    """BLAKE3, hex, of the beginnings of all tensors of `architecture` in these safetensors files, in any order of files: who has trained any of them
    has changed those. Raises `ModelError`, OSError."""
    digest, found = blake3(), {}
    for path in files:
        header = safetensors_header(path)
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                first, end = entry["data_offsets"]
                file.seek(8 + length + first)
                found[name] = entry["dtype"].encode() + file.read(min(SAMPLED_BYTES, end - first))
    for name in architecture.tensor_shapes():
        digest.update(name.encode() + found[name])
    return digest.hexdigest()
