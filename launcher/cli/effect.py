"""Keys that were set and do nothing, as they only count beside other values: every such pair is a line of effect_rules.py.

What decides what is run (which model, which data, which nodes) is refused: somebody wants another run than this would be. The rest is said.
Only what users set counts, on the command line or in a file of theirs: groups bring values for all cases.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.cli import config_files, mistakes, schema_keys
from launcher.cli.effect_rules import RULES, Rule, judged_by_workflow
from launcher.config.schema import FullConfig
from workers.config import ClusterKind, ConfigError, ModelSource

PARTS, PART = "data.parts", re.compile(r"data\.parts\.([^.]+)(?:\.(.+))?")


class Composing(Protocol):
    """What composes configs (composing.Composer)."""

    folders: Sequence[Path]
    groups: dict[str, list[str]]

    def composed(self, arguments: Sequence[str]) -> DictConfig:
        """Composed and not yet checked. Raises `ConfigError`."""
        ...


def given(arguments: Sequence[str]) -> dict[str, object]:
    """The keys that the command line sets, with their values."""
    found: dict[str, object] = {}
    for override in map(mistakes.parse, arguments):
        found |= _flat(override.key_or_group, override.value())
    return found


def _flat(key: str, value: object) -> dict[str, object]:
    """The keys of a section that was given as a whole, or of a part of a mixture."""
    part = PART.fullmatch(key)
    if isinstance(value, dict) and (schema_keys.find(key) is None or key == PARTS or (part and not part[2])):
        return {name: one for inner, below in value.items() for name, one in _flat(f"{key}.{inner}", below).items()}
    return {key: value}


def broken(config: FullConfig, key: str, value: object) -> Rule | None:
    """The rule by which the key does nothing. (What only training reads, an evaluation has refused before: launcher/launch/evaluation.py.)"""
    if (part := PART.fullmatch(key)) and part[2] and (data := config.data.settled_parts().get(part[1])):
        rule = broken(dataclasses.replace(config, data=data), f"data.{part[2]}", value)
        return rule and dataclasses.replace(rule, instead=rule.instead.replace("data=", f"{PARTS}.{part[1]}.kind="))
    if key == "reward.verifier" and value in config.data.verifiers(config.reward.verifier) and not judged_by_workflow(config):
        return None
    return next((rule for rule in RULES if rule.covers(key) and not rule.counts(config)), None)


def judge(config: FullConfig, given: dict[str, object]) -> list[str]:
    """What is to be said of the keys of the command line. Raises `ConfigError` for one that is refused."""
    notes, source = [], config.model.source
    if "model.path" in given and (source is ModelSource.tiny or (source is ModelSource.smollm2 and "model" not in given)):
        raise ConfigError(f"model.path={given['model.path']}: model={source.value} brings a model of its own, and would not start from this folder. "
                          "Add model=hf to start from it, or leave it out")
    for key, value in given.items():
        rule = broken(config, key, value)
        if rule is not None and rule.instead:
            raise ConfigError(f"{key}={schema_keys.written(value)}: would be without effect: {rule.why}. {rule.instead}, or leave it out")
        notes += [f"{key}={schema_keys.written(value)} has no effect: {rule.why}"] if rule is not None else []
    return notes


def judge_files(composer: Composing, arguments: Sequence[str], config: FullConfig, given: dict[str, object]) -> list[str]:
    """The same for what files set, unless something else that was chosen has taken its effect. Raises `ConfigError`."""
    notes, alone = [], {}
    for file in config_files.chosen(arguments, composer.folders, composer.groups):
        for setting in file.settings():
            if setting.key.startswith("cluster.") and config.cluster.kind is ClusterKind.slurm:  # a site is described for all roles
                continue
            known = schema_keys.find(setting.key)
            standard = known is not None and schema_keys.written(setting.value) == known.shown
            rule = None if standard or setting.key in given or "${" in str(setting.value) else broken(config, setting.key, setting.value)
            if rule is None:
                continue
            if file.path not in alone:
                alone[file.path] = _alone(composer, file)
            if (by_itself := alone[file.path]) is None or broken(by_itself, setting.key, setting.value) is None:
                continue
            if rule.instead:
                raise ConfigError(f"{setting.said}: would be without effect: {rule.why}. {rule.instead}, or leave it out")
            notes.append(f"{setting.said} has no effect: {rule.why}")
    return notes


def _alone(composer: Composing, file: config_files.ConfigFile) -> FullConfig | None:
    """What a file makes of the defaults by itself; None where it needs other choices."""
    try:
        found = OmegaConf.to_object(composer.composed([f"{file.group}={file.option}"]))
    except (ConfigError, OmegaConfBaseException):
        return None
    assert isinstance(found, FullConfig)
    return found
