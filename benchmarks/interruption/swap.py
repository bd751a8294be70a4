"""What new weights cost generation at one version every 20 decode steps: standing still while they are loaded, or loading them beside (weights.swap).

    python -m benchmarks.interruption.swap [--model DIR] [--dtype float32] [--slots 32] [--steps 20] [--rounds 20] [--quick]

One embedded engine that always has half as many requests again as its `--slots`, so that none waits for the client, and versions as in
benchmarks.interruption. Stretches of `--steps` times slots tokens follow each other, in every round one of each kind: `never` (no version), and
each swap with each engine.interrupt, whose version is due as it begins:
- in_place: what runs keeps its KV, so what is lost is the loading alone
- retract:  the KV of all that runs is computed again under the new weights, as log-probs of one version need: inherent, and shown apart

`lost` is what the tokens of a stretch took beyond what those of the same round's `never` took, as a share of the latter; medians of the rounds:
- by_thread: in CPU seconds of the thread that generates, which is never idle: by the clock where another core is idle for the loading
- by_cpu:    in those of the whole engine, its loading among them: where no core is idle
- by_clock:  as it was here, which beside other work says little

Beside other work these scatter by a tenth. So the same is taken apart first, in this process: CPU seconds of a decode step of all slots, of loading,
and of an exchange. The generating thread stands still for the exchange with overlap, for both with pause.

The last line is one JSON object: name, value (what overlap stands still, as a share of `--steps` steps), unit, against (the same of pause), ratio,
and more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.engine.child import EngineChild
from benchmarks.interruption.workload import Engine as Client
from benchmarks.interruption.workload import Stream, Workload, rounded, versions
from benchmarks.quiet import QUIET, Others
from workers.model.architecture import read_architecture
from workers.rollout.engines.servers.embedded.engine_loop import Engine
from workers.rollout.engines.servers.embedded.model import Model
from workers.rollout.engines.servers.embedded.model_runner import Forward, keep_freed_memory
from workers.rollout.engines.servers.embedded.requests import Request
from workers.rollout.engines.servers.embedded.scheduler import Scheduler

WAYS = tuple((swap, mode) for mode in ("in_place", "retract") for swap in ("pause", "overlap"))
WARM_UP, TAKEN_APART = 3, 16
POLL_S = 0.01


def take_apart(folders: list[Path], workload: Workload, options: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of one thread, medians: a decode step of all slots, loading a version, and exchanging it (the old one is freed in it)."""
    keep_freed_memory()
    model = Model(folders[0], read_architecture(folders[0]), getattr(torch, options.dtype), options.slots, 64 + options.longest)
    engine = Engine(Forward(model, 1), Scheduler(options.slots, 64 + options.longest, 1 << 20, "0"), None, lambda request: None)
    requests = workload.requests(seed=1)
    taken: dict[str, list[float]] = {"step_s": [], "load_s": [], "exchange_s": []}
    for number in range(options.slots):
        engine.submit(Request(str(number), next(requests)[0], options.longest))
    with torch.inference_mode():
        engine._run_commands()
        engine._step()
        for number in range(1, min(TAKEN_APART, options.longest // 2)):
            taken["step_s"].append(_cpu(engine._step))
            began = time.thread_time()
            engine.exchange_weights(engine.load_weights(folders[number % 2]), str(number), "in_place")
            taken["load_s"].append(time.thread_time() - began)
            taken["exchange_s"].append(_cpu(engine._run_commands))
    return {name: statistics.median(of) for name, of in taken.items()}


def _cpu(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


class Marks(NamedTuple):
    """Counters of the engine at one time: tokens, those whose KV was computed, seconds, and CPU seconds of each thread."""

    tokens: int
    prefilled: int
    clock: float
    threads: dict[int, float]


async def marks(engine: Client, tokens: int = 0) -> Marks:
    """Its counters, once so many tokens are generated."""
    while (info := await engine.info())["generated_tokens"] < tokens:
        await asyncio.sleep(POLL_S)
    return Marks(info["generated_tokens"], info["prefill_tokens"], time.perf_counter(), engine.threads_s())


def costs(begun: Marks, ended: Marks) -> dict[str, float]:
    """Per generated token: CPU seconds of the busiest thread and of all, seconds, tokens whose KV was computed."""
    taken = [cpu - begun.threads.get(thread, 0.0) for thread, cpu in ended.threads.items()]
    beyond = {"thread": max(taken), "cpu": sum(taken), "clock": ended.clock - begun.clock, "prefilled": ended.prefilled - begun.prefilled}
    return {name: each / (ended.tokens - begun.tokens) for name, each in beyond.items()} | {"tokens": ended.tokens - begun.tokens}


async def stretch(engine: Client, way: tuple[str, str] | None, due: int) -> dict[str, float]:
    """The costs of `due` tokens, or of as many more as come until the version is there."""
    begun = await marks(engine)
    if way is not None:
        await engine.take_next(*way)
    load_s = time.perf_counter() - begun.clock
    return costs(begun, await marks(engine, begun.tokens + due)) | {"load_s": load_s}


def lost(taken: dict[str, float], never: dict[str, float], due: int) -> dict[str, float]:
    """What a version has cost beyond `never`, as shares of `due` tokens, and in tokens."""
    shares = {f"by_{name}": taken["tokens"] / due * (taken[name] / never[name] - 1) for name in ("thread", "cpu", "clock")}
    return shares | {"recomputed_tokens": taken["tokens"] * (taken["prefilled"] - never["prefilled"]), "load_s": taken["load_s"],
                     "stretch": taken["tokens"] / due}


async def measure(child: EngineChild, folders: list[Path], workload: Workload, options: argparse.Namespace) -> dict:
    """All figures."""
    runs: dict[str, list[dict[str, float]]] = {" ".join(way): [] for way in WAYS}
    plain, others, due = [], Others(), options.steps * options.slots
    async with Client.connect(child, folders) as engine:
        stream = Stream(engine, workload, seed=1)
        async with stream.flowing():
            await stream.until(WARM_UP * workload.slots * round(workload.mean_length))
            for number in range(1, options.rounds + 1):
                plain.append(await stretch(engine, None, due))
                for way in WAYS:
                    runs[" ".join(way)].append(lost(await stretch(engine, way, due), plain[-1], due))
                told = "; ".join(f"{way} {of[-1]['by_thread']:.3f}, {of[-1]['by_cpu']:.3f} by_cpu" for way, of in runs.items())
                print(f"round {number}: {told}", flush=True)
    medians = {way: {name: statistics.median(run[name] for run in of) for name in of[0]} for way, of in runs.items()}
    cores = others.cores()
    rates = {f"never_tokens_per_{name}_s": 1 / statistics.median(each[name] for each in plain) for name in ("clock", "cpu")}
    return {"lost": medians, **rates, "quiet": cores <= QUIET, "others_cores": cores,
            "runs": {way: [run["by_thread"] for run in of] for way, of in runs.items()}}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interruption.swap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="model folder; default: a random Qwen3 of 7M parameters")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--slots", type=int, default=32, help="requests in flight")
    parser.add_argument("--longest", type=int, default=192, help="longest answer, in tokens")
    parser.add_argument("--steps", type=int, default=20, help="decode steps from one version to the next")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs: the figures mean little")
    options = parser.parse_args()
    if options.quick:
        options.slots, options.longest, options.rounds = 4, 32, 2
    with versions(options.model) as (folders, vocab_size):
        workload = Workload(options.slots * 3 // 2, options.longest, 1.0, vocab_size)
        parts = take_apart(folders, workload, options)
        print(", ".join(f"{name} {value:.4g}" for name, value in parts.items()), flush=True)
        with EngineChild.start(folders[0], dtype=options.dtype, num_slots=options.slots, context_length=64 + options.longest, num_threads=1) as child:
            figures = asyncio.run(measure(child, folders, workload, options))
    beside, paused = (still / (options.steps * parts["step_s"]) for still in (parts["exchange_s"], parts["exchange_s"] + parts["load_s"]))
    print(json.dumps({
        "name": "generation stands still for a version that is loaded beside it, over one for which it is paused", "unit": "share of steps between",
        "value": rounded(beside), "against": rounded(paused), "ratio": rounded(beside / paused),
        "model": options.model.name if options.model else "random Qwen3, 7M parameters", "dtype": options.dtype, "slots": options.slots,
        "steps": options.steps, "mean_length": round(workload.mean_length), **{name: rounded(value) for name, value in (parts | figures).items()}}))


if __name__ == "__main__":
    main()
