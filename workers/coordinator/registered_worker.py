"""One worker of a run, as the coordinator knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.messages.from_worker import Heartbeat
from workers.messages.parts import Role, Version, WorkerStatus

SUSPECT_AFTER = 4
"""So many groups in a row that failed, or were refused, make a worker suspect."""


@dataclass
class Worker:
    """One registered worker. `slot` numbers the workers of a role in order of registration; `measured`: the leases, by group and attempt,
    that `live` (samples; None: not known) and `tokens_in_flight` are of; `num_leases`: how many it has been given; `num_refused`: results that
    were refused; `failed_in_a_row`: those, and groups that failed there by no fault of their own, since a result was taken."""

    peer: bytes
    role: Role
    slot: int
    host: str
    pid: int
    last_heard: float
    unreachable_since: float | None = None
    held: Version | None = None
    fetching: Version | None = None
    capacity: int = 0
    job: str = ""
    serves: str = ""
    draining: str = ""
    tokens_in_flight: int = 0
    kv_tokens: int = 0
    update_ranks: int = 0
    num_refused: int = 0
    failed_in_a_row: int = 0
    num_leases: int = 0
    live: int | None = None
    measured: frozenset[tuple[str, int]] = frozenset()
    status: WorkerStatus = field(default_factory=WorkerStatus)

    @property
    def name(self) -> str:
        """For people: role and slot."""
        return f"{self.role.value} {self.slot}"

    @property
    def suspect(self) -> bool:
        """Whether its groups fail, or are refused, again and again."""
        return self.failed_in_a_row >= SUSPECT_AFTER

    @property
    def ready(self) -> bool:
        """Whether it is a rollout worker that holds weights and is not about to leave."""
        return self.role is Role.rollout and self.held is not None and not self.draining

    def beat(self, message: Heartbeat) -> None:
        """Take note of what the worker says of itself."""
        self.held, self.fetching, self.status, self.capacity = message.held, message.fetching, message.status, message.capacity
        self.live, self.tokens_in_flight, self.update_ranks = message.live, message.tokens_in_flight, message.update_ranks
        self.kv_tokens = message.kv_tokens
        self.measured = frozenset((held.group_id, held.attempt) for held in message.leases)
