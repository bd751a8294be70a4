"""Which server gets which group, and when a server is started again."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from workers.messages.parts import Version
from workers.rollout.engines.group_routing import Lengths, Request, Routing
from workers.rollout.engines.restarts import LONGEST_S, Restarts

OLD, NEW = Version(1, 4), Version(1, 5)
SIZE = 4


def key(number: int) -> tuple[str, int]:
    return f"g{number}", 0


def test_the_server_with_the_fewest_tokens_gets_the_next_group_and_keeps_it() -> None:
    routing = Routing(2, capacity=100)
    assert routing.place(key(1), OLD, [OLD, OLD]) == 0
    long = routing.begin(key(1), 50, 1000)
    for number in range(2, 5):
        assert routing.place(key(number), OLD, [OLD, OLD]) == 1, "many short ones are less than a long one"
        routing.begin(key(number), 50, 100)
    assert routing.place(key(1), OLD, [OLD, OLD]) == 0, "its other samples go where its prompt is"
    assert routing.loads[0].total == 1050 and routing.loads[1].total == 450 and routing.tokens == 1500
    routing.end(long)
    assert routing.loads[0].total == 0 and routing.place(key(9), OLD, [OLD, OLD]) == 0


def test_a_prompt_counts_once_for_all_samples_of_its_group() -> None:
    routing = Routing(1, capacity=100)
    routing.place(key(1), OLD, [OLD])
    requests = [routing.begin(key(1), 1000, 10) for _ in range(3)]
    assert routing.tokens == 1030
    for request in requests:
        routing.end(request)
    assert routing.tokens == 0


def test_only_servers_that_hold_the_version_are_asked() -> None:
    routing = Routing(3, capacity=8)
    assert routing.place(key(1), NEW, [OLD, None, OLD]) is None
    assert routing.place(key(1), NEW, [OLD, None, NEW]) == 2
    routing.begin(key(1), 1, 10)
    assert routing.place(key(2), OLD, [OLD, None, NEW]) == 0


def test_a_group_whose_server_has_ended_goes_to_another_or_waits_for_it() -> None:
    routing = Routing(2, capacity=1)
    assert routing.place(key(1), OLD, [OLD, None]) == 0
    lost = routing.begin(key(1), 1, 10)
    assert routing.place(key(2), OLD, [OLD, OLD]) == 1
    routing.begin(key(2), 1, 10)
    routing.end(lost)
    assert routing.place(key(1), OLD, [None, OLD]) is None, "the other one is full"
    assert routing.place(key(1), OLD, [OLD, OLD]) == 0, "its own is back first"
    assert routing.place(key(2), OLD, [OLD, None]) == 0, "and has no request of the first group"
    routing.forget(key(2))
    assert routing.place(key(2), OLD, [None, None]) is None


@given(st.data())
def test_groups_stay_together_no_server_overflows_and_load_is_shared(data: st.DataObject) -> None:
    num_servers, capacity = data.draw(st.integers(1, 4)), SIZE * data.draw(st.integers(1, 4))
    routing, running = Routing(num_servers, capacity), defaultdict[int, list[Request]](list)
    servers: dict[int, int] = {}
    for number in range(data.draw(st.integers(1, 60))):
        held = [OLD] * num_servers
        if running and data.draw(st.booleans()):
            ended = data.draw(st.sampled_from(sorted(running)))
            for request in running.pop(ended):
                routing.end(request)
            routing.forget(key(ended))
        server = routing.place(key(number), OLD, held)
        assert (server is None) == all(load.num_samples >= capacity for load in routing.loads), "whoever has room works"
        if server is None:
            continue
        assert routing.loads[server].total == min(load.total for load in routing.loads if load.num_samples < capacity)
        servers[number] = server
        for _ in range(data.draw(st.integers(1, SIZE))):
            assert routing.place(key(number), OLD, held) == server
            running[number].append(routing.begin(key(number), 7, data.draw(st.integers(1, 500))))
    for number, requests in running.items():
        assert {request.server for request in requests} == {servers[number]}
    for server, load in enumerate(routing.loads):
        mine = [request for requests in running.values() for request in requests if request.server == server]
        assert load.num_samples == len(mine) < capacity + SIZE
        assert load.total == sum(request.tokens for request in mine) + 7 * len({request.key for request in mine})


def test_the_expected_length_is_the_mean_of_what_has_ended_later_ones_more() -> None:
    lengths = Lengths(1000)
    assert lengths.expected(0) == 1000
    lengths.add(10)
    lengths.add(30)
    assert lengths.expected(0) == 20 and lengths.expected(50) == 51
    for _ in range(500):
        lengths.add(100)
    assert 95 < lengths.expected(0) <= 100


def test_restarts_are_counted_within_their_time_and_wait_longer_each_time() -> None:
    restarts = Restarts(3, 100.0)
    assert [restarts.next(now) for now in (0.0, 1.0, 2.0, 3.0)] == [1.0, 2.0, 4.0, None]
    assert restarts.next(100.5) == 4.0, "the first one does not count any more"
    assert Restarts(0, 100.0).next(0.0) is None
    many = Restarts(20, 1e9)
    assert max(many.next(0.0) or 0.0 for _ in range(20)) == LONGEST_S
