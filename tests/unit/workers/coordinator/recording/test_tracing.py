"""A trace has every lease once, with its parts within, on lanes without overlap, and the trainer's own durations; of any history of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.small_run import World, make_config
from tests.unit.workers.coordinator.recording.test_replay import Kept
from tests.unit.workers.coordinator.test_restarts import EVENTS, Play
from workers.config import Bound
from workers.coordinator.recording.inputs import Arrived
from workers.coordinator.recording.replaying import Replay
from workers.coordinator.recording.tracing import LEASES, Span, Tracer, lanes, trace_events
from workers.messages.from_coordinator import Leases
from workers.messages.from_worker import GroupFinished

TIMES = st.floats(0, 1000)


def of(begin: float, end: float) -> Span:
    return Span("w", LEASES, "x", begin, end, {})


@given(st.lists(st.tuples(TIMES, TIMES).map(sorted)))
def test_as_few_lanes_as_run_at_once(pairs: list[list[float]]) -> None:
    spans = sorted((of(*pair) for pair in pairs), key=lambda span: span.begin)
    found = lanes(spans)
    assert sorted(id(span) for lane in found for span in lane) == sorted(map(id, spans))
    assert all(first.end <= second.begin for lane in found for first, second in pairwise(lane))
    assert len(found) <= max((sum(other.begin <= span.begin <= other.end for other in spans) for span in spans), default=0)


@given(events=EVENTS, num_shares=st.integers(1, 2))
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
def test_any_history_makes_a_whole_trace(events: list[tuple[str, int]], num_shares: int) -> None:
    kept = Kept()
    play = Play(World(make_config(1, 2, Bound.admission, 3, 1), num_shares=num_shares, notes=kept))
    for name, number in events:
        play.happen(name, number)
    if play.world.ended is None:
        play.world.go_to_the_end()
    tracer, leased, finished, now = Tracer(), list[tuple[str, int]](), 0, 0.0
    replay = Replay("code")
    for part in kept.parts:
        for step in replay.play(part):
            tracer.look(step)
            now = step.wall
            finished += isinstance(step.given, Arrived) and isinstance(step.given.message, GroupFinished)
            for _, message in step.outcome.sent if step.outcome is not None else ():
                leased += [(lease.group_id, lease.attempt) for lease in message.leases] if isinstance(message, Leases) else []
    tracer.end(now)
    spans = [span for span in tracer.spans if span.kind == LEASES]
    assert Counter((span.name.split()[1], span.args["attempt"]) for span in spans) == Counter(leased), "every lease once"
    assert 0 < sum(span.args["ended"] == "finished" for span in spans) <= finished
    for span in tracer.spans:
        assert span.begin <= span.end <= now and all(span.begin <= part.begin <= part.end <= span.end for part in span.parts)
    drawn = defaultdict(list)
    for event in trace_events(tracer.spans, tracer.counts):
        if event["ph"] == "X" and event["name"] not in ("generation", "rewards"):
            drawn[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, drawn.values())) == len(tracer.spans)
    assert all(0 <= first[0] <= first[1] <= second[0] for lane in drawn.values() for first, second in pairwise(lane))
