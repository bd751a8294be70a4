"""Do trainer and SGLang have the same NCCL, and does the driver suit them?"""

from __future__ import annotations

import asyncio
import os

from benchmarks.acceptance.running import tell
from workers.rollout.weights import nccl
from workers.run import gpus, gpus_seen


def main() -> None:
    """Compare, and tell."""
    seen = gpus.found(gpus_seen.look())
    words = gpus.problem(seen, half=True, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    sglang = os.environ.get("HEADWAY_SGLANG_PYTHON", "")
    if sglang and not words:
        words = nccl.difference(seen.nccl, asyncio.run(nccl.version_of(sglang)))
    tell(f"torch {seen.torch}, NCCL {seen.nccl or 'none'}", not words, words or f"CUDA {seen.cuda}, driver {seen.driver}; "
         + (f"SGLang of {sglang}" if sglang else "SGLang not looked at"))


if __name__ == "__main__":
    main()
