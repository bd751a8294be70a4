"""Effective tokens per second: asynchronous training (staleness.eta=4) against synchronous training (eta=0).

    python -m benchmarks.async_vs_sync [--steps 24] [--pairs 2] [--keep DIR]

Effective tokens are the response tokens that PPO consumed. Every figure comes from a complete run, started as a user starts
it (`python -m launcher`), with the real embedded engine and the real trainer, one thread each; it is read from the run's
metrics.jsonl, from the end of step `WARM_UP` to the end of the last step, so that neither start-up nor the evaluations
(before the first and after the last step) count. eta=0 and eta=4 alternate.

The workload is a random Qwen3 of 4 million parameters whose answers end by chance (end-of-sequence is one of 33 tokens), so lengths
are ragged by nature. Its constants are chosen so that a batch takes about as long to generate (g: what the trainer waits
for at eta=0) as to train and publish (t) on two cores: a first, short run measures both. Perfect overlap would give
(g + t) / max(g, t) times the synchronous speed, if generation and training did not share memory bandwidth and caches and
if a batch's tail of long answers, where few sequences are decoded at once, cost nothing; at eta=4 the next batches fill it.
Synchronous training that gives each phase both cores (they alternate, so nothing is oversubscribed) is measured as well.

The last line is one JSON object: name, value (eta=4, tokens/s), unit, against (eta=0, tokens/s), ratio, and more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from workers.weights.architecture import read_architecture
from workers.weights.starting import make_tiny

ROOT = Path(__file__).resolve().parent.parent
ETA = 4
WARM_UP = 6
"""Steps left out at the beginning: until the buffer of an asynchronous run is in its steady state."""
CALIBRATION_STEPS = 8
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64}
WORKLOAD = (
    "data=arithmetic", "data.digits=2", "data.num_examples=0", "data.num_heldout=8", "reward.verifier=numeric", "workflow.stop=[]",
    "workflow.group_size=8", "workflow.max_new_tokens=64", "engine.context_length=96", "engine.num_slots=64", "rollout.concurrency=16",
    "trainer.batch_groups=8", "trainer.num_minibatches=2", "trainer.lr=1e-6",
)


@dataclass(frozen=True)
class Variant:
    """One way to run the workload."""

    name: str
    eta: int
    num_threads: int = 1


SYNC, ASYNC, BOTH_CORES = Variant("eta 0", 0), Variant(f"eta {ETA}", ETA), Variant("eta 0, both cores", 0, 2)


@dataclass(frozen=True)
class Measured:
    """The steady part of one run; seconds are means per step unless they are shares."""

    tokens: int
    seconds: float
    num_steps: int
    wait_s: float
    train_s: float
    publish_s: float
    update_s: float
    idle_share: float
    staleness_mean: float
    interrupted_share: float
    generated: int
    buffer_change: int

    @property
    def rate(self) -> float:
        """Effective tokens per second."""
        return self.tokens / self.seconds

    @property
    def step_s(self) -> float:
        """Wall seconds a step."""
        return self.seconds / self.num_steps


def make_model(folder: Path) -> None:
    """A random Qwen3 of `SHAPE` with the tiny model's tokenizer: every token is about equally likely."""
    make_tiny(folder, seed=1)
    config = json.loads((folder / "config.json").read_text()) | SHAPE
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(1)
    save_file({name: np.ones(shape, np.float32) if len(shape) == 1 else draw.standard_normal(shape, np.float32) * np.float32(0.02)
               for name, shape in read_architecture(folder).tensor_shapes().items()},
              folder / "model.safetensors", metadata={"format": "pt"})


def run(variant: Variant, model: Path, folder: Path, steps: int, warm_up: int) -> Measured:
    """One complete run of the workload. Raises RuntimeError with the launcher's output if it fails."""
    command = [sys.executable, "-m", "launcher", "--plain", "model=hf", f"model.path={model}", f"run.dir={folder}", f"run.num_steps={steps}",
               "run.name=async-vs-sync", f"staleness.eta={variant.eta}", f"engine.num_threads={variant.num_threads}",
               f"trainer.num_threads={variant.num_threads}", "trainer.export_final=false", *WORKLOAD]
    # Two pools of two threads on two cores: a pool that waits must sleep, not spin.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{variant.name}: the run ended with status {ended.returncode}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}")
    return measure([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], warm_up)


def measure(records: list[dict], warm_up: int) -> Measured:
    """The figures of a run from the end of step `warm_up` (counted from 1) to its last step."""
    before, steady, last = records[warm_up - 1], records[warm_up:], records[-1]

    def gained(key: str) -> float:
        return last[key] - before[key]

    def mean(key: str) -> float:
        return statistics.mean(record[key] for record in steady)

    return Measured(
        tokens=gained("tokens_trained"), seconds=gained("seconds"), num_steps=len(steady), wait_s=mean("wait_batch_s"),
        train_s=mean("train_s"), publish_s=mean("publish_s"), update_s=gained("weight_update_s") / len(steady),
        idle_share=gained("rollout_idle_s") / gained("seconds"), staleness_mean=mean("staleness_mean"),
        interrupted_share=gained("tokens_interrupted") / max(1, gained("tokens_generated")), generated=gained("tokens_generated"),
        buffer_change=gained("buffer"))


def show(variant: Variant, figures: Measured) -> None:
    """One line about one run."""
    load = os.getloadavg()[0]
    print(f"{variant.name:<18} {figures.rate:7.0f} tokens/s  step {figures.step_s:.2f} s = wait {figures.wait_s:.2f} + train {figures.train_s:.2f} "
          f"+ publish {figures.publish_s:.3f}; rollout idle {figures.idle_share:4.0%}, weight update {figures.update_s:.3f} s, "
          f"generated {figures.generated / figures.seconds:.0f}/s, buffer {figures.buffer_change:+d}, staleness {figures.staleness_mean:.1f}, "
          f"interrupted {figures.interrupted_share:.0%}, load {load:.1f}", flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_vs_sync", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--variants", default="c")
    parser.add_argument("--more", nargs="*", default=[])
    options = parser.parse_args()
    global WORKLOAD
    WORKLOAD = (*WORKLOAD, *options.more)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        make_model(model)
        for i, letter in enumerate(options.variants):
            variant = {"c": SYNC, "s": SYNC, "a": ASYNC, "b": BOTH_CORES}[letter]
            show(variant, run(variant, model, Path(temporary) / f"run{i}", CALIBRATION_STEPS if letter == "c" else options.steps, 3 if letter == "c" else WARM_UP))


if __name__ == "__main__":
    main()
