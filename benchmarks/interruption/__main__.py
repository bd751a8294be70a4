"""What a weight update costs generation, and what is gained by interrupting it instead of waiting for running requests to end.

    python -m benchmarks.interruption [--model DIR] [--dtype float32] [--slots 32] [--updates 6] [--repetitions 3] [--quick]

One embedded engine, a process of its own as in a run, always has `--slots` requests in flight: when one ends the next one begins. Lengths
are lognormal with a cut, as answers of reasoning models are. Training is played by a clock that counts tokens: whenever `--turns` times
slots times the mean length tokens have come to their end, new weights lie in memory (/dev/shm), two versions in turn, and the engine is
to load them. The same requests in the same order are served in three ways, in turn:
- interrupt: pause (the server retracts what runs), load, continue: tokens are kept, their KV is computed again under the new weights
- wait:      no new request until the running ones have ended, load, go on
- never:     no update at all: what the engine can do
A way's rate is that of tokens of finished requests from one update's being due to another's, `WARM_UP` updates after the start; every way
gets equally many updates per token. Of the repetitions the median counts. `by_cpu`, and what is lost, count the engine's CPU time instead of
the clock's: it is one thread that is never idle, so on a quiet machine both are the same, and beside other work this one still means something.

How much waiting costs depends on what a device gains from large batches. `most_gained` is the ratio to expect, for the same lengths, where a
decode step takes equally long however many requests take part, as on a GPU whose time goes into reading the weights.

An update that interrupts is also taken apart, from steady state, with no new request until it is over: the pause, the load, the time from
going on to the first token, and until all that ran has its KV again (others decode meanwhile, so not all of that is lost).

The last line is one JSON object: name, value (interrupt, tokens/s), unit, against (wait, tokens/s), ratio, and more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.engine.child import EngineChild
from benchmarks.interruption.workload import Engine, Stream, Workload, most_gained, rounded, versions
from benchmarks.quiet import QUIET, Others

WAYS = ("interrupt", "wait", "never")
WARM_UP = 2
POLL_S = 0.002


async def update(stream: Stream, way: str) -> None:
    """New weights are due."""
    if way == "wait":
        stream.gate.clear()
        await stream.drained()
        await stream.engine.load()
        stream.gate.set()
    elif way == "interrupt":
        await stream.engine.pause()
        await stream.engine.load()
        await stream.engine.resume()


class Rate(NamedTuple):
    """Tokens of finished requests, per second and per second of the engine's CPU time."""

    by_clock: float
    by_cpu: float


async def rate(engine: Engine, workload: Workload, way: str, updates: int, seed: int) -> Rate:
    """Over `updates` updates."""
    stream, due = Stream(engine, workload, seed), workload.tokens_per_update
    marks = []
    async with stream.flowing():
        for number in range(1, WARM_UP + updates + 1):
            await stream.until(number * due)
            marks.append((time.perf_counter(), engine.cpu_s(), stream.finished))
            if number < WARM_UP + updates:
                await update(stream, way)
    clock, cpu, tokens = (last - first for first, last in zip(marks[WARM_UP - 1], marks[-1], strict=True))
    return Rate(tokens / clock, tokens / cpu)


async def take_apart(engine: Engine, workload: Workload, samples: int) -> dict[str, float]:
    """Seconds of the parts of an update that interrupts, medians of `samples`."""
    stream = Stream(engine, workload, seed=7)
    parts: list[dict[str, float]] = []
    async with stream.flowing():
        for number in range(1, samples + 1):
            await stream.until(round(number * max(2.0, workload.turns) * workload.slots * workload.mean_length))
            stream.gate.clear()
            parts.append(await _parts(engine))
            stream.gate.set()
            print("update: " + ", ".join(f"{name} {value:.4g}" for name, value in parts[-1].items()), flush=True)
    return {name: statistics.median(part[name] for part in parts) for name in parts[0]}


async def _parts(engine: Engine) -> dict[str, float]:
    """One update; nothing else may be begun until it is over."""
    started = time.perf_counter()
    await engine.pause()
    paused = time.perf_counter()
    await engine.load()
    loaded = time.perf_counter()
    before = now = await engine.info()
    first = refilled = 0.0
    settled = 0
    resumed = time.perf_counter()
    await engine.resume()
    # Every step computes some of the KV that is missing: two steps of all requests without any, and it is there.
    while now["num_running"] + now["num_queued"] and (not first or now["generated_tokens"] - settled < 2 * now["num_running"]):
        seen, now, at = now, await engine.info(), time.perf_counter()
        if not first and now["generated_tokens"] > before["generated_tokens"]:
            first = at
        if now["prefill_tokens"] > seen["prefill_tokens"]:
            refilled, settled = at, now["generated_tokens"]
        await asyncio.sleep(POLL_S)
    return {"pause_s": paused - started, "load_s": loaded - paused, "first_token_s": first - resumed, "reprefill_s": refilled - resumed,
            "requests": before["num_queued"], "reprefilled_tokens": now["prefill_tokens"] - before["prefill_tokens"]}


async def measure(child: EngineChild, folders: list[Path], workload: Workload, options: argparse.Namespace) -> dict:
    """All figures."""
    rates: dict[str, list[Rate]] = {way: [] for way in WAYS}
    others: list[float] = []
    async with Engine.connect(child, folders) as engine:
        parts = await take_apart(engine, workload, options.updates)
        for repetition in range(options.repetitions):
            for way in WAYS:
                beside = Others()
                rates[way].append(await rate(engine, workload, way, options.updates, seed=100 + repetition))
                others.append(beside.cores())
            print(f"repetition {repetition + 1}: " + ", ".join(f"{way} {rates[way][-1].by_clock:.0f} tokens/s ({rates[way][-1].by_cpu:.0f}/CPU s)"
                                                                    for way in WAYS) + f"; others used {max(others[-3:]):.2f} cores", flush=True)
    return summary(rates, parts, workload) | {"quiet": max(others) <= QUIET, "others_cores": others}


def summary(rates: dict[str, list[Rate]], parts: dict[str, float], workload: Workload) -> dict:
    """What follows from the rates of all repetitions."""
    medians = {way: Rate(*map(statistics.median, zip(*rates[way], strict=True))) for way in WAYS}
    interrupt, wait, never = (medians[way] for way in WAYS)
    between = workload.tokens_per_update / interrupt.by_clock
    lost = 1 - interrupt.by_cpu / never.by_cpu
    return {
        "value": interrupt.by_clock, "against": wait.by_clock, "ratio": interrupt.by_clock / wait.by_clock,
        "ratio_by_cpu": interrupt.by_cpu / wait.by_cpu, "most_gained": most_gained(workload), "never": never.by_clock, "lost_to_interruption": lost,
        "lost_to_waiting": 1 - wait.by_cpu / never.by_cpu, "seconds_between_updates": between, "lost_s_per_update": lost * between,
        "standing_still_s": parts["pause_s"] + parts["load_s"] + parts["first_token_s"], **parts, "runs": rates}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interruption", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="model folder; default: a random Qwen3 of 7M parameters")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--slots", type=int, default=32, help="requests in flight")
    parser.add_argument("--longest", type=int, default=384, help="longest answer, in tokens")
    parser.add_argument("--turns", type=float, default=2.0, help="answers that a slot finishes between two updates")
    parser.add_argument("--updates", type=int, default=6, help="updates that count, in each run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs: the figures mean little")
    options = parser.parse_args()
    if options.quick:
        options.slots, options.longest, options.turns, options.updates, options.repetitions = 4, 32, 1.0, 1, 1
    with versions(options.model) as (folders, vocab_size):
        workload = Workload(options.slots, options.longest, options.turns, vocab_size)
        with EngineChild.start(folders[0], dtype=options.dtype, num_slots=options.slots, context_length=64 + options.longest, num_threads=1) as child:
            figures = asyncio.run(measure(child, folders, workload, options))
    print(json.dumps({
        "name": "generation interrupted for new weights, over waiting for running requests to end", "unit": "tokens/s",
        "model": options.model.name if options.model else "random Qwen3, 7M parameters", "dtype": options.dtype, "slots": options.slots,
        "mean_length": round(workload.mean_length), "longest": options.longest, "turns": options.turns,
        **{name: rounded(value) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
