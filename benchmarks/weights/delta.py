"""What a training step changes: the size of a delta, the time it takes, and that a chain of them is exact.

    python -m benchmarks.weights.delta [--lr 1e-6 2e-5] [--steps 5] [--chain 100]

Real runs, started as a user starts them: experiment=demo (SmolLM2-135M, bf16) at a constant learning rate, the model exported after every
step. Of two exports, one after the other, the trainer's part (differences of all chunks, one thread) and a receiver's part (its chunks from
the version before and the differences, each chunk checked by digest) are done by the functions that the weight transport calls, in memory
(/dev/shm). The first steps of Adam move every weight by about the learning rate, so later ones change less than what is measured here.

`break_even` is the network's speed (GB/s) below which deltas bring a version sooner than the plain bytes, making of the deltas included.

The chain: experiment=tiny in bf16, one version a step, each made of the version before, itself so made, and its delta alone. Chunks of 64 KiB, so
that there are several.

The last line is one JSON object: name, value (bytes of a version over bytes of its delta, at the smallest learning rate), unit, against, ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.launched import run_to_end
from workers.config import WeightsConfig
from workers.messages.parts import Version
from workers.run.digests import digest_of
from workers.run.paths import MEMORY
from workers.weights.delta import Deltas, DeltaSize, decode, make_deltas

CHUNK_BYTES = WeightsConfig().chunk_mb << 20
CHAIN_CHUNK_BYTES = 1 << 16
BF16 = 2
LEARNING_RATES, STEPS, CHAIN = [1e-6, 2e-5], 5, 100
EVERY_STEP = ("trainer.export_every_steps=1", "trainer.export_keep=1000", "trainer.export_final=false", "trainer.dtype=bfloat16",
              "trainer.warmup_steps=0", "trainer.lr_schedule=constant", "trainer.min_lr=0", "engine.dtype=bfloat16",
              "evaluation.every_steps=0", "data.num_heldout=8")


def versions(folder: Path, experiment: str, steps: int, *more: str) -> list[Path]:
    """The model after each step of a run, oldest first. Raises RuntimeError with the launcher's output if it fails."""
    run_to_end(f"experiment={experiment}", f"run.dir={folder}", f"run.num_steps={steps}", *EVERY_STEP, *more)
    return sorted((folder / "exports").iterdir(), key=lambda path: int(path.name))


def tensors_of(folder: Path) -> list[str]:
    """The names of the files that hold tensors."""
    return sorted(path.name for path in folder.glob("*.safetensors"))


def chunks(folder: Path, chunk_bytes: int) -> Iterator[tuple[str, int, memoryview]]:
    """File, offset and content of every chunk."""
    for name in tensors_of(folder):
        content = np.memmap(folder / name, np.uint8, "r").data
        for offset in range(0, len(content), chunk_bytes):
            yield name, offset, content[offset : offset + chunk_bytes]


def make(base: Path, new: Path, path: Path, chunk_bytes: int) -> DeltaSize:
    """The trainer's part: write to `path` what has changed."""
    return make_deltas(new, base, Version(1, 1), tensors_of(new), path, chunk_bytes=chunk_bytes, width=BF16)


def apply(base: Path, path: Path, digests: list[str], target: Path, chunk_bytes: int) -> None:
    """A receiver's part: the new version's files in `target`, out of `base` and the delta. A chunk that has no difference must be as it was."""
    deltas = Deltas.open(path)
    target.mkdir()
    for (name, offset, old), digest in zip(chunks(base, chunk_bytes), digests, strict=True):
        difference = deltas.find(name, offset)
        assert difference is not None, f"{name}: chunk at {offset} travels raw"
        content = decode(difference, old)
        assert digest_of(content) == digest, f"{name}: chunk at {offset} is not what was published"
        with (target / name).open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(content)


def step(base: Path, new: Path, memory: Path) -> dict[str, float]:
    """One delta, there and back; bytes and seconds."""
    digests = [digest_of(content) for *_, content in chunks(new, CHUNK_BYTES)]
    started = time.perf_counter()
    size = make(base, new, memory / "delta", CHUNK_BYTES)
    made = time.perf_counter()
    apply(base, memory / "delta", digests, memory / "rebuilt", CHUNK_BYTES)
    ended = time.perf_counter()
    shutil.rmtree(memory / "rebuilt")
    old, fresh = (np.concatenate([np.fromfile(folder / name, np.uint16) for name in tensors_of(new)]) for folder in (base, new))
    changed = float(np.mean(old != fresh))
    return {"bytes": size.raw, "delta_bytes": size.encoded, "make_s": made - started, "apply_s": ended - made, "changed": changed}


def chain(exports: list[Path], memory: Path) -> int:
    """How many versions came out exactly, each from the one before it that came out, and a delta: all, or AssertionError."""
    held = exports[0]
    for number, (base, new) in enumerate(itertools.pairwise(exports), start=1):
        make(base, new, memory / "delta", CHAIN_CHUNK_BYTES)
        target = memory / f"held-{number}"
        apply(held, memory / "delta", [digest_of(content) for *_, content in chunks(new, CHAIN_CHUNK_BYTES)], target, CHAIN_CHUNK_BYTES)
        if held != exports[0]:
            shutil.rmtree(held)
        held = target
    return len(exports) - 1


def measure(lr: float, steps: int, memory: Path) -> dict[str, float]:
    """Bytes: medians over the steps of one run; seconds: the best of them."""
    exports = versions(memory / f"run-{lr:g}", "demo", steps, f"trainer.lr={lr:g}")
    each = [step(base, new, memory) for base, new in itertools.pairwise(exports)]
    shutil.rmtree(memory / f"run-{lr:g}")
    figures = {name: (min if name.endswith("_s") else statistics.median)(figure[name] for figure in each) for name in each[0]}
    figures |= {"lr": lr, "ratio": figures["bytes"] / figures["delta_bytes"],
                "break_even_gb_per_s": (figures["bytes"] - figures["delta_bytes"]) / (figures["make_s"] + figures["apply_s"]) / 1e9}
    print(f"lr {lr:g}: {figures['changed']:.2%} of the weights change; {figures['bytes'] / 1e6:.0f} MB in {figures['delta_bytes'] / 1e6:.1f} MB "
          f"(1/{figures['ratio']:.0f}), {figures['make_s']:.2f} s to make, {figures['apply_s']:.2f} s to apply; sooner than plain bytes below "
          f"{figures['break_even_gb_per_s']:.2f} GB/s", flush=True)
    return figures


def figures(rates: list[float], steps: int, chain_length: int) -> dict[str, Any]:
    """One case for each learning rate, and the number of versions of the chain that came out exactly."""
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="headway-benchmark-") as temporary:
        memory = Path(temporary)
        cases = [measure(lr, steps, memory) for lr in rates]
        exact = chain(versions(memory / "chain", "tiny", chain_length + 1, "trainer.lr=1e-4"), memory)
    print(f"{exact} versions, each from the one before and a delta: all exact", flush=True)
    return {"exact_versions": exact, "cases": [{name: float(f"{value:.4g}") for name, value in case.items()} for case in cases]}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights.delta", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--chain", type=int, default=CHAIN, help="versions of the chain")
    options = parser.parse_args()
    found = figures(options.lr, options.steps, options.chain)
    first = min(found["cases"], key=lambda case: case["lr"])
    print(json.dumps({
        "name": f"bytes of a version over bytes of its delta, lr {first['lr']:g}", "value": first["delta_bytes"], "unit": "bytes",
        "against": first["bytes"], "ratio": first["ratio"], **found}))


if __name__ == "__main__":
    main()
