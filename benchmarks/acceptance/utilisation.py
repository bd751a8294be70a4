"""Model FLOPs utilisation of a training step with micro-batches of so many tokens (benchmarks/mfu.py): `utilisation TOKENS [mixture]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import mfu
from benchmarks.acceptance.running import tell

LEAST = {"dense": 0.35, "mixture": 0.25}


def main(tokens: str, kind: str = "dense") -> None:
    """Measure, and tell."""
    with tempfile.TemporaryDirectory() as folder:
        mfu.write_model(Path(folder), kind)
        found = mfu.measure(Path(folder), int(tokens), argparse.Namespace(recompute="none", length=4096, steps=5))
    share = found["mfu"]
    tell(f"{share:.3f}" if share else "-", bool(share) and share >= LEAST[kind],
         f"{found['tflops']:.0f} TFLOP/s, {found['tokens_per_s']:.0f} tokens/s, peak {found['peak_gib']:.1f} GiB; shares of the step: "
         + ", ".join(f"{kind} {part:.0%}" for kind, part in found["shares"].items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
