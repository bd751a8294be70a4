"""What each staleness bound costs and buys: `staleness.bound=admission` against `hard`, over concurrency, lengths of answers and eta.

    python -m benchmarks.bounds [--steps 100] [--runs 3] [--quick]

1. Simulated runs (simulation.py): the real coordinator in virtual time, between models of engines and of a trainer. The table has
   - speed: tokens consumed per second over what would be consumed if neither side ever waited for the other;
   - head, token: ages in training steps at consumption, of groups' oldest first tokens and of all tokens: mean, 99th percentile, most, and the share
     that is older than eta;
   - wait: the share of the time in which the trainer has nothing to do; idle: in which an engine has nothing to do; slots: the share of them in use.
2. `rollout.concurrency=auto` in the same cases, where the trainer is half or twice as fast, and where few samples fill an engine, against every
   fixed one: its speed over that of the fastest, its mean age beside that of the largest.
3. `staleness.target` below eta: what room for stragglers is worth, with bound=hard and a long tail.
4. `staleness.control=divergence` and a policy that moves (drift.py): the lead in steps, nats, the share of steps a quarter beyond the budget, speed.
5. Real runs of `experiment=tiny` (variants.py), `--runs` seeds of each: held-out accuracy and consumed staleness.

The last line is one JSON object: name, value (speed of auto in its worst case), unit, against (the fastest fixed one there), ratio, cases.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from benchmarks.bounds import drift
from benchmarks.bounds.drift import Drifting
from benchmarks.bounds.figures import HEADER, simulate
from benchmarks.bounds.simulated_workers import LENGTHS, Fleet
from benchmarks.bounds.simulation import Setting
from benchmarks.bounds.variants import VARIANTS, run_variant
from workers.config import Bound
from workers.config.generation import AUTO

ETAS, CONCURRENCIES = [1, 2, 4, 8], [4, 8, 16, 32, 48, 96]
FLEETS = {"": Fleet(), "slow trainer": Fleet(balance=0.5), "fast trainer": Fleet(balance=2.0), "soon full": Fleet(half=6.0)}
"""The first one with every eta, the others with eta=4. `soon full`: engines that 32 samples bring to 84% of their peak, not to 37%."""


def compare(setting: Setting, name: str, concurrencies: Iterable[int]) -> dict[str, Any]:
    """One case, with a fleet of this name, with every fixed concurrency and with `auto`: prints their lines, returns their figures."""
    fixed = {number: simulate(replace(setting, concurrency=number)) for number in concurrencies}
    auto = simulate(replace(setting, concurrency=AUTO))
    for number, figures in [*fixed.items(), (f"auto {auto.concurrency:.0f}", auto)]:
        print(f"{setting.lengths:<10} eta {setting.eta} {setting.bound.value:<9} {name:<12} {number:>7}  {figures}", flush=True)
    best, largest = max(fixed.values(), key=lambda each: each.speed), fixed[max(fixed)]
    return {"lengths": setting.lengths, "eta": setting.eta, "bound": setting.bound.value, "fleet": name,
            "fixed": {str(number): asdict(figures) for number, figures in fixed.items()}, "auto": asdict(auto),
            "ratio": round(auto.speed / best.speed, 4), "best": best.speed, "age_over_largest": round(auto.head.mean - largest.head.mean, 3)}


def targets(lengths: str, eta: int, steps: int, warm_up: int) -> list[dict[str, Any]]:
    """`bound=hard` with less and less admitted ahead, and `auto`."""
    cases = []
    for target in (None, *(eta * part for part in (0.75, 0.5, 0.375, 0.25))):
        setting = Setting(lengths, eta, Bound.hard, AUTO, target, num_steps=steps, warm_up=warm_up)
        figures = simulate(setting)
        print(f"{lengths:<10} eta {eta} hard      target {'eta' if target is None else format(target, 'g'):<5} {'auto':>7}  {figures}", flush=True)
        cases.append({"lengths": lengths, "eta": eta, "target": target, **asdict(figures)})
    return cases


def leads(steps: int, warm_up: int) -> list[dict[str, Any]]:
    """What the lead makes of policies that move in several ways."""
    found = []
    for name, setting in drift.cases(Drifting("lognormal", 8, Bound.admission, 96, num_steps=steps, warm_up=warm_up)).items():
        seen = drift.course(setting)
        print(f"{name:<30} lead {seen.lead:5.2f} ± {seen.deviation:.2f}  {seen.apart:.3f} nats of {setting.budget:g}, {seen.over:4.0%} far beyond; "
              f"speed {seen.speed:.3f}", flush=True)
        found.append({"case": name, **asdict(seen)})
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps of a simulated run; the first 40%% do not count")
    parser.add_argument("--runs", type=int, default=3, help="seeds of each real run; 0: only simulated ones")
    parser.add_argument("--quick", action="store_true", help="the smallest form, simulated only: shows that it works, not how fast it is")
    options = parser.parse_args()
    if options.steps < 30 or options.runs < 0:
        parser.error(f"--steps {options.steps} --runs {options.runs}: must be at least 30 and 0. Give more")
    steps, etas, concurrencies, fleets = options.steps, ETAS, CONCURRENCIES, FLEETS
    if options.quick:
        steps, options.runs, etas, concurrencies, fleets = 30, 0, [2], [4, 48], {"": Fleet()}
    print(f"{'':<49}{HEADER}")
    warm_up = steps * 2 // 5
    cases = [compare(Setting(lengths, eta, bound, AUTO, fleet=fleet, num_steps=steps, warm_up=warm_up), name, concurrencies)
             for name, fleet in fleets.items() for lengths, eta, bound in itertools.product(LENGTHS, [4] if name else etas, Bound)]
    held = [case for lengths, eta in itertools.product(("lognormal", "long tail"), etas[-2:]) for case in targets(lengths, eta, steps, warm_up)]
    led = leads(steps, warm_up)
    runs = [run_variant(variant, options.runs) for variant in VARIANTS] if options.runs else []
    worst = min(cases, key=lambda case: case["ratio"])
    print(json.dumps({
        "name": "rollout.concurrency=auto over the fastest fixed concurrency, worst case, simulated", "value": worst["auto"]["speed"],
        "unit": "share of the ideal speed", "against": worst["best"], "ratio": worst["ratio"],
        "age_over_largest": max(case["age_over_largest"] for case in cases), "cases": cases, "targets": held, "leads": led, "runs": runs}))


if __name__ == "__main__":
    main()
