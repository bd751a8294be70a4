"""Useful tokens per second of a training step: this project's trainer, a padded Hugging Face loop, and TRL's GRPO trainer.

    python -m benchmarks.trainer [--dtype float32] [--threads 1] [--groups 8] [--repetitions 5] [--quick]

All train the same random Qwen3 (7 million parameters) on the same samples: groups of 8 answers of ragged lengths, one optimizer
step for all of them. Useful tokens are those of each sample with its prompt, counted the same for all; padding does not count.
No micro-batch has room for more than 8,192 tokens, so the padded ones hold 8 sequences of at most 1,024. Each system runs in a
process of its own; they take turns, and the best repetition of each counts. The first turn of each, a warm-up, must have the
same gradient norm. TRL's generation and scoring are not in its time. TRL comes with the extra `benchmark`; without it, it is left out.

Besides: the gain by sharing prompts among the samples of a group, with prompts as long as the answers; and the peak memory of a
step at a vocabulary of 151,936, with log-probs in chunks and from whole logits.

The last line is one JSON object: name, value (tokens/s), unit, against, ratio (to the faster of the two), aim, and more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from benchmarks.children import ROOT
from benchmarks.trainer.samples import Task, useful_tokens, write

AIM = 2.0
NO_TRL = f"TRL is not installed, so it is left out. To compare with it: .venv/bin/pip install -c constraints/{sys.version[:4]}.txt -e '.[benchmark]'"
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


class System:
    """A running systems.py; a context manager that ends it."""

    def __init__(self, folder: Path, name: str, num_threads: int) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the process
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "benchmarks.trainer.systems", str(folder), name], cwd=ROOT,
                                         env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True)

    def step(self) -> dict[str, float]:
        """One training step: seconds, grad_norm, peak_mib. Raises RuntimeError with the process's error output where it ends instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # reading tells what happened
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}: {self._errors.read().decode(errors='replace')}")
        return json.loads(line)

    def __enter__(self) -> System:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def compare(task: Task, names: Sequence[str], repetitions: int, title: str) -> dict[str, Any]:
    """Let the systems take turns; returns tokens/s of each, and the ratios of the first to the others: of the best times, the smallest
    and largest of one repetition, and of the least processor time."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        groups = write(Path(temporary), task)
        tokens = useful_tokens(groups)
        systems = [stack.enter_context(System(Path(temporary), name, task.num_threads)) for name in names]
        norms = {system.name: system.step()["grad_norm"] for system in systems}
        if max(norms.values()) > min(norms.values()) * (1 + TOLERANCE[task.dtype]):
            raise RuntimeError(f"{title}: the systems do not do the same work, their gradient norms are {norms}")
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for repetition in range(repetitions):
            for system in systems:
                steps[system.name].append(system.step())
            print(f"{title}, repetition {repetition + 1}: "
                  + ", ".join(f"{name} {tokens / own[-1]['seconds']:.0f} tokens/s" for name, own in steps.items()), flush=True)
    first = steps[names[0]]
    best = {name: min(step["seconds"] for step in own) for name, own in steps.items()}
    cpu = {name: min(step["cpu_seconds"] for step in own) for name, own in steps.items()}
    each = {name: [theirs["seconds"] / ours["seconds"] for ours, theirs in zip(first, steps[name], strict=True)] for name in names[1:]}
    return {
        "tokens": tokens, "tokens_per_s": {name: round(tokens / seconds, 1) for name, seconds in best.items()},
        "ratios": {name: round(best[name] / best[names[0]], 3) for name in names[1:]},
        "ratios_of_repetitions": {name: [round(min(values), 3), round(max(values), 3)] for name, values in each.items()},
        "cpu_ratios": {name: round(cpu[name] / cpu[names[0]], 3) for name in names[1:]},
        "peak_mib": {name: round(own[-1]["peak_mib"]) for name, own in steps.items()},
    }


def peak_memory(task: Task) -> dict[str, float]:
    """MiB of a process that makes one step, with log-probs in chunks and from whole logits."""
    peaks = {}
    with tempfile.TemporaryDirectory() as temporary:
        groups = write(Path(temporary), task)
        predicted = sum(len(response) for group in groups for response in group.responses)
        for name in ("headway", "whole"):
            with System(Path(temporary), name, task.num_threads) as system:
                peaks[name] = system.step()["peak_mib"]
    print(f"peak memory at a vocabulary of {task.vocab_size}, {predicted} predicted tokens in a micro-batch: in chunks {peaks['headway']:.0f} MiB, "
          f"from whole logits {peaks['whole']:.0f} MiB", flush=True)
    return {"chunked_mib": peaks["headway"], "whole_mib": peaks["whole"], "logits_mib": predicted * task.vocab_size * 4 / 2**20}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repetition on a quarter of the samples: to see that it runs")
    options = parser.parse_args()
    num_groups, repetitions = (max(2, options.groups // 4), 1) if options.quick else (options.groups, options.repetitions)
    common = {"dtype": options.dtype, "num_threads": options.threads}
    with_trl = importlib.util.find_spec("trl") is not None
    if not with_trl:
        print(NO_TRL, flush=True)
    ragged = Task(num_groups, 32, 128, 128.0, 1.0, 896, 8192, **common)
    even = Task(max(1, num_groups // 2), 256, 256, 256.0, 0.0, 256, 8192, **common)
    # A GPU takes larger chunks, so it needs more tokens to have several.
    large = Task(6 if torch.cuda.is_available() else 2, 64, 64, 128.0, 0.3, 256, 8192, **common, vocab_size=151_936, num_layers=2)
    speed = compare(ragged, ["headway", "padded", *(["trl"] if with_trl else [])], repetitions, "ragged answers")
    sharing = compare(even, ["headway", "unshared"], repetitions, "prompts as long as answers")
    memory = peak_memory(large)
    print(json.dumps({
        "name": "training step over padded Hugging Face loop and TRL", "value": speed["tokens_per_s"]["headway"], "unit": "useful tokens/s",
        "against": {name: value for name, value in speed["tokens_per_s"].items() if name != "headway"}, "ratio": min(speed["ratios"].values()),
        "aim": AIM, **common, "speed": speed, "sharing_gain": sharing["ratios"]["unshared"], "sharing": sharing,
        "memory": {name: round(value) for name, value in memory.items()}, "left_out": [] if with_trl else ["trl"],
    }))


if __name__ == "__main__":
    main()
