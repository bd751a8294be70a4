"""What runs inside the sandbox in calls: the untrusted program that answers them (`answer`), and the judge of an asserts test (`judge`).

Its source is sent there as text (sources.py): it imports the standard library alone. `receive` gives the next request, or None at the end,
`send` takes a reply. To and from a program:

    b""                                       -> ["loaded"] | ["error", name of an exception]
    ["call", [arguments, keyword arguments]]  -> ["value", result] | ["error", name of an exception]

and to and from the judge, which calls the program through whoever reads its replies, and never sees more of it than data:

    b"" | the program's reply                 -> ["call", [arguments, keyword arguments]] | ["passed"] | ["failed", why] | ["broken", why]

Arguments and results are JSON. What JSON has is itself; the rest is an object with one key that names the type:

    {"int": "0x1f..."} beyond 64 bits   {"tuple" | "set" | "frozenset": [...]}   {"dict": [[key, value], ...]}   {"bytes": "0a"}   {"complex": [1, 2]}
"""

import builtins
import json
import numbers
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

Receive = Callable[[], bytes | None]
Send = Callable[[bytes], None]
Prepare = Callable[[dict[str, Any]], None]

_SMALL = 1 << 63


def answer(sources: list[str], function: str, prepare: Prepare, receive: Receive, send: Send) -> None:
    """Run `sources` in one module, that `prepare` fills first, then call its `Solution().function`, or `function`, for each request."""
    receive()
    try:
        target = _load(sources, function, prepare)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything, SystemExit too
        send(_message("error", type(error).__name__))
        return
    send(_message("loaded"))
    while (request := receive()) is not None:
        send(_call(target, request))


def _load(sources: list[str], function: str, prepare: Prepare) -> Callable[..., Any]:
    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # dataclasses look their module up there
    prepare(module.__dict__)
    module.__dict__.pop(function, None)  # a library's `add` is no answer
    for source in sources:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
    solution = getattr(module, "Solution", None)
    owner = solution() if solution is not None and hasattr(solution, function) else module
    return getattr(owner, function)  # type: ignore[no-any-return]


def _call(target: Callable[..., Any], request: bytes) -> bytes:
    try:
        arguments, keywords = decode(json.loads(request)[1])
        return _message("value", encode(target(*arguments, **keywords)))
    except BaseException as error:  # noqa: BLE001 - a program may raise anything, SystemExit too
        return _message("error", type(error).__name__)


def judge(prompt: str, test: str, entry_point: str, receive: Receive, send: Send) -> None:
    """Run `check` of the source `test`, with the program's function as a proxy. `prompt` is the code that the test may refer to."""
    receive()
    allows_nan = "nan" in test.lower()

    def candidate(*arguments: Any, **keywords: Any) -> Any:
        try:
            call = _message("call", encode((arguments, keywords)))
        except TypeError as error:
            broken.append(f"it calls {entry_point} with arguments that are not data: {error}"[:200])
            raise
        send(call)
        return _result(receive(), allows_nan)

    broken: list[str] = []
    namespace: dict[str, Any] = {"__name__": "test"}
    try:
        for source in (prompt, test):
            exec(compile(source, "test.py", "exec"), namespace)
        check = namespace["check"]
    except BaseException as error:  # noqa: BLE001 - a data set's test may hold anything; it is reported as broken
        send(_message("broken", f"{type(error).__name__}: {error}"[:200]))
        return
    namespace[entry_point] = candidate
    try:
        check(candidate)
    except BaseException as error:  # noqa: BLE001 - whatever check raises, the program has failed it
        send(_message("broken", broken[0]) if broken else _message("failed", f"{type(error).__name__}: {error}"[:200]))
    else:
        send(_message("passed"))


class NotANumber(Exception):
    """What no test waits for."""


def _result(reply: bytes | None, allows_nan: bool) -> Any:
    """What the program returned, or its exception of a built-in type raised here.

    Not a number is an error, unless the test knows of such: `if abs(result - 5) > 1e-6: raise AssertionError` would take it for 5.
    Any other exception is a RuntimeError; so are those that end loops, by which a program would end the loop over its tests.
    """
    def constant(name: str) -> float:
        if name == "NaN" and not allows_nan:
            raise NotANumber("it is not a number")
        return float(name)

    kind, *rest = json.loads(reply or b'["error", "EOFError"]', parse_constant=constant)
    if kind == "value":
        return decode(*rest)
    _raise(str(rest[0]))


def _raise(name: str) -> NoReturn:
    kind = getattr(builtins, name, None)
    ends_loops = kind in (StopIteration, StopAsyncIteration)
    raise kind("in the program") if isinstance(kind, type) and issubclass(kind, Exception) and not ends_loops else RuntimeError(name)


def _message(*parts: Any) -> bytes:
    return json.dumps(parts).encode()


def encode(value: Any) -> Any:
    """`value` as what JSON has. Raises `TypeError` if it is not made of numbers, text, bytes, lists, tuples, sets and dicts."""
    if value is None or isinstance(value, (str, bool, float)):
        return value
    if isinstance(value, numbers.Number):
        return _encode_number(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    raise TypeError(f"a value of type {type(value).__name__} is not data")


def _encode_number(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if -_SMALL <= number < _SMALL else {"int": hex(number)}
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, numbers.Complex):
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"a value of type {type(value).__name__} is not data")


def decode(value: Any) -> Any:
    """The value that `encode` made `value` of. Raises `ValueError`, `TypeError` or `RecursionError` for anything else."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("an encoded value has one key")
    [(key, item)] = value.items()
    if key not in _DECODERS:
        raise ValueError(f"no type is encoded by {key!r}")
    return _DECODERS[key](item)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "frozenset": lambda items: frozenset(map(decode, items)),
    "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
}
