"""Which transport a version is fetched by first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.messages.types import Announcement, Version
from workers.rollout.weights.ways import DISK, LONGEST, ZMQ, Ways

BOTH = Announcement(Version(1, 1), "/weights", "digest", ["tcp://trainer"])


def test_what_is_offered() -> None:
    ways = Ways()
    assert ways.of(BOTH) == [ZMQ, DISK]
    assert ways.of(Announcement(Version(1, 1), "/weights", "digest")) == [DISK]
    assert ways.of(Announcement(Version(1, 1), "", "digest", ["tcp://trainer"])) == [ZMQ]
    assert ways.of(Announcement(Version(1, 1), "", "digest")) == []


def firsts(ways: Ways, number: int, streaming: bool) -> str:
    """The transports that the next versions are tried by first: z or d."""
    found = ""
    for _ in range(number):
        ways.begin()
        first = ways.of(BOTH)[0]
        found += first[0]
        if first == ZMQ and not streaming:
            ways.failed(ZMQ)
            first = ways.of(BOTH)[1]
        ways.worked(first)
    return found


def test_a_network_that_lets_nothing_through_costs_its_deadline_ever_more_rarely() -> None:
    assert firsts(Ways(), 1 + 1 + 1 + 3 + 1 + 7 + 1, streaming=False) == "zd" + "zddd" + "zddddddd" + "z"


@given(st.integers(0, 40))
def test_one_that_is_mended_is_found_again(num_bad: int) -> None:
    ways = Ways()
    firsts(ways, num_bad, streaming=False)
    found = firsts(ways, 2**LONGEST + 3, streaming=True)
    assert found.endswith("zzz") and "zd" not in found


def test_where_storage_is_not_offered_there_is_no_choice() -> None:
    ways = Ways()
    ways.failed(ZMQ)
    ways.begin()
    assert ways.of(Announcement(Version(1, 1), "", "digest", ["tcp://trainer"])) == [ZMQ]
