"""What old samples do to each objective, where everything can be computed: success, gradients, divergence.

    python -m benchmarks.tabular [--eta 0 4 8 16] [--lr 0.03] [--steps 200] [--seeds 32] [--delays fixed spread] [--methods NAME ...] [--quick]

A policy that is a table (policy.py) learns by the project's own objectives, all of conf/algorithm that need nothing but rewards, from samples `eta`
versions old, or of ages drawn around it (study.py). Success is exact. Two tables come of it:
- gradients: how far the mean gradient points from the exact one, and how many batches it takes until it is as long as its scatter, by nats a token
  between the policy that sampled and the one in training (gradients.py)
- learning: success over the whole course and at its end, less that with fresh samples; * where it is less, with all cases corrected (Holm, 5%)

Policies are trained side by side, cases by as many processes as there are cores. The last line is one JSON object: name, value (mean success at the
end with decoupled_ppo and the largest eta), unit, against (ppo), cases, gradients.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import asdict
from typing import Any

from benchmarks.tabular.cases import begin, learned
from benchmarks.tabular.gradients import measure
from benchmarks.tabular.objectives import Method, methods
from benchmarks.tabular.study import Setting

GAPS = [0.0, 0.05, 0.1, 0.2, 0.4]


def tell(found: list[dict[str, Any]]) -> None:
    """One line a case."""
    print(f"{'':24} {'lr':>5} {'eta':>3} {'delays':>6} {'gap':>6} {'ess':>5} {'end':>6}   {'over the course':>18} {'at its end':>18}")
    for case in found:
        both = [f"{each['difference']:+.3f} ± {each['half']:.3f}{'*' if each.get('worse') else ' '}" for each in (case["over"], case["last"])]
        delays = "-" if not case["eta"] else "spread" if case["spread"] else "fixed"
        print(f"{case['method']:24} {case['lr']:5g} {case['eta']:3d} {delays:>6} {case['gap']:6.3f} {case['ess']:5.2f} {case['end']:6.3f}   "
              f"{both[0]:>18} {both[1]:>18}")


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
    parser.add_argument("--eta", type=int, nargs="+", default=[0, 4, 8, 16])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.03])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--delays", nargs="+", choices=("fixed", "spread"), default=["fixed", "spread"])
    parser.add_argument("--methods", nargs="+", default=None, help="names in conf/algorithm (default: all that can be)")
    parser.add_argument("--quick", action="store_true", help="the smallest form: shows that it works")
    options = parser.parse_args()
    if options.quick:
        options.eta, options.steps, options.seeds, options.methods = [0, 4], 20, 4, ["decoupled_ppo", "ppo"]
    begin()
    known, left_out = methods()
    chosen = [method for method in known if options.methods is None or method.name in options.methods]
    if wrong := set(options.methods or ()) - {method.name for method in known}:
        parser.error(f"--methods {', '.join(sorted(wrong))}: must be of {', '.join(method.name for method in known)}")
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    gradients = tell_gradients(chosen)
    cases = [(method.name, Setting(eta, lr, delay == "spread", num_steps=options.steps, num_seeds=options.seeds))
             for method, eta, lr, delay in itertools.product(chosen, sorted({0, *options.eta}), options.lr, options.delays)
             if eta or delay == options.delays[0]]
    cases = [(name, setting if setting.eta else Setting(0, setting.lr, num_steps=options.steps, num_seeds=options.seeds)) for name, setting in cases]
    found = learned(cases, len(os.sched_getaffinity(0)))
    tell(found)
    ends = {case["method"]: case["end"] for case in found if case["eta"] == max(options.eta) and case["lr"] == options.lr[0]}
    value, against = ends.get("decoupled_ppo"), ends.get("ppo")
    print(json.dumps({"name": f"success at the end, decoupled PPO over naive PPO, eta={max(options.eta)}", "value": value, "unit": "success",
                      "against": against, "ratio": round(value / against, 3) if value and against else None, "cases": found, "gradients": gradients}))


if __name__ == "__main__":
    main()
