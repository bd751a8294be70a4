"""LiveCodeBench's tests as the reference of the `code` verifier, one JSON object (docs/code.md).

Its private tests are JSON, or JSON as a Python string that was pickled, compressed (zlib) and written in base64. Unpickling would run code of
the file's author: here a pickle is read that holds one string and nothing else, by its bytes; any other is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

MAX_BYTES = 256 << 20
"""Of the tests of one problem, decompressed: a small file that would fill the memory is refused."""
_REMEDY = "Decode the private tests beforehand and store them as plain JSON"
_PROTO, _FRAME, _STOP = b"\x80", b"\x95", b"."
_STRINGS = {b"\x8c": 1, b"X": 4, b"\x8d": 8}
"""Opcodes of a UTF-8 string, with the bytes that give its length (pickletools: SHORT_BINUNICODE, BINUNICODE, BINUNICODE8)."""
_MEMO = {b"\x94": 0, b"q": 1, b"r": 4}
"""Opcodes that remember the string, with the bytes of their argument (MEMOIZE, BINPUT, LONG_BINPUT)."""


def code_reference(public: Any, private: Any, metadata: Any) -> dict[str, Any]:
    """`{"kind": "stdio" | "call", ...}` from the columns of a row, each JSON text or what it decodes to. Raises `ValueError`."""
    tests = [*_tests(public, "public_test_cases"), *_tests(private, "private_test_cases")]
    kinds = {test.get("testtype") for test in tests}
    if kinds == {"stdin"}:
        return {"kind": "stdio", "tests": [{"input": _text(test, "input"), "output": _text(test, "output")} for test in tests]}
    if kinds != {"functional"}:
        raise ValueError(f"the tests are of types {sorted(map(str, kinds))}; all must be 'stdin', or all 'functional'")
    about = _json(metadata, "metadata") if isinstance(metadata, str) else metadata
    function = about.get("func_name") if isinstance(about, dict) else None
    if not isinstance(function, str):
        raise ValueError("column 'metadata' has no 'func_name', which functional tests need")
    return {"kind": "call", "function": function, "tests": [
        {"args": [_json(line, "input") for line in _text(test, "input").split("\n") if line.strip()],
         "expected": _json(_text(test, "output"), "output")} for test in tests]}


def _tests(value: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        value = _json(value if not value or value.lstrip()[:1] == "[" else _decoded(value, name), name) if value else []
    if not isinstance(value or [], list) or not all(isinstance(test, dict) for test in value or []):
        raise ValueError(f"column {name!r} must be a list of tests, or JSON of one")
    return value or []


def _decoded(text: str, name: str) -> str:
    """The string in base64, zlib and pickle. Raises `ValueError`."""
    try:
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"column {name!r} is neither JSON nor base64 of zlib ({error}). {_REMEDY}") from None
    if not unpacker.eof:
        raise ValueError(f"column {name!r} is cut off, or has more than {MAX_BYTES >> 20} MiB. {_REMEDY}")
    return pickled_text(pickled)


def pickled_text(pickled: bytes) -> str:
    """The text of a pickle (protocol 1 to 5) that is one string; nothing is run. Raises `ValueError` for any other."""
    position = 2 if pickled[:1] == _PROTO else 0
    position = _after_frame(pickled, position)
    width = _STRINGS.get(pickled[position:position + 1])
    if width is not None:
        start = position + 1 + width
        end = start + int.from_bytes(pickled[position + 1:start], "little")
        rest = _after_frame(pickled, end)
        memo = _MEMO.get(pickled[rest:rest + 1])
        rest = _after_frame(pickled, rest if memo is None else rest + 1 + memo)
        if pickled[rest:] == _STOP:
            return pickled[start:end].decode("utf-8", "surrogatepass")
    raise ValueError(f"the private tests are a pickle of something else than one string, which is not opened: it could run code. {_REMEDY}")


def _after_frame(pickled: bytes, position: int) -> int:
    return position + 9 if pickled[position:position + 1] == _FRAME else position


def _text(test: dict[str, Any], name: str) -> str:
    if not isinstance(test.get(name), str):
        raise ValueError(f"a test has no text in {name!r}; it has {sorted(test)}")
    return test[name]


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)  # exact for integers of any size
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name!r} is not JSON ({error}); it begins with {text[:60]!r}") from None
