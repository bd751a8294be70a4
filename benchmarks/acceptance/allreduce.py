"""Bus bandwidth of an all-reduce over all GPUs of this machine, as nccl-tests count it: `allreduce [--small]`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.acceptance.running import tell

NVLINK = 480e9
"""What nccl-tests reach on eight H100 behind NVSwitch, all_reduce_perf of 1 GiB: B/s of bus bandwidth."""
LEAST, WARM_UP, TIMES = 0.8, 5, 20


def rank(number: int, world_size: int, folder: str, size: int) -> None:
    """One process: rank 0 leaves the seconds of one all-reduce of `size` bytes."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(number)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{folder}/meet", rank=number, world_size=world_size)
    values = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    for turn in range(WARM_UP + TIMES):
        if turn == WARM_UP:
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
        dist.all_reduce(values)
        values.fill_(1)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / TIMES
    dist.all_reduce(values)
    right = bool((values == world_size).all())
    if number == 0:
        (Path(folder) / "seconds").write_text(str(seconds if right else 0.0))
    dist.destroy_process_group()


def main(*rest: str) -> None:
    """Measure, and tell."""
    small = "--small" in rest
    world_size, size = (2, 2**20) if small else (torch.cuda.device_count(), 2**30)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (world_size, folder, size), nprocs=world_size)  # type: ignore[no-untyped-call]
        seconds = float((Path(folder) / "seconds").read_text())
    if not seconds:
        tell("-", False, "the sums are wrong")
        return
    bus = 2 * (world_size - 1) / world_size * size / seconds
    tell(f"{bus / NVLINK:.2f}", bus >= LEAST * NVLINK, f"{bus / 1e9:.1f} GB/s of {NVLINK / 1e9:.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
