"""What a run is prepared from, and what is told of it beforehand: the memory that its parts take, and what it will give.

    config --workers/prepare.py, a process of its own--> run folder: prompts, a model that is made on the spot
    the model's shapes --> memory/ (does it fit?) and prediction/ (how fast?) --> lines of the plan
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import msgspec
from rich.console import Console

from launcher.config.schema import FullConfig, as_yaml
from launcher.jobs.sbatch_script import python_path
from launcher.memory import capacity, fit, micro_batches
from launcher.prediction import forecast, words
from launcher.prediction.assumptions import usual
from workers.config import ConfigError, ModelSource
from workers.model.architecture import Architecture, ModelError, read_architecture
from workers.run.files import write_atomic
from workers.run.folder import RunFolder


def prepare(run: RunFolder, config: FullConfig, only_look: bool = False) -> None:
    """Write the config and have the run folder prepared. Raises `ConfigError` with what the preparation found wrong."""
    write_atomic(run.config, msgspec.json.format(msgspec.json.encode(config.for_workers())))
    write_atomic(run.config_yaml, as_yaml(config))
    flags = [*(["--only-look"] if only_look else []), *([] if config.launch.try_functions else ["--no-trial"])]
    # No pipes: what the user's code has started may hold them open.
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+", errors="replace") as said:
        result = subprocess.run([sys.executable, "-m", "workers.prepare", str(run.path), str(answer.fileno()), *flags], stdin=subprocess.DEVNULL,
                                stderr=said, check=False, pass_fds=[answer.fileno()], env={**os.environ, "PYTHONPATH": python_path()})
        answer.seek(0)
        said.seek(0)
        if result.returncode == 2:
            raise ConfigError(answer.read())
        if result.returncode:
            raise ConfigError(f"the preparation failed with status {result.returncode}:\n{said.read().strip()}")


def model_folder(config: FullConfig, run: RunFolder) -> Path:
    """Where the starting model is, once it is there."""
    return run.model if config.model.source is ModelSource.tiny else Path(config.model.path).expanduser()


def is_there(config: FullConfig, run: RunFolder) -> bool:
    """Whether the shapes of the model can be read."""
    return (model_folder(config, run) / "config.json").is_file()


def architecture_of(config: FullConfig, run: RunFolder | None) -> Architecture:
    """The shapes of a config's model; one that is made on the spot is made in a folder that is gone afterwards. Raises `ConfigError`."""
    with tempfile.TemporaryDirectory(prefix="headway-plan-") as folder:
        if run is None:
            run = RunFolder(Path(folder) / "run")
            if not is_there(config, run) and config.model.source is not ModelSource.folder:
                prepare(RunFolder.create(run.path), config, only_look=True)
        try:
            return read_architecture(model_folder(config, run))
        except ModelError as error:
            raise ConfigError(str(error)) from error


def tell_speed(config: FullConfig, run: RunFolder, cpu_gflops: float, console: Console) -> None:
    """Tell what the config will give; nothing where the model is not there yet. `cpu_gflops`: as tried on this machine; 0: it was not."""
    if config.supervised or config.evaluates or not is_there(config, run):
        return
    architecture, assumed = architecture_of(config, run), usual(config, cpu_gflops)
    for line in words.outcome(config, forecast.of(config, architecture, assumed), config.run.num_steps):
        console.print(f"      {line}", soft_wrap=True)
    source = "what this machine's CPU was seen to compute" if cpu_gflops else "the makers' figures of its devices"
    console.print(f"      (by {source}; what was assumed, and how to say it better: headway plan)", soft_wrap=True)


def tell_memory(config: FullConfig, run: RunFolder, console: Console, changeable: Collection[str] | None = None) -> bool:
    """Tell what each part takes, and whether that could be told: false while the model is not there. Raises `ConfigError` where it cannot fit, with
    what would, if only the keys `changeable` (None: any) are changed."""
    if not is_there(config, run):
        return False
    architecture = architecture_of(config, run)
    capacities = capacity.look(config)
    if config.tokens_chosen and not config.evaluates and micro_batches.lower(config, architecture, capacities):
        console.print(f"      trainer.microbatch_tokens={config.trainer.microbatch_tokens}: so many fit", soft_wrap=True)
    for line in fit.check(config, architecture, capacities, changeable):
        console.print(f"      {line}", soft_wrap=True)
    return True


def in_shared_memory(config: FullConfig, run: RunFolder) -> dict[str, float]:
    """Bytes of weights that will lie in /dev/shm of a node of each role; nothing is known while the model is not there."""
    return fit.in_shared_memory(config, architecture_of(config, run)) if is_there(config, run) else {}
