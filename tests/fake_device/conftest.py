"""A process that makes fake steps, for all tests of a file: importing what trains takes as long as a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from benchmarks.children import Child
from tests.fake_device.cases import Case

FiguresOf = Callable[[list[Case]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def figures_of() -> Iterator[FiguresOf]:
    """Of each case, which is asked for once: `ranks`: the figures of each; where all of several run, of their first step, and `mismatches`."""
    known: dict[bytes, dict[str, Any]] = {}
    with Child("tests.fake_device.cases") as child:

        def asked(case: Case) -> dict[str, Any]:
            key = msgspec.json.encode(case)
            if key not in known:
                known[key] = child.ask(**msgspec.to_builtins(case))
            return known[key]

        yield lambda cases: [asked(case) for case in cases]
