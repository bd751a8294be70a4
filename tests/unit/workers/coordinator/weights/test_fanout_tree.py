"""The tree by which weights are fetched: its shape, and what it becomes when workers are lost or do not give what they should."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.coordinator.weights.fanout_tree import Distribution, Tree
from workers.messages.parts import Version

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


def endpoint(worker: int) -> str:
    return f"tcp://w{worker}"


def ask(tree: Tree, worker: int, host: int | None = None, failed: tuple[int, ...] = ()) -> list[str]:
    number = worker if host is None else host
    return tree.ask(b"%d" % worker, f"node{number}", endpoint(worker), [endpoint(other) for other in failed]).endpoints


@given(st.integers(1, 5), st.integers(1, 60))
def test_in_order_of_asking_the_tree_is_complete_and_the_trainer_serves_no_more_than_its_fanout(fanout: int, num_nodes: int) -> None:
    tree = Tree(fanout)
    chains = [ask(tree, number) for number in range(num_nodes)]
    parents = [None if number < fanout else (number - fanout) // fanout for number in range(num_nodes)]
    for chain, parent in zip(chains, parents, strict=True):
        assert chain == ([] if parent is None else [endpoint(parent), *chains[parent]]), "a node's sources are its parent, and the parent's"


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["ask", "fetched", "lost", "report"]), st.integers(0, 11)), max_size=120))
def test_whatever_happens_nobody_waits_in_a_circle_or_for_somebody_who_is_gone(fanout: int, events: list[tuple[str, int]]) -> None:
    """Workers w of nodes w // 2 ask, finish, are lost, and report the nearest of their sources."""
    tree, here, reported, untroubled = Tree(fanout), set(), set(), True
    for event, worker in events:
        if event == "lost":
            tree.lost(b"%d" % worker)
            untroubled = untroubled and worker not in here
            here.discard(worker)
            reported = {other for other in reported if other // 2 in {alive // 2 for alive in here}}
            continue
        if event == "fetched":
            tree.fetched(b"%d" % worker)
            continue
        sources = ask(tree, worker, worker // 2)
        here.add(worker)
        if event == "report" and sources:
            nearest = int(sources[0].removeprefix("tcp://w"))
            reported.add(nearest)
            untroubled = False
            sources = ask(tree, worker, worker // 2, (nearest,))
        hosts = {number // 2 for number in here}
        assert set(tree.nodes) == {f"node{host}" for host in hosts}, "one place for each node that has a worker"
        for source in sources:
            other = int(source.removeprefix("tcp://w"))
            assert other in here and other // 2 != worker // 2 and other // 2 not in {bad // 2 for bad in reported}
        for node in tree.nodes.values():
            above = [other.host for other in tree._above(node.host)]  # ends, so there is no circle
            assert node.host not in above and len(set(above)) == len(above)
        for number in hosts if untroubled else ():
            fetching = [node for node in tree.nodes.values() if node.above == f"node{number}" and not node.whole]
            assert len(fetching) <= fanout
        if untroubled:
            assert sum(not node.above for node in tree.nodes.values()) <= fanout, "what leaves the trainer does not grow with the fleet"


def test_workers_of_one_node_have_one_place_and_one_leads() -> None:
    tree = Tree(1)
    first = tree.ask(b"0", "a", "tcp://0", [])
    assert first.leads and first.endpoints == []
    second = tree.ask(b"1", "a", "tcp://1", [])
    assert not second.leads and second.endpoints == [], "as the first of its node"
    other = tree.ask(b"2", "b", "tcp://2", [])
    assert other.leads and other.endpoints == ["tcp://0"], "the trainer's one place is taken by node a, once"
    assert tree.ask(b"0", "a", "tcp://0", []) == first, "asked again, the answer is the same"
    tree.lost(b"0")
    assert tree.ask(b"1", "a", "tcp://1", []).leads and tree.ask(b"2", "b", "tcp://2", []).endpoints == ["tcp://1"]


def test_a_late_joiner_fetches_from_one_who_has_all_of_it_and_is_least_busy() -> None:
    tree = Tree(2)
    for number in range(3):
        ask(tree, number)
    for number in range(3):
        tree.fetched(b"%d" % number)
    assert [ask(tree, number)[0] for number in (10, 11, 12)] == [endpoint(0), endpoint(1), endpoint(2)]
    tree.fetched(b"10")
    assert ask(tree, 13)[0] == endpoint(0), "a child that is done does not count"


def test_the_children_of_a_lost_node_belong_to_the_one_above() -> None:
    tree = Tree(1)
    for number in range(3):
        ask(tree, number)
    tree.lost(b"1")
    assert ask(tree, 2) == [endpoint(0)]
    tree.lost(b"0")
    assert ask(tree, 2) == [], "only the trainer is left"


def test_a_node_that_is_reported_gets_no_new_children() -> None:
    tree = Tree(1)
    ask(tree, 0)
    assert ask(tree, 1) == [endpoint(0)]
    assert ask(tree, 1, failed=(0,)) == [], "the one that reported goes elsewhere"
    assert ask(tree, 2) == [endpoint(1)], "and so do others"


def test_versions_have_trees_of_their_own_and_old_ones_are_forgotten() -> None:
    distribution = Distribution(1)
    assert distribution.ask(V1, b"0", "a", "tcp://0") == ([], True), "of an unknown version nobody has anything"
    for version in (V1, V2):
        distribution.announced(version)
        assert distribution.ask(version, b"0", "a", "tcp://0").endpoints == []
        assert distribution.ask(version, b"1", "b", "tcp://1").endpoints == ["tcp://0"]
    distribution.announced(V2)
    assert distribution.ask(V2, b"2", "c", "tcp://2").endpoints == ["tcp://1", "tcp://0"], "announced again, it is the same"
    distribution.holds(V2, b"0")
    assert distribution.ask(V1, b"1", "b", "tcp://1").endpoints == [], "who holds the newer one serves the older one no more"
    distribution.lost(b"1")
    assert distribution.ask(V2, b"2", "c", "tcp://2").endpoints == ["tcp://0"]
    distribution.announced(V3)
    assert set(distribution.trees) == {V2, V3}


def test_a_worker_that_serves_nowhere_is_nobodys_source() -> None:
    tree = Tree(1)
    tree.ask(b"0", "a", "", [])
    assert tree.ask(b"1", "b", "tcp://1", []).endpoints == []
