"""The config of a run from what stands on the command line: Hydra puts it together; its mistakes are told in our words.

    arguments --mistakes.check--> combinations (one, or those of a sweep) --Hydra--> composed --schema.to_object--> checked config
                                                                             |            effect: keys that were set and do nothing
                                                     a file that cannot be: config_files.explain
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from launcher.cli import config_files, effect, mistakes
from launcher.config.schema import FullConfig, missing, register, to_object
from workers.config import ConfigError, RunKind


@dataclass(frozen=True)
class Composed:
    """One checked config; `notes`: keys that were set and do nothing, a line each."""

    config: FullConfig
    notes: tuple[str, ...]


class Composer:
    """Composes configs from the groups in `conf` and, before them, `extra`. Made by `opened`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        names = sorted({path.parent.name for folder in folders for path in folder.glob("*/*.yaml")})
        self.groups = {name: sorted({path.stem for folder in folders for path in folder.glob(f"{name}/*.yaml")}) for name in names}

    def combinations(self, arguments: Sequence[str], sweep: bool) -> list[tuple[str, ...]]:
        """What each run is composed of. Raises `ConfigError`."""
        checked = mistakes.check(arguments, self.groups, sweep)
        if not sweep:
            return [tuple(checked)]
        loader = GlobalHydra.instance().config_loader()
        checked = [_as_texts(argument) for argument in checked]
        overrides = [one for one in OverridesParser.create(config_loader=loader).parse_overrides(checked) if not one.is_hydra_override()]
        return [tuple(one) for one in BasicSweeper.split_arguments(overrides, None)[0]]

    def sweep_folder(self, arguments: Sequence[str]) -> Path:
        """Where the runs of a sweep are made."""
        own = [argument for argument in arguments if argument.startswith("hydra.")]
        try:
            return Path(compose("config", overrides=own, return_hydra_config=True).hydra.sweep.dir).expanduser().absolute()
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"{' '.join(own)}: refers to what there is not. Give the path of a folder") from error

    def composed(self, arguments: Sequence[str]) -> DictConfig:
        """Composed and not yet checked. Raises `ConfigError`."""
        try:
            return compose("config", overrides=list(arguments))
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
            raise ConfigError(config_files.explain(error, arguments, self.folders, self.groups)) from error

    def check(self, arguments: Sequence[str]) -> Composed:
        """Compose and check. Raises `ConfigError`, `RunFolderError`."""
        from launcher.launch.evaluation import complete

        composed = self.composed(arguments)
        if composed.run.kind is RunKind.evaluation:
            complete(composed, list(arguments))
        config = to_object(composed)
        config.plan()
        given = effect.given(arguments)
        notes = mistakes.overruled(arguments) + effect.judge(config, given) + effect.judge_files(self, arguments, config, given)
        return Composed(config, tuple(dict.fromkeys(notes)))


def _as_texts(argument: str) -> str:
    """A sweep over checkpoints, each as it was written: 2.120 is no number."""
    key, sign, values = argument.partition("=")
    return argument if key != "evaluation.checkpoint" else key + sign + re.sub(r"(?<![\w.'\"])\d+\.\d+(?![\w.'\"])", r"'\g<0>'", values)


@contextmanager
def opened(conf: Path, extra: Path | None = None) -> Iterator[Composer]:
    """Hydra, ready to compose from `conf` and from files of `extra` before them. Raises `ConfigError`."""
    register()
    if extra is not None and not extra.is_dir():
        raise ConfigError(f"--config-dir {extra}: {'is a file' if extra.exists() else 'there is no such folder'}. Give the folder that holds "
                          "cluster/, data/ or experiment/ with your own files")
    if extra is not None:
        _check_folder(extra, conf)
    with initialize_config_dir(str(conf), version_base="1.3"):
        if extra is not None:
            path = create_config_search_path(str(conf))
            path.prepend("command-line", f"file://{extra.absolute()}")
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2("headway", path)
        yield Composer([folder for folder in (extra, conf) if folder is not None])


def _check_folder(extra: Path, conf: Path) -> None:
    """Raise `ConfigError` for a folder of the user's own in which no file could be found."""
    groups = {path.parent.name for path in conf.glob("*/*.yaml")}
    if extra.absolute().name in groups and not any((extra / group).is_dir() for group in groups):
        raise ConfigError(f"--config-dir {extra}: is the folder of a group. Give the one above it: --config-dir {extra.absolute().parent}")
    for path in extra.glob("*/*.yml"):
        if path.parent.name in groups:
            raise ConfigError(f"{path}: must end in .yaml to be found. Rename it")


def show(composer: Composer, arguments: Sequence[str], options: argparse.Namespace) -> None:
    """Print the composed config, or how it is put together, as Hydra does. Raises `ConfigError`."""
    (checked,) = composer.combinations(arguments, False)
    composer.composed(checked)
    shower = GlobalHydra.instance().hydra
    assert shower is not None
    try:
        if options.cfg:
            shower.show_cfg("config", list(checked), options.cfg, options.package, options.resolve)
        else:
            shower.show_info(options.info, "config", list(checked))
    except OmegaConfBaseException as error:
        raise missing(error) from error


def hydra_itself(arguments: Sequence[str], conf: Path) -> None:
    """Let Hydra answer by itself: --shell-completion."""
    register()
    sys.argv[1:] = arguments
    hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(lambda _: None)()
