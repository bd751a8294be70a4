"""The whole state of the coordinator as bytes, part by part, and back. Nothing is left out but what a journal does not keep (contents.py), so the
digests of these bytes say whether two states are the same.

Objects of the coordinator's own classes are written once, and named by number where they are met again: parts know each other. What lies outside
(config, prompts) is named. Read back, only classes of the coordinator, its messages and config are made, and no code of theirs is run but checks
of values.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from workers.coordinator.core import Coordinator
from workers.coordinator.groups.heldout_evaluation import Evaluation
from workers.coordinator.recording.contents import CONTENTS, checksum, stand_in
from workers.messages.arrays import Bool, Float32, Int32, TypedArray, Uint8
from workers.messages.parts import Group, Partial

LIST, TUPLE, DICT, SET, FROZENSET, DEQUE, COUNTER, ENUM, OBJECT, AGAIN, OUTSIDE, FACTS, CONTENT, NUMBER, KEPT = range(15)
DIGEST_BYTES = 8
LEAVES = {type(None), bool, int, float, str, bytes}
HOMES = ("workers.coordinator.", "workers.messages.", "workers.config")
ARRAYS = {kind.__name__: kind for kind in (Int32, Float32, Uint8, Bool)}


class StateError(ValueError):
    """A state that cannot be written, or read back. Its text names the class or value."""


def outside_of(core: Coordinator) -> dict[str, Any]:
    """What a state refers to and does not hold."""
    found = {"config": core.config, "prompts": core.office.prompts, "heldout": core.office.heldout}
    return found if core.supervision is None else found | {"examples": core.supervision.examples}


def freeze(core: Coordinator) -> dict[str, bytes]:
    """Every part of the state as bytes, by its name. Raises `StateError`."""
    freezer = _Freezer({id(value): name for name, value in outside_of(core).items()}, with_digests=core.supervision is None)
    return {name: msgspec.msgpack.encode(freezer.frozen(value)) for name, value in vars(core).items()}


def digests(frozen: Mapping[str, bytes]) -> dict[str, bytes]:
    """The digest of every part."""
    return {name: blake3(content).digest(DIGEST_BYTES) for name, content in frozen.items()}


def thaw(core: Coordinator, frozen: Mapping[str, bytes]) -> None:
    """Put `core`, which was just made with the same config and epoch, into a state. What that does not name stays as it is. Raises `StateError`."""
    thawer = _Thawer(outside_of(core))
    try:
        for name, content in frozen.items():
            vars(core)[name] = thawer.thawed(msgspec.msgpack.decode(content, strict=False), vars(core).get(name))
    except (msgspec.MsgspecError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise StateError(f"a recorded state that this code cannot take up: {error!r}") from error


class _Freezer:
    """`with_digests`: False where contents are those of the data set, of which the journal knows the sizes alone."""

    def __init__(self, outside: dict[int, str], with_digests: bool) -> None:
        self._outside, self._with_digests = outside, with_digests
        self._numbers: dict[int, int] = {}

    def frozen(self, value: Any) -> Any:
        kind = type(value)
        if kind in LEAVES:
            return value
        if id(value) in self._outside:
            return [OUTSIDE, self._outside[id(value)]]
        method = FREEZERS.get(kind)
        return self._other(value) if method is None else method(self, value)

    def many(self, values: Any) -> list:
        return [value if type(value) in LEAVES else self.frozen(value) for value in values]

    def pairs(self, value: dict) -> list:
        return [part for pair in value.items() for part in self.many(pair)]

    def ordered(self, value: Any) -> list:
        return sorted(self.many(value), key=repr)

    def _other(self, value: Any) -> list:
        if isinstance(value, TypedArray):
            return [FACTS, type(value).__name__, np.asarray(value).tobytes()]
        if isinstance(value, np.generic):
            return [NUMBER, value.item()]
        kind = type(value)
        if kind is FunctionType:  # holds no state: what stands there in a new state does the same
            return [KEPT]
        if not kind.__module__.startswith(HOMES):
            raise StateError(f"{kind.__module__}.{kind.__qualname__} in the coordinator's state: is not recorded")
        name = f"{kind.__module__}:{kind.__qualname__}"
        if isinstance(value, enum.Enum):
            return [ENUM, name, value.value]
        if _is_shared(kind):
            if (number := self._numbers.get(id(value))) is not None:
                return [AGAIN, number]
            self._numbers[id(value)] = len(self._numbers)
        return [OBJECT, name, self._fields(kind, value)]

    def _fields(self, kind: type, value: Any) -> dict[str, Any]:
        contents = CONTENTS.get(kind, ())
        fields = {name: self._content(name, part) if name in contents and part is not None else part if type(part) in LEAVES else self.frozen(part)
                  for name, part in _attributes(value).items()}
        if kind is Group:
            fields |= {"first_text": "", "answers": [LIST, *[""] * len(value.answers)]}
        elif kind is Evaluation:
            samples = {index: (scores, [""] * len(answers)) for index, (scores, answers) in value.samples.items()}
            fields |= {"example": "", "texts": [DICT], "samples": self.frozen(samples)}
        return fields

    def _content(self, name: str, array: TypedArray) -> list:
        return [CONTENT, type(array).__name__, array.size, checksum(array) if self._with_digests and name != "prompt" else 0]


FREEZERS: dict[type, Callable[[_Freezer, Any], list]] = {
    list: lambda freezer, value: [LIST, *freezer.many(value)],
    tuple: lambda freezer, value: [TUPLE, *freezer.many(value)],
    dict: lambda freezer, value: [DICT, *freezer.pairs(value)],
    set: lambda freezer, value: [SET, *freezer.ordered(value)],
    frozenset: lambda freezer, value: [FROZENSET, *freezer.ordered(value)],
    deque: lambda freezer, value: [DEQUE, value.maxlen, *freezer.many(value)],
    Counter: lambda freezer, value: [COUNTER, *freezer.pairs(value)],
}


def _is_shared(kind: type) -> bool:
    """Whether it matters which object of a class it is. Messages are values, but for those that are large."""
    return kind in (Group, Partial) or not issubclass(kind, msgspec.Struct | tuple)


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    return value._asdict() if isinstance(value, tuple) else vars(value)  # type: ignore[attr-defined]


class _Thawer:
    def __init__(self, outside: dict[str, Any]) -> None:
        self._outside = outside
        self._objects: list[Any] = []

    def thawed(self, plain: Any, like: Any = None) -> Any:
        """`like`: what stands in that place of a new state: its attributes that are not named are kept."""
        if type(plain) is not list:
            return plain
        code, *rest = plain
        match code:
            case 0 | 1 | 3 | 4:
                return (list, tuple, None, set, frozenset)[code](map(self.thawed, rest))  # type: ignore[misc]
            case 2 | 6:
                values = [self.thawed(part) for part in rest]
                pairs = dict(zip(values[::2], values[1::2], strict=True))
                return Counter(pairs) if code == COUNTER else pairs
            case 5:
                return deque(map(self.thawed, rest[1:]), rest[0])
            case 7:
                return _enumeration(rest[0])(rest[1])
            case 8:
                return self._object(_class(rest[0]), rest[1], like)
            case 9:
                return self._objects[rest[0]]
            case 10:
                return self._outside[rest[0]]
            case 11:
                kind = ARRAYS[rest[0]]
                return np.frombuffer(rest[1], kind.wire_dtype).view(kind)
            case 12:
                return stand_in(ARRAYS[rest[0]], rest[1], rest[2])
            case 13:
                return rest[0]
            case 14:
                return like
        raise StateError(f"a recorded state with {code!r:.50} in it")

    def _object(self, kind: type, fields: dict[str, Any], like: Any) -> Any:
        if issubclass(kind, enum.Enum | type):
            raise StateError(f"a recorded state with an object of {kind.__qualname__}")
        if _is_shared(kind):
            place = len(self._objects)
            self._objects.append(None)
            if not issubclass(kind, msgspec.Struct):
                made = self._objects[place] = like if type(like) is kind else object.__new__(kind)
                for name, part in fields.items():
                    vars(made)[name] = self.thawed(part, vars(made).get(name))
                return made
            self._objects[place] = kind(**{name: self.thawed(part) for name, part in fields.items()})
            return self._objects[place]
        return kind(**{name: self.thawed(part) for name, part in fields.items()})


def _enumeration(name: str) -> type[enum.Enum]:
    found = _class(name)
    if not issubclass(found, enum.Enum):
        raise StateError(f"a recorded state with a value of {name!r:.100}, which is no enumeration")
    return found


def _class(name: str) -> type:
    module, _, qualified = name.partition(":")
    found = getattr(sys.modules.get(module), qualified, None) if module.startswith(HOMES) else None
    if not isinstance(found, type) or not (dataclasses.is_dataclass(found) or found.__module__ == module):
        raise StateError(f"a recorded state with an object of {name!r:.100}, which this code does not know")
    return found
