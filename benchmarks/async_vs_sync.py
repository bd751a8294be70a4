"""Effective tokens per second: asynchronous training (staleness.eta=4) against synchronous training (eta=0).

    python -m benchmarks.async_vs_sync [--steps 24] [--pairs 2] [--attempts 3]

Effective tokens are the response tokens that PPO consumed. Every figure comes from a complete run, started as a user starts
it (`python -m launcher`), with the real embedded engine and the real trainer, one thread each; it is read from the run's
metrics.jsonl, from the end of step `WARM_UP` to the end of the last step, so that neither start-up nor the evaluations
(before the first and after the last step) count. eta=0 and eta=4 alternate.

The workload is a random Qwen3 of 4 million parameters whose answers end by chance (end-of-sequence is one of 33 equally
likely tokens), so lengths are ragged by nature. Its constants are chosen so that a batch takes about as long to generate
(g: what the trainer waits for at eta=0) as to train and publish (t) on two cores that nothing else uses: a first, short
run measures both. Perfect overlap gives (g + t) / max(g, t) times the synchronous speed. Two things move the result off
that: generation and training share memory bandwidth (and cores with anything else that runs), and at eta=4 the next groups
fill a batch's tail of long answers, in which few sequences are decoded at once.

Anything else that runs takes a core from the asynchronous run, which uses both, and little from the synchronous one, which
uses one at a time. So a run beside which other processes used more than `QUIET` cores is repeated, at most --attempts
times in all, and the least disturbed one is taken. Of those, disturbed ones count only where their kind has no other.
The last line tells the speed of every run taken and the cores that others used beside it.

Synchronous training that gives each phase both cores (they alternate, so nothing is oversubscribed) is measured as well:
what one could do with the same cores instead.

The last line is one JSON object: name, value (eta=4, tokens/s), unit, against (eta=0, tokens/s), ratio, and more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.launched import run_to_end
from benchmarks.quiet import QUIET, Others
from workers.model.architecture import read_architecture
from workers.model.initialize import make_tiny

ETA = 4
WARM_UP = 6
"""Steps left out at the beginning: until the buffer of an asynchronous run is in its steady state."""
CALIBRATION_STEPS = 8
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64}
WORKLOAD = (
    "data=arithmetic", "data.digits=2", "data.num_examples=0", "data.num_heldout=8", "reward.verifier=numeric", "workflow.stop=[]",
    "workflow.group_size=8", "workflow.max_new_tokens=192", "engine.context_length=208", "engine.num_slots=128", "rollout.concurrency=16",
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
    staleness: float
    interrupted_share: float
    generated_rate: float
    buffer_change: int
    others: float
    """Cores that processes that do not belong to the run used meanwhile."""

    @property
    def rate(self) -> float:
        """Effective tokens per second."""
        return self.tokens / self.seconds

    @property
    def busy_s(self) -> float:
        """Seconds a step of training and publishing."""
        return self.train_s + self.publish_s

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


def run(variant: Variant, folder: Path, steps: int, attempts: int, warm_up: int = WARM_UP) -> Measured:
    """The least disturbed of at most `attempts` runs of the workload; the first that is hardly disturbed ends the search."""
    figures: list[Measured] = []
    while not figures or (figures[-1].others > QUIET and len(figures) < attempts):
        figures.append(run_once(variant, folder, steps, warm_up))
        last = figures[-1]
        print(f"{variant.name:<18} {last.rate:5.0f} tokens/s: step {last.step_s:.2f} s = wait {last.wait_s:.2f} + train {last.train_s:.2f} "
              f"+ publish {last.publish_s:.2f}; generated {last.generated_rate:.0f}/s, buffer {last.buffer_change:+d} groups, "
              f"staleness {last.staleness:.1f}; others used {last.others:.2f} cores", flush=True)
    return min(figures, key=lambda each: each.others)


def run_once(variant: Variant, folder: Path, steps: int, warm_up: int) -> Measured:
    """One complete run, below `folder`, which holds the model. Raises RuntimeError with the launcher's output if it fails."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / "run"
        beside = Others()
        # With both cores for both phases, the threads of the phase that waits must sleep, not spin.
        run_to_end("model=hf", f"model.path={folder / 'model'}", f"run.dir={path}", f"run.num_steps={steps}", "run.name=async-vs-sync",
                   f"staleness.eta={variant.eta}", "trainer.export_final=false", f"engine.num_threads={variant.num_threads}",
                   f"trainer.num_threads={variant.num_threads}", *WORKLOAD, OMP_WAIT_POLICY="passive")
        others = beside.cores()
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return measure(records, warm_up, others)


def measure(records: list[dict], warm_up: int, others: float) -> Measured:
    """The figures of a run from the end of step `warm_up` (counted from 1) to its last step."""
    before, steady, last = records[warm_up - 1], records[warm_up:], records[-1]

    def gained(key: str) -> float:
        return last[key] - before[key]

    def mean(key: str) -> float:
        return statistics.mean(record[key] for record in steady)

    return Measured(
        tokens=int(gained("tokens_trained")), seconds=gained("seconds"), num_steps=len(steady), wait_s=mean("wait_batch_s"),
        train_s=mean("train_s"), publish_s=mean("publish_s"), update_s=gained("weight_update_s") / len(steady),
        idle_share=gained("rollout_idle_s") / gained("seconds"), staleness=mean("staleness_mean"),
        interrupted_share=gained("tokens_interrupted") / max(1, gained("tokens_generated")),
        generated_rate=gained("tokens_generated") / gained("seconds"), buffer_change=int(gained("buffer")), others=others)


def undisturbed(runs: list[Measured]) -> list[Measured]:
    """The runs beside which hardly anything else ran; all of them if there is none."""
    return [figures for figures in runs if figures.others <= QUIET] or runs


def together(runs: list[Measured]) -> float:
    """Effective tokens per second over several runs."""
    return sum(figures.tokens for figures in runs) / sum(figures.seconds for figures in runs)


def mean_of(runs: list[Measured], name: str) -> float:
    """The mean of one figure over several runs."""
    return statistics.mean(getattr(figures, name) for figures in runs)


def explain(sync: list[Measured], asynchronous: list[Measured], both: Measured) -> dict[str, float]:
    """Print and return where the time goes."""
    generate, train, train_async = mean_of(sync, "wait_s"), mean_of(sync, "busy_s"), mean_of(asynchronous, "busy_s")
    rows = {
        "g_s": (generate, "seconds a batch that the trainer waits for at eta=0 (load weights, generate, judge)"),
        "t_s": (train, "seconds a batch of training and publishing at eta=0"),
        "ceiling": ((generate + train) / max(generate, train), "(g + t) / max(g, t): perfect overlap, no interference"),
        "ratio": (together(asynchronous) / together(sync), f"measured: eta={ETA} over eta=0"),
        "ratio_both_cores": (together(asynchronous) / both.rate, f"eta={ETA} over eta=0 with two threads for each phase"),
        "interference": (train_async / train, f"t at eta={ETA} over t at eta=0: what generation beside it costs training"),
        "trainer_waits": (mean_of(asynchronous, "wait_s") / mean_of(asynchronous, "step_s"),
                          f"share of a step at eta={ETA} spent waiting for a batch"),
        "rollout_idle": (mean_of(asynchronous, "idle_share"), f"share of the time at eta={ETA} without a running group (staleness limit)"),
        "weight_update_s": (mean_of(asynchronous, "update_s"), f"seconds a step that generation stands still for new weights at eta={ETA}"),
        "interrupted": (mean_of(asynchronous, "interrupted_share"), f"tokens computed again after an interruption, over tokens, at eta={ETA}"),
        "staleness": (mean_of(asynchronous, "staleness"), f"mean age in steps of the groups trained at eta={ETA}"),
    }
    print()
    for name, (value, meaning) in rows.items():
        print(f"{name:<17} {value:7.3f}  {meaning}")
    return {name: round(value, 3) for name, (value, _) in rows.items()}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_vs_sync", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help=f"training steps of a run; the first {WARM_UP} do not count")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each kind")
    parser.add_argument("--attempts", type=int, default=3, help="tries to get a run that other processes do not disturb")
    options = parser.parse_args()
    if options.steps < 2 * WARM_UP or min(options.pairs, options.attempts) < 1:
        parser.error(f"--steps {options.steps} --pairs {options.pairs} --attempts {options.attempts}: must be at least "
                     f"{2 * WARM_UP}, 1 and 1. Give more")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model")
        first = run(SYNC, folder, CALIBRATION_STEPS, 1, warm_up=CALIBRATION_STEPS // 2)
        print(f"calibration: g {first.wait_s:.2f} s, t {first.busy_s:.2f} s, g/t {first.wait_s / first.busy_s:.2f} (meant: 0.7 to 1.4)",
              flush=True)
        each = (folder, options.steps, options.attempts)
        pairs = [(run(SYNC, *each), run(ASYNC, *each)) for _ in range(options.pairs)]
        both = run(BOTH_CORES, *each)
    taken = {SYNC.name: [pair[0] for pair in pairs], ASYNC.name: [pair[1] for pair in pairs], BOTH_CORES.name: [both]}
    sync, asynchronous = undisturbed(taken[SYNC.name]), undisturbed(taken[ASYNC.name])
    explained = explain(sync, asynchronous, both)
    print(json.dumps({
        "name": f"asynchronous (eta={ETA}) over synchronous (eta=0) training", "value": round(together(asynchronous), 1),
        "unit": "effective tokens/s", "against": round(together(sync), 1), **explained, "both_cores": round(both.rate, 1),
        "quiet": all(figures.others <= QUIET for figures in [*sync, *asynchronous, both]),
        "runs": {name: [{"rate": round(figures.rate, 1), "others_cores": round(figures.others, 2)} for figures in runs]
                 for name, runs in taken.items()}}))


if __name__ == "__main__":
    main()
