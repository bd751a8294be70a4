"""Messages that wait together are taken together, and each leaves the record that it would leave alone; a checkpoint comes after them. What
breaks beside them is heard of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.control_plane.both_sides import make_run
from benchmarks.control_plane.figures import EPOCH, Load
from tests.support.groups import make_group
from workers.coordinator.process.main import CoordinatorWorker
from workers.coordinator.process.replay_run import audit
from workers.coordinator.recording.inputs import Arrived
from workers.messages.from_worker import BatchRequest, CheckpointRequest, GroupFinished, Heartbeat, Register, StepFinished
from workers.messages.parts import Announcement, Message, Role, Version
from workers.run.files import read_lines

LOAD = Load(workers=1, leases_each=4, samples=2, tokens=20, batch_groups=1)


def finished(step: int) -> tuple[bytes, Message]:
    return b"trainer", StepFinished(Announcement(Version(EPOCH, step), "/weights", "digest"), {"loss": 0.5})


def test_two_steps_that_are_heard_of_at_once_have_each_its_own_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a trainer that had the next batch already, by a coordinator that was busy meanwhile."""
    run = make_run(tmp_path, LOAD)

    async def scenario() -> None:
        worker = CoordinatorWorker(run, EPOCH, None)

        async def take(*messages: tuple[bytes, Message]) -> None:
            first, *others = messages
            monkeypatch.setattr(worker.sockets, "waiting", lambda: iter(others))
            arrived: asyncio.Future[tuple[bytes, Message]] = asyncio.get_running_loop().create_future()
            arrived.set_result(first)
            (await worker.receive(arrived)).cancel()  # type: ignore[arg-type]

        await take((b"trainer", Register(Role.trainer, "node", 1)), (b"rollout", Register(Role.rollout, "node", 2)), finished(0),
                   (b"trainer", BatchRequest(0)), (b"rollout", Heartbeat(held=Version(EPOCH, 0), capacity=4 * LOAD.samples)))
        leases = list(worker.core.ledger.running.items())[:2]
        await take(*((b"rollout", GroupFinished(make_group(group_id, lease.attempt))) for group_id, lease in leases))
        await take((b"trainer", BatchRequest(1)))
        assert len(worker.core.training.in_training) == 2
        await take(finished(1), finished(2))
        worker.record()
        worker.sockets.close()
        worker.records.close()

    asyncio.run(scenario())
    first, second = read_lines(run.metrics)
    assert (first["step"], second["step"]) == (1, 2) and second["tokens_trained"] == 2 * first["tokens_trained"] > 0


def test_what_a_checkpoint_holds_is_in_the_journal_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an audit of the next incarnation would miss what it goes on from."""
    run, recorded = make_run(tmp_path, LOAD), []

    async def scenario() -> None:
        worker = CoordinatorWorker(run, EPOCH, None)
        worker.recorder.begin(0.0)
        worker.machine.do(Arrived(0.0, b"trainer", Register(Role.trainer, "node", 1)))
        monkeypatch.setattr("workers.coordinator.process.main.write_atomic", lambda *_: recorded.append(audit(run).replay.num_inputs))
        await worker._write_part(b"trainer", CheckpointRequest(0, str(tmp_path), False), [])
        worker.sockets.close()
        worker.records.close()
        assert recorded == [worker.recorder._number] == [1]

    asyncio.run(scenario())


def test_what_breaks_beside_the_messages_ends_the_process_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, LOAD)

    async def breaks() -> None:
        raise ValueError("a queue that nobody understands")

    async def scenario() -> None:
        worker = CoordinatorWorker(run, EPOCH, None)
        monkeypatch.setattr(worker._fleet_watch, "watch", breaks)
        with pytest.raises(ValueError, match="that nobody understands"):
            await asyncio.wait_for(worker.serve(), 60)

    asyncio.run(scenario())
