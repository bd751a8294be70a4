"""How long SmolLM2-135M takes to learn a task: asynchronously (eta=4, 1, and led by divergence), synchronously (eta=0), and by TRL's GRPO.

    python -m benchmarks.time_to_accuracy [--experiment demo] [--systems NAME ...] [--out runs/time-to-accuracy] [--seeds 3] [--peer-seeds 1]

    each run not yet in OUT/runs.jsonl, one at a time, alone on the machine:
        python -m launcher experiment=demo ... | peer.py --> the weights of every 5th step, and when they stood on disk
        the weights --> one evaluator for all (sampler.py): greedy answers to held-out prompts of the run's seed --> OUT/runs.jsonl
    tables, and one JSON object

Time is what a user waits: from the command until the weights stand on disk, start-up and writing included; evaluating is not. A run reaches the
target where the line between two evaluated steps first crosses it. Model, prompts, batches, optimizer and schedule are those of
conf/experiment/EXPERIMENT.yaml for all; TRL's loss and advantages are its own defaults. A Headway device has one thread, as in the demo, so at eta=0,
where generation and training take turns, one core rests; `eta 0, both cores` gives each phase two threads, as TRL has. TRL comes with the extra
`benchmark`; without it, it is left out. Its runs stop after --peer-steps steps of the same schedule, all others after --until STEP, where that is
given; a longer run then counts up to there. An interrupted command goes on where it was.

The last line is one JSON object: name, value (seconds at eta=4), unit, against (TRL), ratio, and more; ratios are of runs of the same seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import ROOT
from benchmarks.circumstances import circumstances
from benchmarks.configs import composed
from benchmarks.journal import Journal, Record, open_folder
from benchmarks.launched import ended_with_us
from benchmarks.quiet import Others
from benchmarks.sampler import Sampler
from benchmarks.time_to_accuracy.figures import cut, line, report
from launcher.config.schema import register
from workers.config import Config
from workers.data.prompt import Prompt
from workers.data.prompts import open_prompts
from workers.model.initialize import make_smollm2, make_tiny
from workers.reward.verifiers import registry

NO_TRL = f"TRL is not installed, so it is left out. To compare with it: .venv/bin/pip install -c constraints/{sys.version[:4]}.txt -e '.[benchmark]'"
EVERY = 5
"""Steps from one evaluation to the next."""
POLL_S = 0.5
TASKS = {"demo": (("data.num_heldout=400", "run.num_steps=60", "run.name=time-to-accuracy"), 0.75),
         "gsm_symbolic": (("data.num_heldout=160", "run.num_steps=60", "run.name=time-to-accuracy"), 0.4)}
"""Beside conf/experiment; the held-out accuracy to reach."""
QUICK = ("experiment=tiny", "data.num_heldout=8", "run.num_steps=4", "run.name=time-to-accuracy", "trainer.batch_groups=2",
         "trainer.num_minibatches=1", "workflow.group_size=4")


@dataclass(frozen=True)
class System:
    """One way to train. `more`: further overrides; `peer`: by TRL."""

    name: str
    eta: int = 0
    num_threads: int = 1
    more: tuple[str, ...] = ()
    peer: bool = False

    def overrides(self) -> list[str]:
        """What is its own, as on the launcher's command line."""
        return [f"staleness.eta={self.eta}", f"engine.num_threads={self.num_threads}", f"trainer.num_threads={self.num_threads}", *self.more]


ASYNC, LITTLE, SYNC = System("eta 4", 4), System("eta 1", 1), System("eta 0")
WARM_UP = System("eta 4, warm-up 20", 4, more=("staleness.warmup_steps=20",))
DIVERGENCE = System("divergence", 8, more=("staleness.control=divergence", "staleness.warmup_steps=0"))
LORA = System("eta 1, LoRA", 1, more=("trainer.lora.rank=16", "trainer.lr=2e-4", "trainer.min_lr=2e-5"))
AUTO = System("eta 4, auto", 4, more=("rollout.concurrency=auto",))
BOTH_CORES, TRL = System("eta 0, both cores", 0, 2), System("TRL GRPO", 0, 2, peer=True)


@dataclass(frozen=True)
class Task:
    """What all learn: overrides for the launcher, how often weights are kept, after how many steps a peer stops, the accuracy to reach, and after how
    many steps any run stops (None: it goes to its end)."""

    overrides: tuple[str, ...]
    every: int
    peer_steps: int
    target: float
    until: int | None = None

    def config(self, system: System, seed: int) -> Config:
        """The composed and checked config. Raises `ConfigError`."""
        return composed([*self.overrides, *system.overrides(), f"run.seed={seed}"])

    def num_steps(self, system: System, config: Config) -> int:
        """Of a run."""
        return min(config.run.num_steps, self.peer_steps if system.peer else config.run.num_steps, self.until or config.run.num_steps)


class Evaluator:
    """Judges weights by the greedy answers of the embedded engine, in this process, to the prompts that a run holds out."""

    def __init__(self, config: Config) -> None:
        self._sampler, self._judge = Sampler(config, Path(config.model.path).expanduser()), registry.load(config.reward.verifier)

    def accuracies(self, config: Config, folders: Iterable[Path]) -> list[float]:
        """The share of right answers of each Hugging Face folder of weights, in a run with `config`. Raises `ModelError`."""
        prompts = open_prompts(config.data, config.reward, config.run.seed).heldout()
        return [round(self._accuracy(prompts, folder), 4) for folder in folders]

    def _accuracy(self, prompts: list[Prompt], folder: Path) -> float:
        self._sampler.load(folder, 0)
        answers = self._sampler.sample(prompts, 1, 0.0, 0)
        return statistics.mean(self._judge(prompt.text, self._sampler.text(request), prompt.reference)
                               for prompt, [request] in zip(prompts, answers, strict=True))


def run(task: Task, system: System, seed: int, folder: Path, evaluator: Evaluator) -> Record:
    """One complete run below `folder`, evaluated; the folder is removed. Raises RuntimeError with its output if it fails."""
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was interrupted
    folder.mkdir()
    config = task.config(system, seed)
    model = Path(config.model.path).expanduser()
    command, exports = _peer(task, system, config, model, folder) if system.peer else _headway(task, system, seed, folder)
    environment = os.environ | {"OMP_NUM_THREADS": str(system.num_threads), "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    around = circumstances()
    beside, began = Others(), time.time()
    steps = list(range(task.every, task.num_steps(system, config) + 1, task.every))
    with (folder / "output").open("w") as output, ended_with_us(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as process:
        stopped = _wait(process, exports / str(steps[-1]), None if system.peer or steps[-1] == config.run.num_steps else folder / "run")
    others, wall_s = beside.cores(), time.time() - began
    if process.returncode and not stopped:
        raise RuntimeError(f"{system.name}, seed {seed}: the run ended with status {process.returncode}:\n{(folder / 'output').read_text()[-3000:]}")
    seconds = [max(path.stat().st_mtime for path in (exports / str(step)).glob("*.safetensors")) - began for step in steps]
    record = {
        "system": system.name, "seed": seed, "steps": [0, *steps], "seconds": [0.0, *(round(value, 3) for value in seconds)],
        "accuracy": evaluator.accuracies(config, [model, *(exports / str(step) for step in steps)]),
        "wall_s": round(wall_s, 1), "others_cores": round(others, 2), "own": [*system.more], **around}
    shutil.rmtree(folder)
    return record


def _wait(process: subprocess.Popen[bytes], last: Path, run_folder: Path | None) -> bool:
    """Wait until a run ends. Where `run_folder` is given, stop it as soon as the weights `last` stand on disk; whether that was so."""
    while process.poll() is None:
        if run_folder is not None and last.exists():
            subprocess.run([sys.executable, "-m", "launcher", "stop", str(run_folder)], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
            process.wait()
            return True
        time.sleep(POLL_S)
    return False


def _headway(task: Task, system: System, seed: int, folder: Path) -> tuple[list[str], Path]:
    run_folder = folder / "run"
    own = [f"run.seed={seed}", f"run.dir={run_folder}", "evaluation.enabled=false", "evaluation.every_steps=0", "run.target_accuracy=null",
           "trainer.export_final=false", f"trainer.export_every_steps={task.every}", "trainer.export_keep=1000"]
    return [sys.executable, "-m", "launcher", "--plain", *task.overrides, *system.overrides(), *own], run_folder / "exports"


def _peer(task: Task, system: System, config: Config, model: Path, folder: Path) -> tuple[list[str], Path]:
    workflow, trainer, source = config.workflow, config.trainer, open_prompts(config.data, config.reward, config.run.seed)
    prompts = [source.train(index) for index in range(config.run.num_steps * trainer.batch_groups)]
    order = {
        "model": str(model), "exports": str(folder / "exports"), "every": task.every, "stop_after": task.num_steps(system, config),
        "verifier": config.reward.verifier, "prompts": [(prompt.text, prompt.reference) for prompt in prompts], "seed": config.run.seed,
        "num_steps": config.run.num_steps, "group_size": workflow.group_size, "max_new_tokens": workflow.max_new_tokens,
        "temperature": workflow.temperature, "stop": workflow.stop[0]}
    order |= {name: getattr(trainer, name) for name in (
        "batch_groups", "num_minibatches", "lr", "min_lr", "warmup_steps", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad")}
    (folder / "order.json").write_text(json.dumps(order))
    return [sys.executable, "-m", "benchmarks.time_to_accuracy.peer", str(folder / "order.json")], folder / "exports"


def _runs(seeds: int, peer_seeds: int) -> list[tuple[System, int]]:
    """All runs; those of TRL where it is installed."""
    with_peer = importlib.util.find_spec("trl") is not None
    if not with_peer:
        print(NO_TRL)
    every, once = (ASYNC, WARM_UP, LITTLE, DIVERGENCE, SYNC), (AUTO, *([TRL] if with_peer else []), BOTH_CORES)
    return [(system, seed) for systems, number in ((every, seeds), (once, peer_seeds)) for seed in range(1, number + 1) for system in systems]


def _chosen(names: list[str], seeds: int, experiment: str) -> list[tuple[System, int]]:
    """All runs of the systems of these names."""
    known = {system.name: system for system in (ASYNC, WARM_UP, LITTLE, LORA, DIVERGENCE, SYNC, AUTO, BOTH_CORES, TRL)}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--systems {', '.join(unknown)}: must be of {', '.join(known)}. Give one of these")
    if experiment != "demo" and TRL.name in names:
        raise SystemExit(f"--systems {TRL.name!r} --experiment {experiment}: TRL learns demo alone. Leave one of the two out")
    return [(known[name], seed) for seed in range(1, seeds + 1) for name in names]


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_to_accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experiment", choices=TASKS, default="demo", help="what is learned; TRL learns demo alone")
    parser.add_argument("--systems", nargs="+", default=[], metavar="NAME", help="only these, such as 'eta 1' divergence, with --seeds of each")
    parser.add_argument("--out", type=Path, default=Path("runs/time-to-accuracy"), help="folder of the results; an interrupted command goes on there")
    parser.add_argument("--seeds", type=int, default=3, help="runs at eta 0, 1, 4 (also with a warm-up) and led by divergence, seeds 1, 2, ...")
    parser.add_argument("--peer-seeds", type=int, default=1, help="runs of TRL, of eta 0 with both cores, and of eta 4 with rollout.concurrency=auto")
    parser.add_argument("--peer-steps", type=int, default=25, help="steps after which a run of TRL stops")
    parser.add_argument("--until", type=int, metavar="STEP", help=f"step after which runs stop, a multiple of {EVERY}; they go to their end without")
    parser.add_argument("--target", type=float, help="held-out accuracy to reach (demo 0.75, gsm_symbolic 0.4)")
    parser.add_argument("--quick", action="store_true", help="one run of four tiny steps: only to see that it works")
    options = parser.parse_args()
    if options.seeds < 1 or options.peer_seeds < 0 or options.peer_steps < EVERY:
        parser.error(f"--seeds {options.seeds} --peer-seeds {options.peer_seeds} --peer-steps {options.peer_steps}: must be at least 1, 0 and "
                     f"{EVERY}. Give more")
    more, target = TASKS[options.experiment]
    target = target if options.target is None else options.target
    task = Task((f"experiment={options.experiment}", *more), EVERY, options.peer_steps, target, options.until)
    out = options.out.resolve()
    if options.quick:
        task = Task((*QUICK, "model=hf", f"model.path={out / 'model'}"), 2, 2, 0.0, options.until)
    for flag, steps in (("--until", options.until), ("--peer-steps", task.peer_steps)):
        if steps is not None and (steps < task.every or steps % task.every):
            parser.error(f"{flag} {steps}: must be a multiple of {task.every}, the steps from one evaluation to the next. Give one")
    runs = _chosen(options.systems, options.seeds, options.experiment) if options.systems else _runs(options.seeds, options.peer_seeds)
    runs = [(ASYNC, 1)] if options.quick else [(system, seed) for system, seed in runs if not system.peer or options.experiment == "demo"]
    register()
    open_folder(out, {"overrides": [*task.overrides], "every": task.every, "peer_steps": task.peer_steps})
    if options.quick:
        make_tiny(out / "model", 1)
    else:
        make_smollm2(Path(task.config(SYNC, 1).model.path).expanduser())
    journal, evaluator = Journal(out / "runs.jsonl"), Evaluator(task.config(BOTH_CORES, 1))
    done = {(record["system"], record["seed"]): record["steps"][-1] for record in journal.records}
    rules = {record["system"]: record["own"] for record in journal.records if "own" in record}
    for system, seed in runs:
        step, steps = done.get((system.name, seed)), task.num_steps(system, task.config(system, seed))
        if (own := rules.get(system.name, [*system.more])) != [*system.more]:
            raise SystemExit(f"--out {out}: its runs of {system.name} had {own}, and these have {[*system.more]}. Give another folder")
        if step is not None and step < steps:
            raise SystemExit(f"--out {out}: {system.name} of seed {seed} was stopped after step {step}, before {steps}. Give --until {step}, or "
                             "another folder")
        if step is None:
            journal.add(record := run(task, system, seed, out / "run", evaluator))
            print(line(record, task.target), flush=True)
    records = [cut(record, options.until) for record in journal.records]
    slow = SYNC if any(record["system"] == SYNC.name for record in records) else LITTLE
    print(json.dumps(report(records, ASYNC.name, slow.name, DIVERGENCE.name, TRL.name, task.target)))


if __name__ == "__main__":
    main()
