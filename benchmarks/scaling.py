"""How speed grows with the fleet, simulated around the real coordinator: tokens/s of the ideal, slots in use, ages, from 32 GPUs on.

    python -m benchmarks.scaling [--gpus 32 128 1024] [--eta 1 4 8] [--steps 18] [--quick]
    python -m benchmarks.scaling --slots 128 --peak 12000 --half 80 --mean 4000 --most 16000 --group 8 --balance 0.8    # yours

Virtual time (benchmarks/bounds/simulation.py): the coordinator is the real one, message by message; engines and trainer are models. ASSUMED, and
options for the most part: an engine a GPU for 0.75 of them, `slots` samples at once, peak * n / (n + half) tokens/s with n of them running; new
weights stop it for `pause` seconds; answers lognormal with a sigma of 0.8, cut off; a trainer that takes `balance` times what all engines bring with
all slots in use; batches of 4 groups a GPU, grown with the fleet (`grown`), or as large as for 32 GPUs (`fixed`); with `--mtbf` an engine is
lost every so many hours, with all that it had begun, and there again after `--repair` seconds (away, lost: shares of their time, and tokens over
those trained on); a network without delay. Lengths are reckoned in units of 64 tokens.

The ideal is what would be trained on if neither side ever waited. The last line is one JSON object: name, value (share of the ideal with the largest
fleet, batches grown, eta=4), unit, against (with the smallest from 128 GPUs on), ratio, cases.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from typing import Any

from benchmarks.bounds.figures import simulate
from benchmarks.bounds.simulated_workers import Fleet
from benchmarks.bounds.simulation import Setting
from workers.config import Bound
from workers.config.generation import AUTO

UNIT = 64
GROUPS_A_GPU, SMALLEST = 4, 32


def measure(options: argparse.Namespace, gpus: int, eta: int, grown: bool) -> dict[str, Any]:
    """One simulated run."""
    fleet = Fleet(num_engines=round(gpus * 0.75), slots=options.slots, peak=options.peak / UNIT, half=options.half, pause_s=options.pause,
                  balance=options.balance, between_s=options.mtbf * 3600 or math.inf, repair_s=options.repair)
    batch = GROUPS_A_GPU * (gpus if grown else SMALLEST)
    began, mean = time.process_time(), options.mean / UNIT
    figures = simulate(Setting(f"lognormal:{mean:g}", eta, Bound.admission, AUTO, fleet=fleet, group_size=options.group, batch_groups=batch,
                               num_steps=options.steps, warm_up=options.steps // 3, max_tokens=round(options.most / UNIT)))
    return {"gpus": gpus, "eta": eta, "batch": "grown" if grown else "fixed", "groups": batch, "tokens_per_s": round(
        figures.speed * fleet.ideal_rate * UNIT), "cpu_s": round(time.process_time() - began, 1)} | asdict(figures)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[32, 128, 512, 1024])
    parser.add_argument("--eta", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=18, help="training steps, of which a third do not count")
    parser.add_argument("--slots", type=int, default=64, help="samples that an engine decodes at once")
    parser.add_argument("--peak", type=float, default=8000.0, help="tokens/s of an engine with any number of samples")
    parser.add_argument("--half", type=float, default=60.0, help="samples with which it makes half of them")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds that new weights stop an engine")
    parser.add_argument("--mean", type=float, default=8000.0, help="tokens of an answer")
    parser.add_argument("--most", type=float, default=32000.0, help="tokens at which an answer is cut off")
    parser.add_argument("--group", type=int, default=16, help="samples of a prompt")
    parser.add_argument("--balance", type=float, default=1.0, help="what the trainer takes, over what engines bring")
    parser.add_argument("--mtbf", type=float, default=0.0, help="hours after which an engine is lost, on average; 0: never")
    parser.add_argument("--repair", type=float, default=600.0, help="seconds until it is there again")
    parser.add_argument("--quick", action="store_true", help="the smallest form: shows that it works")
    options = parser.parse_args()
    if options.quick:
        options.gpus, options.eta, options.steps = [4, 8], [4], 6
    cases = []
    print(f"{'GPUs':>6} {'eta':>3} {'batch':>12} {'tokens/s':>11} {'of ideal':>8} {'slots':>6} {'mean age':>8} {'oldest':>6} {'waits':>6} "
          f"{'away':>6} {'lost':>6}")
    for gpus in sorted(options.gpus):
        for eta in options.eta:
            for grown in (True, False) if gpus > SMALLEST else (True,):
                case = measure(options, gpus, eta, grown)
                cases.append(case)
                head, told = case["head"], f"{gpus:6d} {eta:3d} {case['groups']:6d} {case['batch']:>5} {case['tokens_per_s']:11,d}"
                seen = " ".join(f"{case[name]:6.1%}" for name in ("wait", "away", "lost"))
                print(f"{told} {case['speed']:8.3f} {case['slots']:6.1%} {head['mean']:8.2f} {head['most']:6d} {seen}", flush=True)
    compared = [case for case in cases if case["batch"] == "grown" and case["eta"] == (4 if 4 in options.eta else options.eta[0])]
    large, small = compared[-1], next((case for case in compared if case["gpus"] >= 128), compared[0])
    print(json.dumps({
        "name": f"share of the ideal with {large['gpus']} GPUs over that with {small['gpus']}, batches grown", "value": large["speed"],
        "unit": "share of the ideal", "against": small["speed"], "ratio": round(large["speed"] / small["speed"], 4), "cases": cases}))


if __name__ == "__main__":
    main()
