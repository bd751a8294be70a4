"""Which file has which tensor, and where in it: known before there are any weights, and the same for every version of a run. No torch.

    shapes of all tensors, dtype, who has each of them (source) --> files of at most SHARD_BYTES, each of one source
    a file    length of the header: 8 bytes, little-endian | header: JSON, padded | the tensors, end to end         (safetensors' format)

So chunk k of one version and of the next hold the same numbers of the same tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.config import Dtype

SHARD_BYTES = 1 << 29
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
ALIGNMENT = 64
NAMES = {Dtype.float32: ("F32", 4), Dtype.bfloat16: ("BF16", 2), Dtype.float16: ("F16", 2)}


@dataclass(frozen=True)
class Place:
    """Where a tensor of `shape` lies: `offset` bytes from the file's beginning."""

    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardFile:
    """A safetensors file of `size` bytes that `source` has; `header` is what comes before the tensors."""

    name: str
    source: int
    size: int
    header: bytes
    places: dict[str, Place]


def lay_out(shapes: Mapping[str, tuple[int, ...]], dtype: Dtype, sources: Mapping[str, int] | None = None, name: str = "model") -> list[ShardFile]:
    """The files of tensors of `shapes`, in this order, `name`-NUMBER; `sources`: who has each, by default one has all."""
    size_of = NAMES[dtype][1]
    groups: list[tuple[int, list[str]]] = []
    sizes: list[int] = []
    for source in sorted(set(sources.values())) if sources is not None else [0]:
        own = [tensor for tensor in shapes if sources is None or sources[tensor] == source]
        for number, tensor in enumerate(own):
            size = math.prod(shapes[tensor]) * size_of
            if number == 0 or sizes[-1] + size > SHARD_BYTES:
                groups.append((source, []))
                sizes.append(0)
            groups[-1][1].append(tensor)
            sizes[-1] += size
    return [lay_out_file(f"{name}-{number:05d}.safetensors", source, {tensor: shapes[tensor] for tensor in tensors}, dtype)
            for number, (source, tensors) in enumerate(groups)]


def lay_out_file(name: str, source: int, shapes: Mapping[str, tuple[int, ...]], dtype: Dtype) -> ShardFile:
    """The file `name` of tensors of `shapes`, in this order, that `source` has."""
    code, size_of = NAMES[dtype]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for tensor, shape in shapes.items():
        starts[tensor], end = end, end + math.prod(shape) * size_of
        entries[tensor] = {"dtype": code, "shape": list(shape), "data_offsets": [starts[tensor], end]}
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-(8 + len(content)) % ALIGNMENT)
    header = len(content).to_bytes(8, "little") + content
    return ShardFile(name, source, len(header) + end, header,
                     {tensor: Place(len(header) + starts[tensor], shape) for tensor, shape in shapes.items()})


def small_files(files: list[ShardFile], model_folder: Path, dtype: Dtype) -> dict[str, bytes]:
    """What a Hugging Face folder holds besides `files`, by name: the index of all tensors, and config.json with `dtype`."""
    config = json.loads((model_folder / CONFIG).read_text("utf-8"))
    config["dtype"] = dtype.value
    for name in ("torch_dtype", "auto_map"):  # its older name; Python files, which do not come along and no family here needs
        config.pop(name, None)
    index = {tensor: file.name for file in files for tensor in file.places}
    return {CONFIG: json.dumps(config, indent=2).encode(), INDEX: json.dumps({"metadata": {}, "weight_map": index}).encode()}
