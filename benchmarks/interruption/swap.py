"""What new weights cost generation at one version every 20 decode steps: standing still while they are loaded, or loading them beside (weights.swap).

    python -m benchmarks.interruption.swap [--model DIR] [--dtype float32] [--slots 32] [--steps 20] [--versions 8] [--repetitions 3] [--quick]

One embedded engine, requests and versions as in benchmarks.interruption; the next version is due whenever the engine has generated `--steps` times
slots tokens. In turn, in one run: `never` (no version), and each swap with each engine.interrupt:
- in_place: what runs keeps its KV, so what is lost is the loading alone
- retract:  the KV of all that runs is computed again under the new weights, as log-probs of one version need: inherent, and shown apart

`lost` is the share of the generation of `--steps` steps that a version costs: what its tokens took beyond what `never` takes for as many. Medians
of the repetitions:
- by_thread: in CPU seconds of the thread that generates, which is never idle: by the clock where another core is idle for the loading
- by_cpu:    in those of the whole engine, its loading among them: where no core is idle
- by_clock:  as it was here, which beside other work says little

The last line is one JSON object: name, value (lost with overlap and in_place, by_thread), unit, against (the same with pause), ratio, and more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

from benchmarks.engine.child import EngineChild
from benchmarks.engine.models import make_model
from benchmarks.interruption.workload import Engine, Stream, Workload, make_versions, rounded
from benchmarks.quiet import QUIET, Others
from workers.run.paths import MEMORY

WAYS = tuple((swap, mode) for mode in ("in_place", "retract") for swap in ("pause", "overlap"))
WARM_UP = 2
POLL_S = 0.01


class Cost(NamedTuple):
    """Tokens, seconds, CPU seconds of the engine and of its busiest thread, tokens whose KV was computed, seconds of a call that loads."""

    tokens: float
    clock: float
    cpu: float
    thread: float
    prefilled: float
    load_s: float


async def cost(engine: Engine, workload: Workload, way: tuple[str, str] | None, options: argparse.Namespace, seed: int) -> Cost:
    """Generate, with a version after every so many steps, or without."""
    stream, due, loads = Stream(engine, workload, seed), options.steps * workload.slots, [0.0]
    async with stream.flowing():
        begun, idle = await engine.info(), engine.threads_s()
        begun = await _generated(engine, begun["generated_tokens"] + WARM_UP * due)
        started, cpu, threads = time.perf_counter(), engine.cpu_s(), engine.threads_s()
        generating = max(threads, key=lambda thread: threads[thread] - idle.get(thread, 0.0))
        for number in range(options.versions):
            if way is not None:
                called = time.perf_counter()
                await engine.take_next(*way)
                loads.append(time.perf_counter() - called)
            ended = await _generated(engine, begun["generated_tokens"] + (number + 1) * due)
        clock, cpu, thread = time.perf_counter() - started, engine.cpu_s() - cpu, engine.threads_s()[generating] - threads[generating]
    tokens, prefilled = (ended[name] - begun[name] for name in ("generated_tokens", "prefill_tokens"))
    return Cost(tokens, clock, cpu, thread, prefilled, statistics.median(loads))


async def _generated(engine: Engine, tokens: int) -> dict:
    """The counters, once so many tokens are generated."""
    while (info := await engine.info())["generated_tokens"] < tokens:
        await asyncio.sleep(POLL_S)
    return info


def lost(taken: Cost, never: Cost, options: argparse.Namespace, due: int) -> dict[str, float]:
    """What a version has cost, as a share of what the tokens between two take."""
    beyond = {name: (getattr(taken, name) - taken.tokens * getattr(never, name) / never.tokens) / options.versions
              for name in ("thread", "cpu", "clock", "prefilled")}
    shares = {f"by_{name}": beyond[name] / (due * getattr(never, name) / never.tokens) for name in ("thread", "cpu", "clock")}
    return {**shares, "thread_s": beyond["thread"], "cpu_s": beyond["cpu"], "recomputed_tokens": beyond["prefilled"],
            "load_s": taken.load_s, "steps_a_version": taken.tokens * options.steps / due / options.versions}


async def measure(child: EngineChild, folders: list[Path], workload: Workload, options: argparse.Namespace) -> dict:
    """All figures."""
    runs: dict[str, list[dict[str, float]]] = {f"{swap} {mode}": [] for swap, mode in WAYS}
    rates: list[tuple[float, float]] = []
    others, due = Others(), options.steps * workload.slots
    async with Engine.connect(child, folders) as engine:
        for repetition in range(options.repetitions):
            never = await cost(engine, workload, None, options, seed=100 + repetition)
            rates.append((never.tokens / never.clock, never.tokens / never.cpu))
            for way in WAYS:
                taken = lost(await cost(engine, workload, way, options, seed=100 + repetition), never, options, due)
                runs[" ".join(way)].append(taken)
                told = ", ".join(f"{name} {value:.3g}" for name, value in taken.items())
                print(f"repetition {repetition + 1}, {' '.join(way)}: {told}", flush=True)
    medians = {way: {name: statistics.median(run[name] for run in of) for name in of[0]} for way, of in runs.items()}
    beside, paused, cores = medians["overlap in_place"]["by_thread"], medians["pause in_place"]["by_thread"], others.cores()
    return {"value": beside, "against": paused, "ratio": beside / paused if paused else None, "lost": medians,
            "never_tokens_per_s": statistics.median(rate for rate, _ in rates),
            "never_tokens_per_cpu_s": statistics.median(rate for _, rate in rates), "quiet": cores <= QUIET, "others_cores": cores, "runs": runs}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interruption.swap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="model folder; default: a random Qwen3 of 7M parameters")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--slots", type=int, default=32, help="requests in flight")
    parser.add_argument("--longest", type=int, default=192, help="longest answer, in tokens")
    parser.add_argument("--steps", type=int, default=20, help="decode steps from one version to the next")
    parser.add_argument("--versions", type=int, default=8, help="versions in each run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs: the figures mean little")
    options = parser.parse_args()
    if options.quick:
        options.slots, options.longest, options.versions, options.repetitions = 4, 32, 2, 1
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="headway-benchmark-") as temporary:
        model = options.model or Path(temporary) / "model"
        if options.model is None:
            make_model(model)
        folders = make_versions(model, Path(temporary))
        workload = Workload(options.slots, options.longest, 1.0, json.loads((model / "config.json").read_text())["vocab_size"])
        with EngineChild.start(folders[0], dtype=options.dtype, num_slots=options.slots, context_length=64 + options.longest, num_threads=1) as child:
            figures = asyncio.run(measure(child, folders, workload, options))
    print(json.dumps({
        "name": "generation lost a version that is loaded beside it, over standing still", "unit": "share of the steps between two versions",
        "model": options.model.name if options.model else "random Qwen3, 7M parameters", "dtype": options.dtype, "slots": options.slots,
        "steps": options.steps, "mean_length": round(workload.mean_length), **{name: rounded(value) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
