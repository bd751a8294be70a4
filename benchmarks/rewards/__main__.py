"""How fast rewards are, what they add to a group beside generation, and whether they are right.

    python -m benchmarks.rewards [--processes 1 2] [--groups 256] [--group-size 4] [--rounds 2] [--items N] [--quick]

The pool and its processes are real (workers/reward/pool/pool.py), the sandbox too; generation is played by a clock, as if a GPU did it.
- rate     verifications per second with every process busy, and how long one takes, waiting left out: median and 99th percentile. Kinds:
           `number` and `fraction`, of math_verify, in the reward process; `root`, of math_verify, in a forked copy; `code`, a function in
           HumanEval's form with six assertions in the sandbox
- groups   `--groups` groups are always in flight, each of `--group-size` samples whose lengths are lognormal, until `--rounds` times as
           many have ended. Verifiers work at most half of the time (`LOAD`). Three ways: free (no verifier), overlap (each sample is judged as soon
           as it is there, as in a run), after (a group is judged when all its samples are there). Added latency: from a group's last sample
           to its last score
- hidden   the share of verifier time that made the whole no longer: 1 - (time with overlap - time with free) / busy time of the verifiers
- agreement of verifiers with the references that data sets and libraries bring: benchmarks/rewards/agreement.py

The last line is one JSON object: name, value (hidden share, the least of the kinds), unit, against (the aim), ratio, and all cases.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.quiet import QUIET, Others
from benchmarks.rewards import agreement as rewards_agreement
from workers.config import RewardConfig
from workers.reward.pool.pool import RewardPool, VerifierError

AIM = 0.95
"""Share of verifier time that should be hidden behind generation."""
LOAD = 0.5
"""Share of the time that verifiers work in `groups`, at most: generation takes long enough for it."""
SPREAD = 0.5
"""Standard deviation of the logarithm of a sample's length."""
WARM_UP = 8

Score = Callable[[], Awaitable[float]]


@dataclass(frozen=True)
class Kind:
    """A verification: the right answer, which must get 1, and a wrong one, which must get 0."""

    verifier: str
    right: str
    wrong: str
    reference: str


HEAD = 'def largest(values, count):\n    """The `count` largest of `values`, falling."""\n'
FUNCTION = "    return sorted(values, reverse=True)[:count]\n"
KINDS = {
    "number": Kind("math_verify", r"First 6 * 3 = 18. So the answer is \boxed{18}.", r"\boxed{17}", "18"),
    "fraction": Kind("math_verify", r"so it is \boxed{\frac{6}{8}}", r"\boxed{\frac{5}{8}}", r"\frac{3}{4}"),
    "root": Kind("math_verify", r"so it is \boxed{\sqrt{12} + 1}", r"\boxed{\sqrt{12}}", r"1 + 2\sqrt{3}"),
    "code": Kind("code", FUNCTION, FUNCTION.replace("True", "False"), json.dumps({
        "kind": "asserts", "entry_point": "largest", "prompt": HEAD, "test": "def check(candidate):\n" + "".join(
            f"    assert candidate([3, 1, 2, {number}], 2) == {sorted([3, number])[::-1]}\n" for number in range(4, 10))})),
}


async def ready(pool: RewardPool, kind: Kind) -> None:
    """Have every process of `pool` do `kind` a few times. Raises `VerifierError` where this machine cannot, AssertionError for a wrong score."""
    await pool.load(kind.verifier)
    scores = await asyncio.gather(*[pool.score("", text, kind.reference, kind.verifier)
                                    for text in (kind.right, kind.wrong) for _ in range(WARM_UP * len(pool.pids))])
    assert scores == [1.0] * (len(scores) // 2) + [0.0] * (len(scores) // 2), f"{kind}: {scores}"


async def rate(kind: Kind, num_processes: int, num_items: int) -> dict[str, float]:
    """`num_items` verifications by `num_processes` processes, none of which waits."""
    seconds: list[float] = []
    async with RewardPool(RewardConfig(verifier=kind.verifier, num_processes=num_processes, timeout_s=60)) as pool:
        await ready(pool, kind)

        async def caller(number: int) -> None:
            for item in range(number, num_items, num_processes):
                begun = time.perf_counter()
                await pool.score("", kind.wrong if item % 2 else kind.right, kind.reference, kind.verifier)
                seconds.append(time.perf_counter() - begun)

        beside, started = Others(), time.perf_counter()
        await asyncio.gather(*[caller(number) for number in range(num_processes)])
        elapsed, others = time.perf_counter() - started, beside.cores()
    return {"processes": num_processes, "per_s": num_items / elapsed, "p50_ms": 1e3 * statistics.median(seconds),
            "p99_ms": 1e3 * sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1], "others_cores": others}


@dataclass(frozen=True)
class Load:
    """What is in flight, and how long a sample is generated in the mean."""

    groups: int
    group_size: int
    rounds: int
    mean_s: float

    def lengths(self, seed: int) -> list[list[float]]:
        """Seconds of generation of all samples, group by group."""
        rng, scale = random.Random(seed), self.mean_s / math.exp(SPREAD**2 / 2)
        return [[scale * math.exp(rng.gauss(0, SPREAD)) for _ in range(self.group_size)] for _ in range(self.groups * self.rounds)]


async def serve(load: Load, way: str, score: Score) -> tuple[float, list[float]]:
    """Seconds until all groups are done, and what was added to each."""
    waiting, added = iter(load.lengths(seed=1)), []

    async def sample(seconds: float) -> None:
        await asyncio.sleep(seconds)
        if way == "overlap":
            await score()

    async def slot() -> None:
        for seconds in waiting:
            begun = time.perf_counter()
            await asyncio.gather(*map(sample, seconds))
            if way == "after":
                await asyncio.gather(*[score() for _ in seconds])
            added.append(time.perf_counter() - begun - max(seconds))

    started = time.perf_counter()
    await asyncio.gather(*[slot() for _ in range(load.groups)])
    return time.perf_counter() - started, added


async def groups(kind: Kind, num_processes: int, per_s: float, options: argparse.Namespace) -> dict[str, float]:
    """The three ways, with `num_processes` processes that do `per_s` verifications a second together."""
    mean_s = max(options.least_s, options.groups * options.group_size / (LOAD * per_s))
    load = Load(options.groups, options.group_size, options.rounds, mean_s)
    figures: dict[str, float] = {"processes": num_processes, "groups": load.groups, "mean_generation_s": load.mean_s}
    async with RewardPool(RewardConfig(verifier=kind.verifier, num_processes=num_processes, timeout_s=60)) as pool:
        await ready(pool, kind)
        beside = Others()
        for way in ("free", "overlap", "after"):
            before = pool.busy_s
            figures[f"{way}_s"], added = await serve(load, way, lambda: pool.score("", kind.right, kind.reference, kind.verifier))
            figures |= {f"{way}_added_ms": 1e3 * statistics.mean(added), f"{way}_added_p99_ms": 1e3 * sorted(added)[math.ceil(0.99 * len(added)) - 1],
                        f"{way}_busy_s": (pool.busy_s - before) / num_processes}
        figures["others_cores"] = beside.cores()
    return figures | {"hidden": hidden(figures["free_s"], figures["overlap_s"], figures["overlap_busy_s"]),
                      "hidden_without_overlap": hidden(figures["free_s"], figures["after_s"], figures["after_busy_s"])}


def hidden(free_s: float, with_s: float, busy_s: float) -> float:
    """The share of `busy_s` that did not make `free_s` longer, in [0, 1]."""
    return min(1.0, max(0.0, 1 - (with_s - free_s) / busy_s))


async def measure(name: str, kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one kind; printed."""
    figures: dict[str, Any] = {"kind": name, "rates": []}
    for processes in options.processes:
        found = await rate(kind, processes, options.items)
        figures["rates"].append(found)
        print(f"{name:<9} {processes} processes: {found['per_s']:.0f} verifications/s, each {found['p50_ms']:.2f} ms, 99% below "
              f"{found['p99_ms']:.2f} ms; others used {found['others_cores']:.2f} cores", flush=True)
    last = figures["rates"][-1]
    found = figures["groups"] = await groups(kind, last["processes"], last["per_s"], options)
    print(f"{name:<9} {found['groups']} groups of {options.group_size}, generated in {found['mean_generation_s']:.2f} s: added to a group "
          f"{found['overlap_added_ms']:.1f} ms with overlap (99% below {found['overlap_added_p99_ms']:.0f}), {found['after_added_ms']:.1f} ms "
          f"without (99% below {found['after_added_p99_ms']:.0f}), {found['free_added_ms']:.1f} ms with no verifier; {found['hidden']:.1%} hidden, "
          f"{found['hidden_without_overlap']:.1%} without overlap; others used {found['others_cores']:.2f} cores", flush=True)
    return figures


def rounded(value: Any) -> Any:
    """For people: four digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewards", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--groups", type=int, default=256, help="groups in flight")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="groups that each place sees")
    parser.add_argument("--least-s", type=float, default=2.0, help="a sample is generated in so many seconds at least, in the mean")
    parser.add_argument("--items", type=int, default=1000, help="verifications of each rate")
    parser.add_argument("--no-agreement", dest="agreement", action="store_false", help="leave out the references")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs: the figures mean little")
    options = parser.parse_args()
    if options.quick:
        options.kinds, options.processes, options.items, options.least_s = ["number", "code"], [1], 6, 0.0
        options.groups, options.group_size, options.rounds = 2, 2, 2
    cases, left_out = [], []
    for name in options.kinds:
        try:
            cases.append(asyncio.run(measure(name, KINDS[name], options)))
        except VerifierError as error:  # a kernel without Landlock runs no code
            left_out.append(f"{name}: {error}")
            print(f"left out: {left_out[-1]}", flush=True)
    agreement = rewards_agreement.figures(5 if options.quick else None) if options.agreement else []
    least = min((case["groups"]["hidden"] for case in cases), default=0.0)
    print(json.dumps({
        "name": "verifier time hidden behind generation", "value": round(least, 4), "unit": "share", "against": AIM, "ratio": round(least / AIM, 3),
        "left_out": left_out, "quiet": all(found["others_cores"] <= QUIET for case in cases for found in (*case["rates"], case["groups"])),
        "cases": rounded(cases), "agreement": agreement}))


if __name__ == "__main__":
    main()
