"""What the coordinator keeps count of, against what counting anew gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from workers.coordinator.core import Coordinator
from workers.messages.parts import Role


def check_indexes(core: Coordinator) -> None:
    """Every figure that is kept up to date is what it would be if it were reckoned from the beginning."""
    ledger, registry, office = core.ledger, core.registry, core.office
    for table in (ledger.running, ledger.parked, ledger.finished, core.evaluation.running):
        assert table.versions == Counter(entry.admitted_at for entry in table.values())
    for table in (ledger.running, core.evaluation.running):
        peers = {lease.worker for lease in table.values()}
        held = {peer: {group_id: lease for group_id, lease in table.items() if lease.worker == peer} for peer in peers}
        assert {peer: table.of(peer) for peer in table.workers()} == held
    rollouts = [worker for worker in registry.workers.values() if worker.role is Role.rollout]
    assert registry.holding == Counter(worker.held for worker in rollouts if not worker.draining)
    assert registry.num_ready == len(registry.ready()) == sum(worker.ready for worker in rollouts)
    for role in Role:
        assert registry.of(role) == sorted((one for one in registry.workers.values() if one.role is role), key=lambda worker: worker.slot)
        assert registry.number(role) == len(registry.of(role))
    assert registry.reward_endpoints() == [worker.serves for worker in registry.of(Role.reward) if not worker.draining]
    changed = registry.changed | ledger.running.changed | core.evaluation.running.changed
    for worker in (one for one in rollouts if one.peer not in changed):
        room = office.room(worker) if worker.ready and worker.capacity else None
        known = office.rooms.rooms.get(worker.peer)
        assert (room is None) == (known is None)
        if room is not None and known is not None:
            assert replace(room, tokens=0.0) == replace(known, tokens=0.0)
    rooms = office.rooms.rooms.values()
    capacity, known, live = (sum(getattr(room, name) for room in rooms) for name in ("capacity", "known", "live"))
    size = core.config.workflow.group_size
    assert office.rooms.num_groups == capacity / (size * (max(1 / size, live / known) if known else 1.0))
    for tree in core.delivery.distribution.trees.values():
        for node in tree.nodes.values():
            below = [other for other in tree.nodes.values() if other.above == node.host]
            assert set(node.below) == {other.host for other in below} and node.num_fetching == sum(not other.whole for other in below)
