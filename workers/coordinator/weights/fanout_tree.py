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

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.messages.parts import Version

KEPT = 2
"""So many versions have a tree: the newest, and the one before, which some still fetch."""


class Place(NamedTuple):
    """Where a worker stands: the endpoints that it fetches from, nearest first (behind them the trainer's), and whether it leads its node."""

    endpoints: list[str]
    leads: bool


@dataclass
class Node:
    """A node that fetches a version, or has it (`whole`). `endpoints`: those of its workers, in the order in which they asked; `above`: the
    host of the node that it fetches from, '' for the trainer's servers; `reported`: it did not give a child what it should."""

    host: str
    above: str
    endpoints: dict[bytes, str] = field(default_factory=dict)
    whole: bool = False
    reported: bool = False

    @property
    def endpoint(self) -> str:
        """Where others fetch from it: from the worker that leads; '' for nowhere."""
        return next((endpoint for endpoint in self.endpoints.values() if endpoint), "")


@dataclass
class Tree:
    """One version's tree; `nodes` by host, in the order of asking."""

    fanout: int
    nodes: dict[str, Node] = field(default_factory=dict)

    def ask(self, worker: bytes, host: str, endpoint: str, failed: Collection[str]) -> Place:
        """A worker asks where to fetch from; `failed`: endpoints that did not give it what they should."""
        for other in self.nodes.values():
            other.reported = other.reported or not set(failed).isdisjoint(other.endpoints.values())
        node = self.nodes.get(host)
        if node is None:
            node = self.nodes[host] = Node(host, self._place(host))
        elif not node.whole and any(above.reported for above in self._above(host)):
            node.above = self._place(host)
        node.endpoints[worker] = endpoint
        endpoints = [above.endpoint for above in self._above(host) if above.endpoint and not above.reported]
        return Place(endpoints, node.endpoint in (endpoint, ""))

    def lost(self, worker: bytes) -> None:
        """Leave out a worker; the children of a node without any are its parent's."""
        for node in list(self.nodes.values()):
            node.endpoints.pop(worker, None)
            if not node.endpoints:
                del self.nodes[node.host]
                for child in self.nodes.values():
                    child.above = node.above if child.above == node.host else child.above

    def fetched(self, worker: bytes) -> None:
        """A worker's node has the version whole."""
        for node in self.nodes.values():
            node.whole = node.whole or worker in node.endpoints

    def _place(self, host: str) -> str:
        """The node below which `host` goes ('': the trainer). Never one that stands below `host` itself."""
        others = [node for node in self.nodes.values() if node.host != host]
        usable = [node for node in others if node.endpoint and not node.reported and host not in (above.host for above in self._above(node.host))]
        fetching = Counter(node.above for node in others if not node.whole)
        free = [node for node in usable if fetching[node.host] < self.fanout]
        whole = [node for node in free if node.whole]
        if whole:
            return min(whole, key=lambda node: fetching[node.host]).host
        if not usable or sum(not node.above for node in others) < self.fanout:
            return ""
        if free:
            return min(free, key=lambda node: len(self._above(node.host))).host
        return min(usable, key=lambda node: fetching[node.host]).host

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
