"""Groups that are in one state, with what is asked of all of them kept up to date: how many of each version, which are with whom. Pure."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, MutableMapping, Set, ValuesView
from typing import Generic, Protocol, TypeVar

from workers.coordinator.groups.group_states import Running


class Admitted(Protocol):
    """What a table reads of its entries."""

    admitted_at: int


Entry = TypeVar("Entry", bound=Admitted)


class GroupTable(MutableMapping[str, Entry], Generic[Entry]):
    """Groups by their id, in the order in which they came. `versions`: how many were admitted at each version; none stands there with 0."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self.versions: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._entries

    def __getitem__(self, group_id: str) -> Entry:
        return self._entries[group_id]

    def values(self) -> ValuesView[Entry]:
        """All groups."""
        return self._entries.values()

    def items(self) -> ItemsView[str, Entry]:
        """All groups, with their ids."""
        return self._entries.items()

    def __setitem__(self, group_id: str, entry: Entry) -> None:
        if group_id in self._entries:
            del self[group_id]
        self._entries[group_id] = entry
        self.versions[entry.admitted_at] = self.versions.get(entry.admitted_at, 0) + 1

    def __delitem__(self, group_id: str) -> None:
        version = self._entries.pop(group_id).admitted_at
        self.versions[version] -= 1
        if not self.versions[version]:
            del self.versions[version]


class LeaseTable(GroupTable[Running]):
    """Groups that run. `changed`: the workers whose leases have, since someone took them out of it."""

    def __init__(self) -> None:
        super().__init__()
        self._by_worker: dict[bytes, dict[str, Running]] = {}
        self.changed: dict[bytes, None] = {}

    def __setitem__(self, group_id: str, lease: Running) -> None:
        super().__setitem__(group_id, lease)
        self._by_worker.setdefault(lease.worker, {})[group_id] = lease
        self.changed[lease.worker] = None

    def __delitem__(self, group_id: str) -> None:
        worker = self._entries[group_id].worker
        super().__delitem__(group_id)
        del self._by_worker[worker][group_id]
        if not self._by_worker[worker]:
            del self._by_worker[worker]
        self.changed[worker] = None

    def workers(self) -> list[bytes]:
        """Those that have any, in the order in which they got their first."""
        return list(self._by_worker)

    def of(self, worker: bytes) -> dict[str, Running]:
        """What `worker` has, by group."""
        return self._by_worker.get(worker, {})

    def owner(self, group_id: str, attempt: int) -> bytes:
        """The worker with which `attempt` of a group is running; b'' without one."""
        lease = self._entries.get(group_id)
        return lease.worker if lease is not None and lease.attempt == attempt else b""

    def end(self, group_id: str, attempt: int) -> Running | None:
        """Take out a lease; None if this attempt is not running."""
        lease = self._entries.get(group_id)
        if lease is None or lease.attempt != attempt:
            return None
        del self[group_id]
        return lease

    def missing(self, worker: bytes, held: Set[tuple[str, int]], seen: float, now: float, patience_s: float) -> list[str]:
        """Compare with the leases that `worker` says it holds (group, attempt), which has got those up to number `seen`: the groups that it has left
        out for `patience_s`."""
        missing = []
        for group_id, lease in self.of(worker).items():
            if (group_id, lease.attempt) in held or lease.number > seen:
                lease.missed_since = None
                continue
            if lease.missed_since is None:
                lease.missed_since = now
            if now - lease.missed_since >= patience_s:
                missing.append(group_id)
        return missing
