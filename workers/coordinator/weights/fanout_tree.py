"""Who fetches weights from whom: a tree of nodes for each version, grown by order of asking. Pure.

    trainer's servers --fanout--> node --fanout--> node ...       each node's chunks go on as they arrive (cut-through)

A new node goes below a node that has the version whole, if one has a free place; else below the trainer, if that has; else below the
node nearest to the trainer that has; with no place free anywhere, below the one that serves the fewest. So the trainer's servers send a
version `fanout` times, however many nodes there are, while nothing is lost. Workers of one node share what it fetches, and have one
place together; the first to ask leads: it fetches.

What an asker gets is its chain of ancestors, so nodes never wait for each other in a circle. A node whose workers are all lost leaves
its children to the node above. A node that a child reports stays where it is, but gets no new children.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.coordinator.ranking import Ranking
from workers.messages.parts import Version

KEPT = 2
"""So many versions have a tree: the newest, and the one before, which some still fetch."""


class Place(NamedTuple):
    """Where a worker stands: the endpoints that it fetches from, nearest first (behind them the trainer's), and whether it leads its node."""

    endpoints: list[str]
    leads: bool


@dataclass
class Node:
    """A node that fetches a version, or has it (`whole`). `above`: the host of the node that it fetches from, '' for the trainer's servers;
    `order`: of asking; `depth`: nodes above it, at most; `endpoints`: those of its workers, in the order in which they asked; `reported`: it did
    not give a child what it should; `below`: the hosts that fetch from it, or have; `num_fetching`: how many of them do not have it whole."""

    host: str
    above: str
    order: int
    depth: int = 0
    endpoints: dict[bytes, str] = field(default_factory=dict)
    whole: bool = False
    reported: bool = False
    below: dict[str, None] = field(default_factory=dict)
    num_fetching: int = 0

    @property
    def endpoint(self) -> str:
        """Where others fetch from it: from the worker that leads; '' for nowhere."""
        return next((endpoint for endpoint in self.endpoints.values() if endpoint), "")


class Tree:
    """One version's tree; `nodes` by host, in the order of asking. What happens to a node costs O(log nodes)."""

    def __init__(self, fanout: int) -> None:
        self.nodes: dict[str, Node] = {}
        self._fanout = fanout
        self._num_asked = 0
        self._top: dict[str, None] = {}
        self._hosts: dict[bytes, str] = {}
        self._served: dict[str, str] = {}
        self._whole: Ranking[str] = Ranking()  # those that can take another child and have all of it; then those that have not; then all that serve
        self._fetching: Ranking[str] = Ranking()
        self._serving: Ranking[str] = Ranking()

    def ask(self, worker: bytes, host: str, endpoint: str, failed: Collection[str]) -> Place:
        """A worker asks where to fetch from; `failed`: endpoints that did not give it what they should."""
        for bad in failed:
            if (other := self.nodes.get(self._served.get(bad, ""))) is not None:
                other.reported = True
                self._rank(other)
        node = self.nodes.get(host)
        if node is None:
            node = self.nodes[host] = Node(host, "", self._num_asked)
            self._num_asked += 1
            self._put(node, self._place(host))
        elif not node.whole and any(above.reported for above in self._above(host)):
            self._take(node)
            self._put(node, self._place(host))
        node.endpoints[worker], self._hosts[worker] = endpoint, host
        if endpoint:
            self._served[endpoint] = host
        self._rank(node)
        endpoints = [above.endpoint for above in self._above(host) if above.endpoint and not above.reported]
        return Place(endpoints, node.endpoint in (endpoint, ""))

    def lost(self, worker: bytes) -> None:
        """Leave out a worker; the children of a node without any are its parent's."""
        node = self.nodes.get(self._hosts.pop(worker, ""))
        if node is None:
            return
        self._served.pop(node.endpoints.pop(worker), None)
        if node.endpoints:
            self._rank(node)
            return
        for child in map(self.nodes.__getitem__, list(node.below)):
            self._take(child)
            self._put(child, node.above)
        self._take(node)
        del self.nodes[node.host]
        for ranking in (self._whole, self._fetching, self._serving):
            ranking.drop(node.host)

    def fetched(self, worker: bytes) -> None:
        """A worker's node has the version whole."""
        node = self.nodes.get(self._hosts.get(worker, ""))
        if node is not None and not node.whole:
            above = self._take(node)
            node.whole = True
            self._put(node, above)

    def _take(self, node: Node) -> str:
        """Out of its place; returns which that was."""
        above = self.nodes.get(node.above)
        del (self._top if above is None else above.below)[node.host]
        if above is not None:
            above.num_fetching -= not node.whole
            self._rank(above)
        return node.above

    def _put(self, node: Node, host: str) -> None:
        """Into a place: below `host`, or the trainer."""
        above = self.nodes.get(host)
        (self._top if above is None else above.below)[node.host] = None
        node.above, node.depth = host, 0 if above is None else above.depth + 1
        if above is not None:
            above.num_fetching += not node.whole
            self._rank(above)
        self._rank(node)

    def _rank(self, node: Node) -> None:
        serves, free = bool(node.endpoint) and not node.reported, node.num_fetching < self._fanout
        for ranking, belongs, key in ((self._whole, serves and free and node.whole, node.num_fetching),
                                      (self._fetching, serves and free and not node.whole, node.depth), (self._serving, serves, node.num_fetching)):
            if belongs:
                ranking.put(node.host, (key, node.order))
            else:
                ranking.drop(node.host)

    def _place(self, host: str) -> str:
        """The node below which `host` goes ('': the trainer). Never one that stands below `host` itself."""
        own = self._family(host)

        def first(ranking: Ranking[str]) -> str | None:
            return ranking.first() if len(own) == 1 and ranking.first() != host else ranking.first_where(lambda other: other not in own)

        whole, serving = first(self._whole), first(self._serving)
        if whole is not None:
            return whole
        if serving is None or len(self._top) < self._fanout:
            return ""
        return first(self._fetching) or serving

    def _family(self, host: str) -> set[str]:
        """`host`, and all below it."""
        family, new = {host}, [host]
        while new and (node := self.nodes.get(new.pop())) is not None:
            family.update(node.below)
            new.extend(node.below)
        return family

    def _above(self, host: str) -> list[Node]:
        """The nodes above `host`, nearest first."""
        chain: list[Node] = []
        node = self.nodes.get(host)
        while node is not None and node.above:
            node = self.nodes[node.above]
            chain.append(node)
        return chain


class Distribution:
    """The trees of the newest versions."""

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        self.trees: dict[Version, Tree] = {}

    def announced(self, version: Version) -> None:
        """A version can be asked for from now on; of the oldest one nothing is known any more."""
        self.trees.setdefault(version, Tree(self._fanout))
        for old in sorted(self.trees)[:-KEPT]:
            del self.trees[old]

    def ask(self, version: Version, worker: bytes, host: str, endpoint: str, failed: Collection[str] = ()) -> Place:
        """As `Tree.ask`; nobody but the trainer has a version that is not known here."""
        tree = self.trees.get(version)
        return Place([], True) if tree is None else tree.ask(worker, host, endpoint, failed)

    def fetched(self, version: Version, worker: bytes) -> None:
        """A worker has `version` whole."""
        if version in self.trees:
            self.trees[version].fetched(worker)

    def holds(self, version: Version, worker: bytes) -> None:
        """A worker's engines hold `version`: it keeps older ones for nobody."""
        self.fetched(version, worker)
        for older in [other for other in self.trees if other < version]:
            self.trees[older].lost(worker)

    def lost(self, worker: bytes) -> None:
        """A worker is gone."""
        for tree in self.trees.values():
            tree.lost(worker)
