"""What old samples do to each objective, where everything can be computed: success, gradients, divergence.

    python -m benchmarks.tabular [--eta 4 8 16] [--lr 0.03 0.1] [--steps 200] [--seeds 32] [--methods NAME ...] [--no-axes] [--plot FILE]

A policy that is a table (policy.py) learns by the project's own objectives, all of conf/algorithm that need nothing but rewards, from samples `eta`
versions old, or of ages drawn around it (study.py). Success is exact. Two tables come of it:
- gradients: how far the mean gradient points from the exact one, and how many batches it takes until it is as long as its scatter, by nats a token
  between the policy that sampled and the one in training (gradients.py)
- learning: success over the whole course and at its end, less that with fresh samples, and less that of fresh samples `eta` steps before the end,
  which is what being that much behind explains; * where it is less, with all cases corrected (Holm, 5%). All also have an engine that computes
  otherwise than the trainer, decoupled and naive PPO drawn delays, other batches, group sizes and lengths (cases.py: AXES). Then the last of these
  differences by divergence

Policies are trained side by side, cases by as many processes as there are cores. The last line is one JSON object: name, value (mean success at the
end with decoupled_ppo and the largest eta), unit, against (ppo), cases, gradients.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.tabular.cases import AXES, NAMES, along_axes, begin, fresh_of, learned
from benchmarks.tabular.gradients import measure
from benchmarks.tabular.objectives import Method, methods
from benchmarks.tabular.study import Setting

GAPS = [0.0, 0.05, 0.1, 0.2, 0.4]
BINS = (0.03, 0.06, 0.12, 0.25, 0.5, 9.0)
BASE = Setting(0, 0.03)
ON_AXES = ("decoupled_ppo", "ppo")
MISMATCHES = (0.1, 0.4)


def tell(found: list[dict[str, Any]]) -> None:
    """One line a case, by method and divergence."""
    print(f"{'':24} {'case':14} {'eta':>3} {'delays':>6} {'gap':>6} {'ess':>5} {'end':>6}   "
          f"{'over the course':>18} {'at its end':>18} {'but for the lag':>18}")
    for case in found:
        each = [f"{cost['difference']:+.3f} ± {cost['half']:.3f}{'*' if cost.get('worse') else ' '}" for cost in (case[name] for name in NAMES)]
        delays = "-" if not case["eta"] else "spread" if case["spread"] else "fixed"
        changed = " ".join(f"{name}={case[name]:g}" for name in AXES if case[name] != asdict(BASE)[name]) or "base"
        print(f"{case['method']:24} {changed:14} {case['eta']:3d} {delays:>6} {case['gap']:6.3f} {case['ess']:5.2f} {case['end']:6.3f}   "
              + " ".join(f"{one:>18}" for one in each), flush=True)
    print(f"{'nats a token':24} " + " ".join(f"{name:>13}" for name in (f"to {most:g}" for most in BINS)) + "   worse wherever above")
    for name in dict.fromkeys(case["method"] for case in found):
        row = [[case["apart"]["difference"] for case in found if case["method"] == name and not case["fresh"] and low < case["gap"] <= high]
               for low, high in itertools.pairwise((0.0, *BINS))]
        broken = breaks([case for case in found if case["method"] == name and not case["fresh"]])
        print(f"{name:24} " + " ".join(f"{sum(each) / len(each):+8.3f} ({len(each):2d})" if each else f"{'-':>13}" for each in row)
              + f"   {'never' if broken is None else format(broken, '.3f')}")


def breaks(cases: list[dict[str, Any]]) -> float | None:
    """The smallest divergence from which on every case ends worse than its lag explains; None where the farthest does not."""
    found = None
    for case in sorted(cases, key=lambda each: -each["gap"]):
        if not case["apart"]["worse"]:
            break
        found = case["gap"]
    return found


def tell_gradients(known: list[Method]) -> dict[str, list[dict[str, float]]]:
    """A line a method: the cosine, and batches."""
    found = measure(known, GAPS, Setting(0, 0.03))
    print(f"{'nats a token':24} " + " ".join(f"{gap:12.2f}" for gap in GAPS))
    for name, each in found.items():
        print(f"{name:24} " + " ".join(f"{one.cosine:5.2f} {one.batches:6.1f}" for one in each))
    return {name: [asdict(one) for one in each] for name, each in found.items()}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tabular", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--eta", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.03, 0.1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--methods", nargs="+", default=None, help="names in conf/algorithm (default: all that can be)")
    parser.add_argument("--no-axes", dest="axes", action="store_false", help="change nothing but eta and the learning rate")
    parser.add_argument("--plot", type=Path, help="write the figure to this file, SVG (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="the smallest form: shows that it works")
    options = parser.parse_args()
    if options.quick:
        options.eta, options.lr, options.steps, options.seeds, options.methods, options.axes = [4], [0.03], 20, 4, [*ON_AXES], False
    begin()
    known, left_out = methods()
    chosen = [method for method in known if options.methods is None or method.name in options.methods]
    if wrong := set(options.methods or ()) - {method.name for method in known}:
        parser.error(f"--methods {', '.join(sorted(wrong))}: must be of {', '.join(method.name for method in known)}")
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    gradients = tell_gradients(chosen)
    base = replace(BASE, num_steps=options.steps, num_seeds=options.seeds)
    old = [replace(base, eta=eta, lr=lr) for eta, lr in itertools.product(options.eta, options.lr)]
    unlike = [replace(base, eta=eta, mismatch=size) for eta, size in itertools.product((0, max(options.eta)), MISMATCHES if options.axes else ())]
    axes = [*along_axes(base, options.eta), *(replace(each, spread=True) for each in old)] if options.axes else []
    cases = [(method.name, setting) for method in chosen
             for setting in (*(fresh_of(each) for each in old), *old, *unlike, *(axes if method.name in ON_AXES else ()))]
    found = learned(list(dict.fromkeys(cases)), len(os.sched_getaffinity(0)))
    tell(found)
    if options.plot:
        from benchmarks.tabular.plot import draw
        draw(found, gradients, options.plot)
    ends = {case["method"]: case["end"] for case in found if case["eta"] == max(options.eta) and case["lr"] == options.lr[0] and not case["spread"]
            and all(case[name] == asdict(base)[name] for name in AXES if name != "lr")}
    value, against = ends.get("decoupled_ppo"), ends.get("ppo")
    print(json.dumps({"name": f"success at the end, decoupled PPO over naive PPO, eta={max(options.eta)}", "value": value, "unit": "success",
                      "against": against, "ratio": round(value / against, 3) if value and against else None, "cases": found, "gradients": gradients}))


if __name__ == "__main__":
    main()
