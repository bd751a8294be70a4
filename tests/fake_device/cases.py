"""Models and layouts of the tests, and the process that runs them: `python -m tests.fake_device.cases` reads cases and writes figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from launcher.preflight.fake_step import WITHOUT_GPU
from tests.support.documented import MODELS
from workers.config import Config, Dtype, LoraConfig, ParallelConfig, Recompute, TrainerConfig
from workers.trainer.fake_device.exchanges import mismatches


@dataclass(frozen=True)
class Case:
    """A step of some ranks: `parallel` are keys of trainer.parallel, `length` is a sequence's, of which 256 are its prompt's; micro-batches of
    `tokens`, which whole groups of `group` fill."""

    model: str
    world_size: int
    parallel: dict[str, Any]
    ranks: tuple[int, ...]
    tokens: int = 8192
    length: int = 4096
    group: int = 1
    recompute: str = "none"
    num_minibatches: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the model's config.json, such as fewer layers."""
    lora: int = 0
    """The rank of adapters of all matrices."""

    def config(self) -> Config:
        """The trainer's config, in bfloat16."""
        config = Config()
        config.trainer = TrainerConfig(
            microbatch_tokens=self.tokens, num_minibatches=self.num_minibatches, batch_groups=1024 * self.num_minibatches, dtype=Dtype.bfloat16,
            recompute=Recompute(self.recompute), parallel=ParallelConfig(**self.parallel), lora=LoraConfig(rank=self.lora))
        config.engine.dtype, config.engine.context_length = Dtype.bfloat16, self.length
        config.workflow.group_size, config.workflow.max_new_tokens = self.group, self.length - 256
        return config

    def write_model(self, folder: Path) -> Path:
        """Its config.json, in a folder that holds no more."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[self.model] | self.changes))
        return folder


def figures_of(cases: list[Case]) -> list[dict[str, Any]]:
    """Of each case, in a process of their own: `ranks`: the figures of each; where all of several run, of their first step, and `mismatches`."""
    asked = msgspec.json.encode(cases).decode()
    done = subprocess.run([sys.executable, "-m", "tests.fake_device.cases"], input=asked, capture_output=True, text=True, check=False,
                          env={**os.environ, **WITHOUT_GPU}, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _run(case: Case, folder: Path) -> dict[str, Any]:
    from workers.trainer.fake_device.step import fake_step

    whole = len(case.ranks) == case.world_size > 1
    figures = [fake_step(case.config(), case.write_model(folder), rank, case.world_size, first=whole) for rank in case.ranks]
    calls = [found.calls for found in figures]
    return {"ranks": [msgspec.to_builtins(found) | {"calls": len(found.calls)} for found in figures],
            "mismatches": mismatches(calls) if whole else []}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for number, each in enumerate(msgspec.json.decode(sys.stdin.read(), type=list[Case])):
            print(json.dumps(_run(each, Path(scratch) / str(number))), flush=True)
