"""Every key that can be set, read from the dataclasses of the schema: a key's line is the comment behind its field.

    max_new_tokens: int = 16  # [tokens] of one answer        the unit, where the name does not tell it, stands in brackets
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import inspect
import re
import types
import typing
from dataclasses import dataclass

from launcher.config.schema import FullConfig
from workers.config import Dtype, Transport

UNITS = {"_s": "seconds", "_minutes": "minutes", "_hours": "hours", "_mb": "MiB", "_kb": "KiB", "_gb": "GiB"}
ANY = "<name>"
ELSEWHERE = {
    "learning_rate": "trainer.lr", "epochs": "run.num_steps", "num_epochs": "run.num_steps", "max_steps": "run.num_steps", "steps": "run.num_steps",
    "batch_size": "trainer.batch_groups", "gpus": "allocation.num_devices", "num_gpus": "allocation.num_devices", "nodes": "allocation.num_devices",
    "num_nodes": "allocation.num_devices", "beta": "algorithm.kl_weight", "kl_coef": "algorithm.kl_weight", "kl_coeff": "algorithm.kl_weight",
    "num_generations": "workflow.group_size", "n": "workflow.group_size", "output_dir": "run.dir", "max_tokens": "workflow.max_new_tokens",
    "max_length": "engine.context_length", "max_model_len": "engine.context_length", "tensor_parallel_size": "engine.parallel.tp",
    "reward_fn": "reward.verifier", "reward": "reward.verifier", "dataset": "data.path", "model_path": "model.path", "walltime": "cluster.time"}
"""What other programs call some of the keys."""
_FIELD = re.compile(r"    (?P<name>\w+): .*?  # (?:\[(?P<unit>[^]]+)\] )?(?P<line>.+)")


@dataclass(frozen=True)
class Key:
    """One key: `name` in dots (`ANY` stands for names that users give), its type, default, unit ('' for none) and what it is, in a line."""

    name: str
    type: object
    default: object
    unit: str
    line: str

    @property
    def kind(self) -> str:
        """The type in words."""
        return words(self.type)

    @property
    def told(self) -> str:
        """What it is, with its unit."""
        return f"{self.unit} {self.line}".strip()

    @property
    def shown(self) -> str:
        """The default as it would be written."""
        return written(self.default)


def words(kind: object) -> str:
    """A field's type for people."""
    arguments = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(one.value) for one in kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join("null" if one is type(None) else words(one) for one in arguments)
    if typing.get_origin(kind) is list:
        if isinstance(arguments[0], type) and issubclass(arguments[0], enum.Enum):
            return f"list of {', '.join(choice.value for choice in arguments[0])}"
        plain = {int: "whole numbers", float: "numbers"}.get(arguments[0], "texts")
        return f"list of {'sections' if dataclasses.is_dataclass(arguments[0]) else plain}"
    if typing.get_origin(kind) is dict:
        return "NAME: VALUE pairs"
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}.get(typing.cast(type, kind), "section")


def written(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return str(value) if value != "" else "''"


def comments(section: type) -> dict[str, tuple[str, str]]:
    """Unit and line of every field of a dataclass, those of its bases included."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(section.__mro__):
        if dataclasses.is_dataclass(base):
            for match in filter(None, map(_FIELD.fullmatch, inspect.getsource(base).splitlines())):
                unit = match["unit"] or next((unit for suffix, unit in UNITS.items() if match["name"].endswith(suffix)), "")
                found[match["name"]] = unit, match["line"]
    return found


def _keys(section: typing.Any, prefix: str) -> typing.Iterator[Key]:
    """The keys of a section with its defaults, an object of its dataclass."""
    said, hints = comments(type(section)), typing.get_type_hints(type(section))
    for one in dataclasses.fields(section):
        name, kind, default = f"{prefix}{one.name}", hints[one.name], getattr(section, one.name)
        if dataclasses.is_dataclass(default):
            yield from _keys(default, f"{name}.")
            continue
        yield Key(name, kind, default, *said.get(one.name, ("", "")))
        inner = typing.get_args(kind)[-1] if typing.get_origin(kind) in (dict, list) else None
        if isinstance(inner, type) and dataclasses.is_dataclass(inner) and not name.count(ANY):
            yield from _keys(inner(), f"{name}.{ANY}.")


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every key by its name, in the schema's order, with the default that a run has."""
    config = FullConfig()
    # As conf/ says; the schema has what workers hold, where that is settled.
    config.engine.dtype = config.trainer.dtype = Dtype.auto
    config.weights.transport, config.allocation.replica_size, config.trainer.microbatch_tokens = Transport.auto, 0, 0
    return {key.name: key for key in _keys(config, "")}


@functools.cache
def sections() -> frozenset[str]:
    """Every section: 'trainer', 'trainer.parallel', ..."""
    return frozenset(name.rsplit(".", depth)[0] for name in all_keys() for depth in range(1, name.count(".") + 1))


def find(name: str) -> Key | None:
    """The key that `name` sets, also where users name what is below it (cluster.train.sbatch.nice, data.parts.easy.path)."""
    known = all_keys()
    if name in known:
        return known[name]
    parts = name.split(".")
    for depth in range(1, len(parts)):
        above = known.get(".".join(parts[:depth]))
        if above is None or typing.get_origin(above.type) not in (dict, list):
            continue
        below = ".".join([*parts[:depth], ANY, *parts[depth + 1:]])
        inner = typing.get_args(above.type)[-1]
        if dataclasses.is_dataclass(inner):
            return known.get(below)
        return dataclasses.replace(above, name=name, type=inner) if depth == len(parts) - 1 else None
    return None


def named_section(name: str) -> tuple[str, type]:
    """The section with a name that users give in which `name` stands, or which it is, and its dataclass (data.parts.easy of data.parts.easy.path);
    '' where there is none."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        above = all_keys().get(".".join(parts[:depth]))
        if above is not None and typing.get_origin(above.type) is dict and isinstance(inner := typing.get_args(above.type)[-1], type) \
                and dataclasses.is_dataclass(inner):
            return ".".join(parts[:depth + 1]), inner
    return "", object


def is_section(name: str) -> bool:
    """Whether keys stand below `name`."""
    return name in sections() or any(re.fullmatch(re.escape(one).replace(re.escape(ANY), r"[^.]+"), name) for one in sections() if ANY in one)


def nearest(name: str, count: int = 3) -> list[str]:
    """The keys that are most like `name`: those of the same last part in any section first."""
    known = [key for key in all_keys() if ANY not in key]
    last = name.rsplit(".", 1)[-1]
    if same := ELSEWHERE.get(last.lower()):
        return [same]
    order = sorted(known, key=lambda key: -_likeness(name, last, key))
    best = _likeness(name, last, order[0])
    return [key for key in order[:count] if _likeness(name, last, key) >= max(0.6, best - 0.15)]


def _likeness(name: str, last: str, key: str) -> float:
    def ratio(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()

    own = key.rsplit(".", 1)[-1]
    contained = 0.85 if min(len(last), len(own)) > 2 and (last in own.split("_") or own in last.split("_")) else 0.0
    return 0.8 * max(ratio(last, own), contained) + 0.2 * ratio(name, key)
