"""An evaluation alone, `headway eval=NAME ...`: of which model, and with which settings.

    evaluation.run=RUN --its data, workflow, reward, sandbox, engine--> the composed config <-- again what the command line says of them
    evaluation.checkpoint --> RUN/final_model | RUN/exports/STEP | RUN/checkpoints/EPOCH.STEP, which workers/prepare.py converts
    neither --> model.path

What only training reads is refused on the command line: it would be taken for a setting of the evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from launcher.config.schema import read_full
from workers.config import ConfigError, ModelSource, require
from workers.run.checkpoints import MANIFEST, all_checkpoints
from workers.run.files import read_lines
from workers.run.folder import RunFolder, RunFolderError
from workers.run.retention import scores

OF_THE_RUN = ("data", "workflow", "reward", "sandbox", "engine")
"""Parts of the config that are those of the evaluated run."""
ONLY_TRAINING = (
    "trainer", "algorithm", "staleness", "weights", "checkpoint", "selftest", "cluster.train", "cluster.reward", "run.num_steps",
    "run.target_accuracy", "run.stall_minutes", "rollout.concurrency", "rollout.max_idle_minutes", "rollout.keep", "rollout.keep_mb", "alarms",
    "evaluation.enabled", "evaluation.every_steps", "allocation.inference_fraction", "allocation.min_replicas", "workflow.group_size",
    "workflow.keep", "workflow.max_rejected", "reward.parts", "reward.overlong_penalty", "reward.overlong_buffer")
INSTEAD = {f"workflow.{name}": f"evaluation.{name}" for name in ("temperature", "top_p", "top_k")}


def complete(composed: DictConfig, arguments: Sequence[str]) -> None:
    """Fill in what `evaluation.run` says; `arguments`: the overrides of the command line. Raises `ConfigError`, `RunFolderError`."""
    overrides = OverridesParser.create().parse_overrides(list(arguments))
    for override in overrides:
        _check(override)
        if override.key_or_group == "evaluation.checkpoint":  # as it was written: 2.120 is no number
            composed.evaluation.checkpoint = (override.input_line or "").partition("=")[2].strip().strip("'\"")
    if composed.evaluation.run:
        _take_over(composed, overrides)
    elif not composed.model.path and composed.model.source == ModelSource.folder:
        raise ConfigError("nothing says what is judged. Give evaluation.run=RUN, or model.path=FOLDER of a Hugging Face model")


def _check(override: Override) -> None:
    key = override.key_or_group
    below = [name for name in ONLY_TRAINING if key == name or key.startswith(f"{name}.")]
    require(not below, key, override.value(), "has no meaning with run.kind=evaluation, which trains nothing", "Leave it out")
    require(key not in INSTEAD, key, override.value(), "is for training", f"Give {INSTEAD.get(key)}")


def _take_over(composed: DictConfig, overrides: list[Override]) -> None:
    run = RunFolder(Path(composed.evaluation.run).expanduser().absolute())
    if not run.config_yaml.is_file():
        raise RunFolderError(f"evaluation.run={composed.evaluation.run!r}: not a run folder (no config.yaml). Give the folder of a run, or "
                             "model.path=FOLDER of a Hugging Face model")
    given = {override.key_or_group for override in overrides}
    for key in sorted(given):
        require(key not in ("experiment", "model") and not key.startswith("model."), key, "...", "cannot be given with evaluation.run",
                "That run says which model and which settings; leave one of them out")
    placement, source = composed.reward.placement, read_full(run)
    for part in OF_THE_RUN:
        if part not in given or part == "reward":  # a group that was chosen replaces the run's; those of rewards only say where
            composed[part] = OmegaConf.structured(getattr(source, part))
            for override in overrides:
                if override.key_or_group.startswith(f"{part}."):
                    OmegaConf.update(composed, override.key_or_group, override.value(), force_add=override.is_add() or override.is_force_add())
    composed.reward.placement = placement
    composed.evaluation.run = str(run.path)
    composed.model.source, composed.model.path = ModelSource.folder, str(find_model(run, composed.evaluation.checkpoint))


def find_model(run: RunFolder, checkpoint: str) -> Path:
    """The Hugging Face folder of a run's model, or its checkpoint where there is none. Raises `ConfigError`."""
    if checkpoint == "final":
        if not (run.final_model / "config.json").is_file():
            raise ConfigError(f"evaluation.checkpoint='final': {run.path} has no final_model, as it has not finished, or trainer.export_final=false. "
                              f"{_there_is(run)}")
        return run.final_model
    found = {(epoch, step): folder for (epoch, step), folder in _models(run).items()
             if checkpoint in ("best", "newest", str(step), f"{epoch}.{step}")}
    if checkpoint == "best":
        known = scores(read_lines(run.evaluations))
        found = {version: folder for version, folder in found.items() if version[1] in known}
        chosen = max(found, key=lambda version: (known[version[1]], version), default=None)
    else:
        chosen = max(found, default=None)
    if chosen is None:
        raise ConfigError(f"evaluation.checkpoint={checkpoint!r}: {run.path} has no such model. {_there_is(run)}")
    return found[chosen]


def _models(run: RunFolder) -> dict[tuple[int, int], Path]:
    """The models of a run's steps by epoch and step; one that was exported, or is the last, needs no conversion."""
    found = {(saved.version.epoch, saved.version.step): saved.folder for saved in all_checkpoints(run) if (saved.folder / MANIFEST).is_file()}
    for path in (*(run.exports.iterdir() if run.exports.is_dir() else ()), run.final_model):
        if (path == run.final_model or path.name.isdecimal()) and (path / "manifest.json").is_file():
            version = json.loads((path / "manifest.json").read_bytes())["version"]
            found[version["epoch"], version["step"]] = path
    return found


def _there_is(run: RunFolder) -> str:
    steps = sorted(_models(run))
    if not steps and not run.final_model.is_dir():
        return "It has none: no checkpoint has been written yet"
    named = ", ".join(f"{epoch}.{step}" for epoch, step in steps) or "none"
    return f"There are evaluation.checkpoint={'newest, ' if steps else ''}{named}" + (", final" if run.final_model.is_dir() else "")
