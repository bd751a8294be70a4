"""How a run's config differs from what `headway run.kind=KIND` composes without anything else. Imports Hydra only when asked."""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

from launcher.report.record import flat
from launcher.report.table import OWN_KEYS
from launcher.share import CONF

NOTHING = "not there"


@dataclass(frozen=True)
class Change:
    """A key whose value is not the default's; values as text."""

    key: str
    default: str
    here: str


class DefaultsError(RuntimeError):
    """The defaults cannot be composed; says why."""


def defaults(kind: str) -> dict[str, object]:
    """The composed config of that `run.kind` without any other choice, flat. Raises `DefaultsError`."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from launcher.config.schema import register

    register()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            composed = compose("config", overrides=[f"run.kind={kind}"] if kind else [])
        return flat(msgspec.to_builtins(OmegaConf.to_container(composed)))
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise DefaultsError(f"{CONF}: the defaults cannot be composed ({str(error).splitlines()[0]})") from error


def changes(config: dict[str, object], standard: dict[str, object]) -> list[Change]:
    """What is different in `config`, by key; keys that only the defaults have are those of the launcher alone, or newer than the run."""
    return [Change(key, _text(standard[key]) if key in standard else NOTHING, _text(value))
            for key, value in config.items() if key not in OWN_KEYS and (key not in standard or standard[key] != value)]


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
