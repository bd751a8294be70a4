"""Which dtypes this machine computes in, found by trying, not by reading flags. `python -m workers.model.dtypes` prints it as one line of JSON, for
the launcher, which imports no torch:

    {"cpu": {"name": "CPU with AVX2", "runs": ["float32"], "best": "float32", "gflops": 86.1}}     and "cuda" where torch sees a GPU

`best` is bfloat16 where that is faster than float32; `gflops` what linear layers of one thread reach in it (a GPU is not measured: 0).
"""

from __future__ import annotations

import functools
import json
import time

import torch

HALF = (torch.bfloat16, torch.float16)
_PACK_FOR_ROWS = 64
_NUM_TRIED = 12


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [outputs, inputs] in oneDNN's blocked layout, by torch's own entry to it (what torch.compile's frozen graphs call)."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` [tokens, inputs] times the transposed matrix behind `packed`, plus `bias` [outputs]: [tokens, outputs]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Whether linear layers of `dtype` can be packed here. Where not, `F.linear` gives the same, in other dtypes than float32 by loops that are
    several times slower than float32 is (AVX2, bfloat16: 19 GFLOP/s against 86)."""
    try:
        packed_linear(torch.ones(2, 64, dtype=dtype), pack(torch.ones(32, 64, dtype=dtype)), None)
    except (AttributeError, RuntimeError):  # a torch without oneDNN; a CPU without the instructions
        return False
    return True


def speed(dtype: torch.dtype) -> float:
    """GFLOP/s of a packed linear layer, 512 by 1024, on 64 tokens, by one thread; 0 where it cannot be packed. The fastest of several tries, in
    this thread's CPU time, so that load does not matter. (AVX-512 alone runs bfloat16 2.7 times slower than float32, with its bfloat16
    instructions 2.1 times faster.)"""
    if not packs(dtype):
        return 0.0
    x, packed, taken = torch.ones(64, 1024, dtype=dtype), pack(torch.ones(512, 1024, dtype=dtype)), []
    for _ in range(_NUM_TRIED):
        start = time.thread_time()
        packed_linear(x, packed, None)
        taken.append(time.thread_time() - start)
    return 2 * 64 * 512 * 1024 / min(taken) / 1e9


def look() -> dict[str, dict]:
    """By device: its name, the dtypes (by name) that its kernels run, the one to compute in, and how fast that is."""
    torch.set_num_threads(1)
    speeds = {dtype: speed(dtype) for dtype in (torch.float32, torch.bfloat16)}
    best = max(speeds, key=lambda dtype: speeds[dtype])  # float32 if nothing is packed
    name = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    found = {"cpu": _described(name, [dtype for dtype in HALF if packs(dtype)], best, speeds[best])}
    if torch.cuda.is_available():
        runs = [dtype for dtype in HALF if _gpu_runs(dtype)]
        found["cuda"] = _described(torch.cuda.get_device_name(0), runs, torch.bfloat16 if torch.bfloat16 in runs else torch.float32, 0.0)
    return found


def _described(name: str, runs: list[torch.dtype], best: torch.dtype, gflops: float) -> dict:
    return {"name": name, "runs": [_name(dtype) for dtype in (torch.float32, *runs)], "best": _name(best), "gflops": gflops}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gpu_runs(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):  # emulated there
        return False
    try:
        one = torch.ones(16, 16, dtype=dtype, device="cuda")
        return bool((one @ one).eq(16).all())
    except RuntimeError:
        return False


if __name__ == "__main__":
    print(json.dumps(look()))
