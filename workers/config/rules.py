"""How a config value that cannot work is refused: with key, value, rule and remedy."""

from __future__ import annotations


class ConfigError(ValueError):
    """A config value that cannot work. Its text names key, value, rule and remedy."""


def require(ok: bool, key: str, value: object, rule: str, remedy: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(f"{key}={value!r}: {rule}. {remedy}")
