"""How a config value that cannot work is refused: with key, value, rule and remedy."""

from __future__ import annotations

import re

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""A function of the user's own: "package.module:function"."""


class ConfigError(ValueError):
    """A config value that cannot work. Its text names key, value, rule and remedy."""


def require(ok: bool, key: str, value: object, rule: str, remedy: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(f"{key}={value!r}: {rule}. {remedy}")
