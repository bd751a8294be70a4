"""What the coordinator does for a message does not depend on the fleet: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks.coordinator_cost import Fleet, main
from tests.support.indexes import check_indexes
from workers.messages.from_worker import LoadRequest, SourcesRequest
from workers.messages.parts import Version

SMALL, LARGE, EACH = 16, 1024, 4
STEPS_AT_MOST = 2.0


def instructions(what: Callable[[], object]) -> int:
    """How many bytecode instructions something takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
    return count


@pytest.fixture(scope="module")
def fleets() -> list[Fleet]:
    return [Fleet(number, EACH) for number in (SMALL, LARGE)]


def beat(fleet: Fleet, peer: bytes) -> None:
    fleet.beat(peer)


def finish(fleet: Fleet, peer: bytes) -> None:
    fleet.finish(peer)


def load(fleet: Fleet, peer: bytes) -> None:
    """A worker asks where to fetch a version from, and for leave to load it; then it holds it."""
    version = Version(1, max(0, fleet.core.training.step))
    fleet.say(peer, SourcesRequest(version, []))
    fleet.say(peer, LoadRequest(version))
    fleet.beat(peer)


@pytest.mark.parametrize("what", [beat, finish, load])
def test_steps_for_a_message_do_not_grow_with_the_fleet(fleets: list[Fleet], what: Callable[[Fleet, bytes], None]) -> None:
    """Of 24 messages the median: a batch may fall among them, which costs what its groups do."""
    counts = []
    for fleet in fleets:
        peers = list(fleet.leases)[:12]
        found = sorted(instructions(lambda fleet=fleet, peer=peer: what(fleet, peer)) for peer in peers * 2)  # type: ignore[misc]
        counts.append(found[len(found) // 2])
        check_indexes(fleet.core)
    assert counts[1] <= STEPS_AT_MOST * counts[0] and counts[0] <= STEPS_AT_MOST * counts[1], counts


def test_steps_that_look_at_every_worker_would_be_seen(fleets: list[Fleet]) -> None:
    small, large = (instructions(lambda fleet=fleet: [worker.slot for worker in fleet.core.registry.workers.values()]) for fleet in fleets)  # type: ignore[misc]
    assert large > STEPS_AT_MOST * small


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--workers", "4", "8", "--rounds", "1", "--messages", "4"])
    assert '"unit": "ms"' in capsys.readouterr().out.splitlines()[-1]
