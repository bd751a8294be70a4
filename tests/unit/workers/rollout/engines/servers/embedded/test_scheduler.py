"""The scheduler under arbitrary interleavings, checked against a model of the KV cache that only does what it is told."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from workers.rollout.engines.servers.embedded.kv_cache import common_prefix
from workers.rollout.engines.servers.embedded.requests import Finish, Request, Step
from workers.rollout.engines.servers.embedded.scheduler import Scheduler

CONTEXT = 80
STOP = 3


class Cache:
    """What a real cache would hold: per row and position, (token, weights), as written by copies, prefill and decode."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(num_rows + 1)]
        self.weights = 0

    def carry_out(self, step: Step) -> None:
        """Do a step's copies, resize and prefill."""
        for source, target, length in step.copies:
            assert length <= len(self.rows[source]), "copies something that is not there"
            self.rows[target] = self.rows[source][:length] + self.rows[target][length:]
        for row in self.rows:
            del row[step.capacity:]
        for segment in step.prefill:
            assert len(self.rows[segment.row]) >= segment.start and segment.start + len(segment.tokens) <= step.capacity
            self.rows[segment.row][segment.start:] = [(token, self.weights) for token in segment.tokens]

    def feed(self, row: int, request: Request, capacity: int) -> None:
        """Write the KV of the token that a decode step feeds."""
        assert request.num_fed < capacity
        self.rows[row][request.num_fed:] = [(request.last_token, self.weights)]


class Harness:
    """Drives a scheduler and checks every step."""

    def __init__(self, num_slots: int, chunk: int) -> None:
        self.scheduler = Scheduler(num_slots, CONTEXT, chunk, "0")
        self.cache = Cache(num_slots)
        self.chunk = chunk
        self.submitted: list[Request] = []
        self.ended: list[Request] = []
        self.mixed: set[Request] = set()  # kept their old KV through an update

    def submit(self, prompt: list[int], length: int) -> None:
        """Queue a request."""
        request = Request(f"r{len(self.submitted):02d}", list(prompt), length, stop_ids=frozenset([STOP]))
        self.submitted.append(request)
        self.scheduler.submit(request)

    def step(self) -> bool:
        """One step, with the invariants that hold in each."""
        step = self.scheduler.plan()
        if step is None:
            self.collect()
            return False
        assert sum(len(segment.tokens) for segment in step.prefill) <= self.chunk
        self.cache.carry_out(step)
        for row, request in enumerate(step.decode):
            held = self.cache.rows[row][: request.num_fed]
            assert [token for token, _ in held] == request.fed(), "row holds other tokens"
            assert request in self.mixed or all(weights == self.cache.weights for _, weights in held), "stale KV"
            self.cache.feed(row, request, step.capacity)
        fed = [token for segment in step.prefill for token in segment.tokens] + [request.last_token for request in step.decode]
        tokens = [(7 * request.num_fed + 5 * request.last_token) % 11 for request in step.decode]
        self.scheduler.commit(step, tokens, [-1.0] * len(tokens), {}, [f"{token} {self.cache.weights}".encode() for token in fed])
        self.collect()
        return True

    def update(self, keep_cache: bool) -> None:
        """New weights. Requests that run keep their cache."""
        keep_cache |= bool(self.scheduler.running)
        self.mixed.update(self.scheduler.running)
        self.cache.weights += 1
        self.scheduler.weights_changed(str(self.cache.weights), keep_cache)

    def collect(self) -> None:
        """Take what ended; check that nothing is lost, doubled or leaked."""
        self.ended += self.scheduler.take_finished()
        scheduler, table = self.scheduler, self.scheduler.table
        assert len(set(self.ended)) == len(self.ended)
        owners = [row.owner for row in table.rows if row.owner is not None]
        assert set(owners) == set(scheduler.running) and len(owners) == len(set(owners))
        assert all(table.rows[request.row].owner is request for request in scheduler.running if request.row is not None)
        assert {*scheduler.queue, *scheduler.running, *self.ended} == set(self.submitted)
        assert len(scheduler.queue) + len(scheduler.running) + len(self.ended) == len(self.submitted)
        assert all(row.owner is not None for row in table.rows[: table.num_decoding])
        for row in table.rows:
            assert [int(chosen.split()[0]) for chosen in row.routing] == row.tokens, "each token's experts go with its keys and values"
        for request in self.submitted:
            if request.finish is not None and request.finish.kind != "abort":
                told = [tuple(map(int, chosen.split())) for chosen in request.routing]
                assert [token for token, _ in told] == request.fed(), "of all tokens but the last"
                assert request in self.mixed or {weights for _, weights in told} <= {int(request.spans[-1].version)}
            assert len(request.output) == len(request.logprobs) <= request.max_new_tokens
            edges = [0, *(span.end for span in request.spans)]
            assert [span.start for span in request.spans] == edges[:-1] and edges[-1] == len(request.output)


prompts = st.builds(lambda header, tail: [1] * header + tail, st.integers(0, 30), st.lists(st.integers(0, 4), min_size=1, max_size=8))
actions = st.one_of(
    st.tuples(st.just("submit"), prompts, st.integers(1, 20), st.integers(1, 4)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("pause"), st.sampled_from(["retract", "abort", "in_place"])),
    st.tuples(st.just("resume")),
    st.tuples(st.just("update")),
    st.tuples(st.just("update and keep the cache")),
    st.tuples(st.just("flush")),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)


@settings(max_examples=250, deadline=None)
@given(num_slots=st.integers(1, 5), chunk=st.integers(1, 24), script=st.lists(actions, max_size=30))
def test_any_interleaving(num_slots: int, chunk: int, script: list[tuple]) -> None:
    harness = Harness(num_slots, chunk)
    scheduler = harness.scheduler
    for kind, *values in script:
        if kind == "submit":
            for _ in range(values[2]):
                harness.submit(values[0], values[1])
        elif kind == "steps":
            for _ in range(values[0]):
                harness.step()
        elif kind == "pause":
            if scheduler.paused and scheduler.running:
                scheduler.resume()
            scheduler.pause(values[0])
            assert scheduler.plan() is None
        elif kind == "resume":
            scheduler.resume()
        elif kind.startswith("update"):
            harness.update(keep_cache=kind == "update and keep the cache")
        elif kind == "flush":
            scheduler.flush()
        elif kind == "abort":
            scheduler.abort(f"r{values[0]:02d}", "test")
        elif values[0] < len(harness.submitted):
            scheduler.cancel(harness.submitted[values[0]], "test")
        harness.collect()
    scheduler.resume()
    budget = 1 + sum(len(request.prompt) + 2 * request.max_new_tokens for request in harness.submitted) * 2
    while harness.step():
        budget -= 1
        assert budget, "does not come to an end"
    assert len(harness.ended) == len(harness.submitted)
    assert scheduler.table.num_decoding == 0 and scheduler.table.num_idle() == num_slots
    for request in harness.ended:
        assert request.finish is not None
        if request.finish.kind == "length":
            assert len(request.output) == request.max_new_tokens
        elif request.finish.kind == "stop":
            assert request.output[-1] == STOP


def run_all(harness: Harness) -> None:
    """Step until nothing is left."""
    while harness.step():
        pass


def test_a_group_prefills_its_prompt_once() -> None:
    harness = Harness(num_slots=8, chunk=16)
    for _ in range(8):
        harness.submit([5, *range(20, 60)], 4)
    run_all(harness)
    assert harness.scheduler.prefill_tokens == 40
    assert sorted(request.cached_tokens or 0 for request in harness.ended) == [0] + [40] * 7


def test_the_samples_of_a_prompt_compute_it_once_after_a_retraction_too() -> None:
    harness = Harness(num_slots=4, chunk=64)
    for _ in range(4):
        harness.submit([5, *range(20, 30)], 60)
        harness.submitted[-1].stop_ids = frozenset()
    while any(len(request.output) < 30 for request in harness.submitted):
        harness.step()
    for index, request in enumerate(harness.submitted):
        request.output[0] = 30 + index  # they differ from their first token on
    before, own = harness.scheduler.prefill_tokens, sum(len(request.output) - 1 for request in harness.submitted)
    harness.scheduler.pause("retract")
    harness.update(keep_cache=False)
    harness.scheduler.resume()
    run_all(harness)
    assert harness.scheduler.prefill_tokens - before == 11 + own


def test_a_common_header_is_reused_across_prompts_and_after_their_end() -> None:
    harness = Harness(num_slots=2, chunk=64)
    header = list(range(20, 50))
    for tail in range(4):
        harness.submit([*header, tail, tail, 9], 3)
        run_all(harness)
    assert [request.cached_tokens for request in harness.ended] == [0, 30, 30, 30]


def test_an_update_or_flush_forgets_prefixes() -> None:
    harness = Harness(num_slots=2, chunk=64)
    for forget in (lambda: None, lambda: harness.update(keep_cache=False), harness.scheduler.flush, lambda: harness.update(keep_cache=True)):
        forget()
        harness.submit(list(range(20, 40)), 3)
        run_all(harness)
        assert harness.ended[-1].cached_tokens == 0
        harness.submit(list(range(20, 40)), 3)
        run_all(harness)
        assert harness.ended[-1].cached_tokens == 19


def test_spans_follow_updates_and_retractions_are_counted() -> None:
    harness = Harness(num_slots=1, chunk=64)
    harness.submit([8, 9], 9)
    request = harness.submitted[0]
    request.stop_ids = frozenset()
    for _ in range(2):
        while len(request.output) % 3 != 2:
            harness.step()
        harness.step()
        harness.scheduler.pause("retract")
        harness.update(keep_cache=False)
        assert not harness.step()
        harness.scheduler.resume()
    run_all(harness)
    assert [(span.version, span.start, span.end) for span in request.spans] == [("0", 0, 3), ("1", 3, 6), ("2", 6, 9)]
    assert request.num_retractions == 2 and request.finish == Finish("length", 9)


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    harness = Harness(num_slots=2, chunk=4)
    harness.submit([9], 30)
    harness.submitted[0].stop_ids = frozenset()
    harness.step()
    harness.submit(list(range(20, 60)), 2)
    for done in range(1, 11):
        assert len(harness.submitted[0].output) == done
        harness.step()
    assert harness.submitted[1].output == []
    run_all(harness)


def test_what_is_aborted_in_the_queue_has_lost_its_tokens() -> None:
    harness = Harness(num_slots=2, chunk=64)
    for start in (10, 20):
        harness.submit([start, start + 1], 9)
        harness.submitted[-1].stop_ids = frozenset()
    for _ in range(3):
        harness.step()
    assert harness.scheduler.abort("r00", "test") == 1
    harness.scheduler.pause("retract")
    assert harness.scheduler.abort("r01", "test") == 1
    harness.collect()
    assert [len(request.output) for request in harness.ended] == [2, 0] and harness.ended[1].spans == []


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3, 4], [1, 2, 3, 9]) == 3
    assert common_prefix([1, 2, 3, 4], [1, 2, 3, 9], at_least=3) == 0
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2, 3]) == 2
