"""The sources that the `code` verifiers run in the sandbox: modules of ours as text, and one call at the end. Data goes in as literals.

No source of a program holds anything that its tests expect.
"""

from __future__ import annotations

import functools
from pathlib import Path

from workers.reward.code.extraction import helpers
from workers.reward.code.tests import Asserts


def main_program(program: str) -> str:
    """Runs `program` as a main program that reads standard input and prints."""
    return f"{_text('main_program')}\nrun({program!r})\n"


def answering(sources: list[str], function: str, *, libraries: bool) -> str:
    """Runs `sources`, then answers calls of `function`; `libraries` are LiveCodeBench's imports, made beforehand."""
    prepare = "import_libraries" if libraries else "id"
    return f"{_text('main_program')}\n{_text('inside')}\nanswer({sources!r}, {function!r}, {prepare}, __receive__, __reply__)\n"


def judging(tests: Asserts) -> str:
    """Runs the data set's test, which calls the program through its replies."""
    given = f"{helpers(tests.prompt, tests.entry_point)!r}, {tests.test!r}, {tests.entry_point!r}"
    return f"{_text('inside')}\njudge({given}, __receive__, __reply__)\n"


@functools.cache
def _text(module: str) -> str:
    return Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
