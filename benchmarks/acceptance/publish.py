"""Weights from the GPU into the files that are served, while it computes: how fast, and are they right? `publish [--small]`"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.acceptance.running import tell
from workers.config import Dtype
from workers.weights import safetensors_writer
from workers.weights.layout import lay_out
from workers.weights.store import allocate

LEAST = 40e9
MATRIX = 4096


def main(*rest: str) -> None:
    """Copy into files whose memory is there and pinned, while matrices are multiplied in another stream."""
    small = "--small" in rest
    device, number, rows = ("cuda", 64, 16384) if torch.cuda.is_available() else ("cpu", 4, 64 if small else 4096)
    tensors = {f"t{index}": torch.randn(rows, MATRIX if not small else 64, device=device).to(torch.bfloat16) for index in range(number)}
    files = lay_out({name: tuple(tensor.shape) for name, tensor in tensors.items()}, Dtype.bfloat16)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        filling = safetensors_writer.MappedShards(Path(folder), files, torch.bfloat16, lambda where, name, size: allocate(where / name, size))
        expected = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        busy = torch.ones(256 if small else MATRIX, 256 if small else MATRIX, device=device)
        side = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(side):
            for _ in range(2 if small else 200):
                busy = busy @ busy / busy.shape[0]
        began = now(device)
        for name, tensor in tensors.items():
            filling.put(name, tensor)
        ended = now(device)
        torch._foreach_zero_(list(tensors.values()))  # as training goes on to change them
        filling.complete()
        seconds = began.elapsed_time(ended) / 1e3 if isinstance(began, torch.cuda.Event) else ended - began
        pinned = sum(filling._pinned)
        filling.close()
        found = {name: tensor for file in files for name, tensor in load_file(Path(folder) / file.name).items()}
    right = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    speed = sum(tensor.nbytes for tensor in expected.values()) / seconds
    tell(f"{speed / 1e9:.1f} GB/s", right and speed >= LEAST, f"{pinned} of {len(files)} files are pinned" if right else
         "what has arrived is not what was on the device")
    sys.exit(0 if right else 1)


def now(device: str) -> Any:
    """On a GPU a mark between the copies: the host waits for the other stream where a kernel is loaded, as the first that zeroes is."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


if __name__ == "__main__":
    main(*sys.argv[1:])
