"""Connections that come to nothing are counted, whatever the order in which they come, succeed and end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.transport.arrivals import Arrivals
from workers.transport.tickets import MAX_TICKETS, Tickets

YOUNG_S = 10.0


@given(st.lists(st.tuples(st.sampled_from(["come", "succeed", "fail", "leave", "look", "know"]), st.floats(0, 8), st.randoms()), max_size=60))
def test_never_too_many_and_in_the_end_all_of_them(story: list) -> None:
    """Against a model that knows of which connection a handshake succeeds."""
    arrivals, now, number, refused = Arrivals(YOUNG_S), 0.0, 0, 0
    strangers: dict[int, float] = {}
    peers: list[int] = []
    for what, seconds, random in story:
        now += seconds
        for late in [fd for fd, at in strangers.items() if now - at > YOUNG_S - 1]:  # cut off
            del strangers[late]
            arrivals.ended(late)
            refused += 1
        if what == "come":
            number += 1
            strangers[number] = now
            arrivals.accepted(number, now)
        elif what == "succeed" and strangers:
            fd = random.choice(sorted(strangers))
            del strangers[fd]
            peers.append(fd)
            arrivals.admitted()
        elif what == "fail" and strangers:
            fd = random.choice(sorted(strangers))
            del strangers[fd]
            arrivals.ended(fd)
            refused += 1
        elif what == "leave" and peers:
            arrivals.ended(peers.pop(random.randrange(len(peers))))
        elif what == "know" and peers:
            arrivals.known(peers[-1])
            assert peers[-1] not in arrivals.young(now)
        else:
            assert set(strangers) <= set(arrivals.young(now))
        assert arrivals.num_refused <= refused
    for fd in strangers:
        arrivals.ended(fd)
    assert arrivals.young(now + YOUNG_S + 1) == [] and arrivals.num_refused == refused + len(strangers)


def test_one_with_a_wrong_key_is_counted_at_once_and_once() -> None:
    arrivals = Arrivals(YOUNG_S)
    arrivals.accepted(5, 0.0)
    arrivals.denied()
    assert arrivals.num_refused == 1
    arrivals.ended(5)
    assert arrivals.num_refused == 1


def test_a_ticket_is_used_by_looking_it_up_and_very_many_do_not_pile_up() -> None:
    tickets = Tickets()
    issued = [tickets.issue() for _ in range(MAX_TICKETS + 10)]
    assert len(tickets) == MAX_TICKETS and issued[9][0] not in tickets and issued[10][0] in tickets
    name, secret = issued[-1]
    assert tickets[name] == secret and name not in tickets
