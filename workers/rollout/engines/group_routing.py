"""Which of a worker's servers gets which group. Pure.

    group, version --place--> the server with the fewest tokens in flight, of those that hold the version and have room
                              the server that has the group already, as long as it holds the version

A group stays on one server, where its prompt is computed once for all its samples. A server has room while fewer samples are on it than it is
to have; so servers that have not got a new version yet get their part of the groups that wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.messages.parts import HeldLease, Lease, Version

Key = tuple[str, int]


def key_of(lease: Lease | HeldLease) -> Key:
    """A lease's identity: group and attempt."""
    return lease.group_id, lease.attempt

WEIGHT_OF_ONE = 1 / 64


@dataclass
class Load:
    """What is on a server: samples, the tokens that they have and are expected to get, and each group's prompt once."""

    num_samples: int = 0
    tokens: float = 0.0
    prompts: dict[Key, tuple[int, int]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Tokens in flight."""
        return self.tokens + sum(length for _, length in self.prompts.values())


@dataclass(frozen=True)
class Request:
    """A sample on a server, to be taken off it with `end`."""

    server: int
    key: Key
    tokens: float


class Routing:
    """`capacity`: samples on each server at once."""

    def __init__(self, num_servers: int, capacity: int) -> None:
        self.capacity = capacity
        self.loads = [Load() for _ in range(num_servers)]
        self._servers: dict[Key, int] = {}

    @property
    def tokens(self) -> int:
        """Tokens in flight on all servers."""
        return round(sum(load.total for load in self.loads))

    def place(self, key: Key, version: Version, held: Sequence[Version | None]) -> int | None:
        """The server for a request of group `key`; None: it has to wait. `held`: what each server holds, None where it takes no work."""
        able = [server for server, has in enumerate(held) if has is not None and has >= version]
        if (server := self._servers.get(key)) in able:
            return server
        with_room = [server for server in able if self.loads[server].num_samples < self.capacity]
        if not with_room:
            return None
        self._servers[key] = min(with_room, key=lambda server: self.loads[server].total)
        return self._servers[key]

    def begin(self, key: Key, prompt: int, tokens: float) -> Request:
        """Note a request on the server that `place` has given: a prompt of so many tokens, and what it has and may get besides."""
        load = self.loads[server := self._servers[key]]
        number, _ = load.prompts.get(key, (0, 0))
        load.prompts[key] = number + 1, prompt
        load.num_samples += 1
        load.tokens += tokens
        return Request(server, key, tokens)

    def end(self, request: Request) -> None:
        """The request is on its server no more."""
        load = self.loads[request.server]
        load.num_samples -= 1
        load.tokens = load.tokens - request.tokens if load.num_samples else 0.0
        number, prompt = load.prompts[request.key]
        if number > 1:
            load.prompts[request.key] = number - 1, prompt
        else:
            del load.prompts[request.key]

    def forget(self, key: Key) -> None:
        """No more requests of this group come."""
        self._servers.pop(key, None)


class Lengths:
    """How long answers become, by those that have ended; the later ones count for more. `first`: taken for the length before any has."""

    def __init__(self, first: int) -> None:
        self.mean = float(first)
        self._num = 0

    def add(self, length: int) -> None:
        """An answer has ended with so many tokens."""
        self._num += 1
        self.mean += (length - self.mean) * max(1 / self._num, WEIGHT_OF_ONE)

    def expected(self, so_far: int) -> float:
        """How many tokens an answer will have that has `so_far`, and goes on."""
        return max(self.mean, so_far + 1.0)
