"""The `code` verifiers: the program in a completion against unit tests, run in the sandbox.

    completion -> program (extraction.py)                      reference -> tests (tests.py)
        stdio    for each test   a fresh process: input -> what it prints                     compared here
        call     one process     arguments -> result, arguments -> result, ...                compared here
        asserts  two processes   the data set's check -- arguments -> the program             the check's verdict
                                              ^------ result --------+

No program sees more than inputs: what its tests expect is never in its process, and what it prints, returns or raises is data that others judge. So
it cannot pass by leaving early, by printing "passed", or by an `__eq__` of its own. Tests end at the first that fails (`score_partial` counts them).

Failing is score 0, running out of time or memory included. All tests together have `TIME_SHARE` of `reward.timeout_s`; what is left then has failed,
before the pool would kill this process and call it a failure of the machine. Raises `ValueError` for a malformed reference, `SandboxError` where
the machine fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from itertools import takewhile

from workers.reward.code import sources
from workers.reward.code.compare import same_output, same_value
from workers.reward.code.extraction import continued, extract
from workers.reward.code.inside import encode
from workers.reward.code.sandboxes import Conversation, Seats, check_node, seats
from workers.reward.code.tests import Asserts, Call, CallTest, Reference, Stdio, check_reference, parse
from workers.sandbox.sandbox import Limits, SandboxError

__all__ = ["check_node", "check_reference", "score", "score_partial"]

TIME_SHARE = 0.8
LOADED, PASSED, CALL, BROKEN = b'["loaded"]', b'["passed"]', b'["call", ', b'["broken", '


def score(prompt: str, completion: str, reference: str) -> float:
    """1 if the program in `completion` passes all tests of `reference`, else 0."""
    tests = parse(reference)
    with closing(_Trial(tests, completion).verdicts()) as verdicts:
        return float(sum(takewhile(bool, verdicts)) == _num_tests(tests))


def score_partial(prompt: str, completion: str, reference: str) -> float:
    """The share of the tests of `reference` that the program in `completion` passes. The asserts form counts as one test."""
    tests = parse(reference)
    with closing(_Trial(tests, completion).verdicts()) as verdicts:
        return sum(verdicts) / _num_tests(tests)


def _num_tests(tests: Reference) -> int:
    return 1 if isinstance(tests, Asserts) else len(tests.tests)


class _Trial:
    """One program and its tests."""

    def __init__(self, tests: Reference, completion: str) -> None:
        self._tests, self._completion = tests, completion
        self._seats: Seats = seats()
        self._seats.program.start()  # before the clock: the time that it takes is not the program's
        if isinstance(tests, Asserts):
            self._seats.judge.start()
        limits = self._seats.limits
        self._test_s, self._test_cpu_s = tests.timeout_s or limits.wall_s, tests.timeout_s or limits.cpu_s
        self._deadline = time.monotonic() + TIME_SHARE * self._seats.timeout_s

    def verdicts(self) -> Generator[bool, None, None]:
        """Whether the tests are passed, in their order; those that are missing at the end are not."""
        match self._tests:
            case Stdio():
                return self._stdio(self._tests)
            case Call():
                return self._call(self._tests)
            case Asserts():
                return self._asserts(self._tests)

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _limits(self, wall_s: float, cpu_s: float, num_expected: int) -> Limits:
        """For a program that is expected to write `num_expected` characters."""
        limits = self._seats.limits
        return replace(limits, wall_s=wall_s, cpu_s=cpu_s, output_bytes=max(limits.output_bytes, 8 * num_expected))

    def _stdio(self, tests: Stdio) -> Generator[bool, None, None]:
        source = sources.main_program(extract(self._completion))
        for test in tests.tests:
            if (left := self._left_s()) <= 0:
                return
            limits = self._limits(min(self._test_s, left), self._test_cpu_s, len(test.output))
            outcome = self._seats.program.run(source, test.input.encode("utf-8", "replace"), limits)
            yield outcome.status == "ok" and same_output(outcome.stdout.decode("utf-8", "replace"), test.output)

    def _call(self, tests: Call) -> Generator[bool, None, None]:
        source = sources.answering([extract(self._completion, tests.function)], tests.function, libraries=True)
        num_expected = sum(len(json.dumps(test.expected)) for test in tests.tests)
        rest = list(reversed(tests.tests))
        while rest and (left := self._left_s()) > 0:  # once more where the program has ended in between
            with self._seats.program.converse(source, self._limits(left, left, num_expected), self._test_s) as program:
                if program.ask(b"") != LOADED:
                    return
                reply: bytes | None = LOADED
                while rest and reply is not None:
                    test = rest.pop()
                    reply = program.ask(_arguments(test))
                    yield reply is not None and _is_right(reply, test)

    def _asserts(self, tests: Asserts) -> Generator[bool, None, None]:
        source = sources.answering(continued(tests.prompt, self._completion, tests.entry_point), tests.entry_point, libraries=False)
        limits = self._limits(self._left_s(), self._left_s(), len(tests.test))
        with self._seats.program.converse(source, limits, self._test_s) as program:
            if program.ask(b"") != LOADED:
                return
            if (left := self._left_s()) <= 0:
                return
            limits = self._limits(left, left, len(tests.test))
            with self._seats.judge.converse(sources.judging(tests), limits, left) as judge:
                said = judge.ask(b"")
                if said is None and self._left_s() <= 0:
                    return  # the program has left it too little time
                yield _verdict(said, judge, program)


def _arguments(test: CallTest) -> bytes:
    return json.dumps(["call", encode((test.args, {}))]).encode()


def _is_right(reply: bytes, test: CallTest) -> bool:
    try:
        kind, value = json.loads(reply)
    except (ValueError, TypeError, RecursionError):  # not what inside.py sends: a program that writes to its pipe itself
        return False
    return bool(kind == "value") and same_value(value, test.expected)


def _verdict(said: bytes | None, judge: Conversation, program: Conversation) -> bool:
    """Carry the judge's calls, from what it `said` first, to the program until it has its verdict, or either has ended."""
    if said is None:
        raise SandboxError("the judge of a code reference's test ended before it began. The machine may be out of memory or processes")
    while said is not None and said.startswith(CALL):
        answer = program.ask(said)
        if answer is None:
            return False
        said = judge.ask(answer)
    if said is not None and said.startswith(BROKEN):
        raise ValueError(f"a code reference's test cannot be run: {json.loads(said)[1]}. Correct it, or leave the row out")
    return said == PASSED
