"""How long sources that fail are asked again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.messages.parts import Announcement, Version
from workers.rollout.weights.attempts import DISK, ZMQ, Attempts
from workers.weights.manifest import SourcesFailed, WeightsError

LIMIT_S = 60.0
STREAMED = Announcement(Version(1, 0), "", "0" * 64, ["tcp://a:1"])


@given(st.lists(st.tuples(st.floats(0.1, 50), st.integers(0, 3)), min_size=1, max_size=40))
def test_sources_are_asked_again_until_nothing_has_come_for_the_limit(rounds: list[tuple[float, int]]) -> None:
    tried, now, arrived, since = Attempts(STREAMED.version, LIMIT_S, 0, 0.0), 0.0, 0, 0.0
    for seconds, more in rounds:
        now, arrived = now + seconds, arrived + more
        since = now if more else since
        assert tried.next(STREAMED, DISK) == ZMQ
        tried.failed(ZMQ, SourcesFailed("silent"), arrived, now)
        assert tried.next(STREAMED, ZMQ) is None
        again = tried.once_more()
        assert again == (now - since < LIMIT_S)
        if not again:
            assert "by zmq: silent" in str(tried.error())
            return


def test_what_is_not_the_sources_fault_is_not_tried_again() -> None:
    tried = Attempts(STREAMED.version, LIMIT_S, 0, 0.0)
    tried.failed(ZMQ, WeightsError("no memory"), 10, 1.0)
    assert not tried.once_more() and tried.causes == {ZMQ: "no memory"}
