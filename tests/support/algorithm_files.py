"""The files of conf/algorithm as typed configs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from workers.config import AlgorithmConfig

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "algorithm"
FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text()


def algorithm_of(name: str) -> AlgorithmConfig:
    """What `algorithm=NAME` gives."""
    return msgspec.convert(yaml.safe_load(text_of(name)), AlgorithmConfig, strict=True)
