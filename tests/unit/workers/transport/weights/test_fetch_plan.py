"""Planning a fetch, against simulated sources that die, fall silent, lack chunks and send wrong ones."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.transport.weights.fetch_plan import MAX_CORRUPT, FetchPlan, Request
from workers.weights.manifest import Chunk

PATIENCE_S = 10.0


def make_chunks(sources: list[int]) -> list[Chunk]:
    """A chunk for each entry, which names its origin."""
    return [Chunk(number, "shard", number, number * 10, 10, "digest", source) for number, source in enumerate(sources)]


@dataclass
class Faults:
    """How one source behaves: gives nothing more after `dies_after` answers, by falling `silent` or breaking the connection; `lacks` and
    `corrupts` some chunks, and the differences in `corrupts_deltas`."""

    dies_after: int | None = None
    silent: bool = False
    lacks: frozenset[int] = frozenset()
    corrupts: frozenset[int] = frozenset()
    corrupts_deltas: frozenset[int] = frozenset()

    @property
    def is_good(self) -> bool:
        return self.dies_after is None and not self.lacks and len(self.corrupts) < MAX_CORRUPT


class Simulation:
    """Runs a plan to its end, answering in random order; checks what must hold at every step."""

    def __init__(self, plan: FetchPlan, faults: dict[str, Faults], window: int, rng: random.Random) -> None:
        self.plan, self.faults, self.window, self.rng, self.now = plan, faults, window, rng, 0.0
        self.open: list[Request] = []
        self.checking: list[Request] = []
        self.answers: Counter[str] = Counter()
        self.verified: Counter[int] = Counter()
        self.transfers: Counter[int] = Counter()
        self.gone: set[str] = set()

    def run(self) -> None:
        while not (self.plan.done or self.plan.stuck):
            for request in self.plan.requests(self.now):
                assert request.source not in self.gone, "nothing is asked of a source that was given up"
                self.open.append(request)
            for source in self.faults:
                underway = sum(request.source == source for request in (*self.open, *self.checking))
                assert underway <= self.window, "never more than the window outstanding"
            self.step()
            for source in self.plan.overdue(self.now):
                self.lose(source)

    def step(self) -> None:
        able = [request for request in self.open if not self.is_silent(request.source)]
        if self.checking and (not able or self.rng.random() < 0.5):
            self.settle(self.checking.pop(self.rng.randrange(len(self.checking))))
        elif able:
            self.answer(self.rng.choice(able))
        else:
            self.now += PATIENCE_S / 3

    def is_silent(self, source: str) -> bool:
        faults = self.faults[source]
        return faults.silent and faults.dies_after is not None and self.answers[source] >= faults.dies_after

    def answer(self, request: Request) -> None:
        source, number = request.source, request.chunk.number
        faults = self.faults[source]
        if faults.dies_after is not None and self.answers[source] >= faults.dies_after:
            self.lose(source)
            return
        self.answers[source] += 1
        self.open.remove(request)
        if number in faults.lacks:
            self.plan.unavailable(source, number)
            return
        assert self.plan.received(source, number, self.now) == request
        assert self.plan.received(source, number, self.now) is None, "what comes twice counts once"
        self.checking.append(request)

    def settle(self, request: Request) -> None:
        source, number = request.source, request.chunk.number
        delta = request.delta and number in self.faults[source].corrupts_deltas
        if delta or number in self.faults[source].corrupts:
            if self.plan.corrupt(source, number, delta):
                self.forget(source)
            return
        self.plan.verified(source, number)
        self.verified[number] += 1

    def lose(self, source: str) -> None:
        self.plan.lost(source)
        self.forget(source)

    def forget(self, source: str) -> None:
        self.gone.add(source)
        self.open = [request for request in self.open if request.source != source]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Chunk], list[str], list[str], dict[str, Faults], int, int, bool]:
    origins = [f"origin-{number}" for number in range(draw(st.integers(1, 3)))]
    parents = [f"parent-{number}" for number in range(draw(st.integers(0, 3)))]
    chunks = make_chunks(draw(st.lists(st.integers(0, len(origins) - 1), max_size=30)))
    some = st.frozensets(st.integers(0, max(0, len(chunks) - 1)), max_size=8)
    kinds = st.builds(Faults, st.none() | st.integers(0, 10), st.booleans(), some, some, some)
    faults = {source: draw(kinds) for source in (*parents, *origins)}
    return chunks, parents, origins, faults, draw(st.integers(1, 6)), draw(st.integers(0, 1000)), draw(st.booleans())


@settings(deadline=None, max_examples=400)
@given(worlds())
def test_every_chunk_comes_once_while_a_source_of_it_lives(world: tuple) -> None:
    chunks, parents, origins, faults, window, seed, delta = world
    plan = FetchPlan(chunks, parents, origins, window=window, patience_s=PATIENCE_S, delta=delta)
    simulation = Simulation(plan, faults, window, random.Random(seed))
    simulation.run()
    assert max(simulation.verified.values(), default=0) <= 1
    assert plan.done == (not plan.stuck) and (not plan.done or len(simulation.verified) == len(chunks))
    for chunk in plan.stuck:
        for source in (*parents, origins[chunk.source]):
            assert not faults[source].is_good or chunk.number in faults[source].corrupts, "a chunk is given up only when all its sources have failed"


@settings(deadline=None)
@given(num_chunks=st.integers(1, 30), num_parents=st.integers(0, 3), window=st.integers(1, 6), seed=st.integers(0, 1000))
def test_without_faults_all_comes_from_the_best_source(num_chunks: int, num_parents: int, window: int, seed: int) -> None:
    parents, origins = [f"parent-{number}" for number in range(num_parents)], ["origin"]
    plan = FetchPlan(make_chunks([0] * num_chunks), parents, origins, window=window, patience_s=PATIENCE_S)
    simulation = Simulation(plan, {source: Faults() for source in (*parents, *origins)}, window, random.Random(seed))
    simulation.run()
    assert plan.done and simulation.answers == {[*parents, *origins][0]: num_chunks}


def test_each_origin_is_asked_for_its_own_chunks_at_the_same_time() -> None:
    plan = FetchPlan(make_chunks([0, 1, 2, 0, 1, 2]), [], ["a", "b", "c"], window=1, patience_s=PATIENCE_S)
    assert [(request.source, request.chunk.number) for request in plan.requests(0.0)] == [("a", 0), ("b", 1), ("c", 2)]
    assert plan.requests(0.0) == []


def test_chunks_are_asked_for_in_order_and_a_failed_one_first_at_the_next_source() -> None:
    plan = FetchPlan(make_chunks([0] * 6), ["parent"], ["origin"], window=4, patience_s=PATIENCE_S)
    assert [request.chunk.number for request in plan.requests(0.0)] == [0, 1, 2, 3]
    plan.unavailable("parent", 1)
    assert [(request.source, request.chunk.number) for request in plan.requests(0.0)] == [("parent", 4), ("origin", 1)]
    assert plan.lost("parent") and not plan.lost("parent")
    assert [(request.source, request.chunk.number) for request in plan.requests(0.0)] == [("origin", 0), ("origin", 2), ("origin", 3)]


def test_a_source_is_overdue_only_while_it_owes_something() -> None:
    plan = FetchPlan(make_chunks([0, 0]), [], ["origin"], window=1, patience_s=PATIENCE_S)
    plan.requests(0.0)
    assert plan.overdue(PATIENCE_S) == [] and plan.overdue(PATIENCE_S + 1) == ["origin"]
    plan.received("origin", 0, 50.0)
    assert plan.overdue(90.0) == [], "it has answered; checking takes as long as it takes"
    plan.verified("origin", 0)
    plan.requests(100.0)
    assert plan.overdue(105.0) == [] and plan.overdue(111.0) == ["origin"]


def test_a_wrong_difference_is_followed_by_whole_chunks_elsewhere_first() -> None:
    plan = FetchPlan(make_chunks([0, 0]), ["parent"], ["origin"], window=1, patience_s=PATIENCE_S, delta=True)
    (first,) = plan.requests(0.0)
    assert first.delta and plan.received("parent", 0, 0.0)
    assert not plan.corrupt("parent", 0, delta=True)
    requests = plan.requests(0.0)
    assert [(request.source, request.chunk.number, request.delta) for request in requests] == [("parent", 1, False), ("origin", 0, False)]
    plan.lost("origin")
    plan.received("parent", 1, 0.0)
    plan.verified("parent", 1)
    assert [(request.source, request.chunk.number) for request in plan.requests(0.0)] == [("parent", 0)], "whose whole chunk may still be right"


def test_a_source_that_sends_wrong_chunks_again_and_again_is_given_up() -> None:
    plan = FetchPlan(make_chunks([0] * 5), ["parent"], ["origin"], window=5, patience_s=PATIENCE_S)
    plan.requests(0.0)
    for number in range(MAX_CORRUPT):
        plan.received("parent", number, 0.0)
        assert plan.corrupt("parent", number, delta=False) == (number == MAX_CORRUPT - 1)
    assert sorted(request.chunk.number for request in plan.requests(0.0) if request.source == "origin") == [0, 1, 2, 3, 4]


def test_no_source_at_all() -> None:
    chunks = make_chunks([0, 1])
    assert FetchPlan(chunks, [], ["only origin 0"], window=1, patience_s=PATIENCE_S).stuck == [chunks[1]]
    assert FetchPlan([], [], [], window=1, patience_s=PATIENCE_S).done
