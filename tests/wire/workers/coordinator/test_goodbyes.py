"""The end of a run, with workers that have said their Goodbye, and whose connections have broken, before it is read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from benchmarks.control_plane.both_sides import make_run
from benchmarks.control_plane.figures import EPOCH, Load
from workers.coordinator.process import shutdown
from workers.coordinator.process.main import CoordinatorWorker
from workers.coordinator.recording.inputs import Ended
from workers.messages.codec import encode
from workers.messages.from_coordinator import HeartbeatReply
from workers.messages.from_worker import Goodbye, Heartbeat, Register, StepFinished
from workers.messages.parts import Announcement, Message, Role, Version
from workers.run.folder import RunFolder
from workers.transport.keys import read_keys

LIMIT_S = 60.0
LOAD = Load(workers=2)
HEARTBEAT = Heartbeat(held=Version(EPOCH, 0), capacity=0)


class Joined:
    """A worker's side of the connection, under a routing id of its own."""

    def __init__(self, context: zmq.Context, run: RunFolder, worker: CoordinatorWorker, name: bytes) -> None:
        self.name, self.socket = name, context.socket(zmq.DEALER)
        keys = read_keys(run, "client")
        self.socket.routing_id, self.socket.curve_publickey, self.socket.curve_secretkey = name, keys.public, keys.secret
        self.socket.curve_serverkey = read_keys(run, "server").public
        self.socket.connect(worker.sockets.router_endpoint)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.socket.send_multipart(encode(message))

    def leave(self) -> None:
        self.socket.close(linger=int(LIMIT_S * 1000))


async def until_gone(worker: CoordinatorWorker, name: bytes) -> None:
    """Until nothing can be sent to this peer any more; what it has said is not read."""
    while await worker.sockets.send(name, HeartbeatReply(None, known=True)):
        await asyncio.sleep(0.01)


async def ending(worker: CoordinatorWorker, joined: dict[str, Joined], last: list[Message]) -> int:
    """The run is complete; the trainer says `last`, after which its connection breaks, and the others Goodbye. Returns the exit status."""
    joined["trainer"].say(Register(Role.trainer, "node", 1), StepFinished(Announcement(Version(EPOCH, 0), "/weights", "digest"), {}))
    for number in range(LOAD.workers):
        joined[f"rollout {number}"].say(Register(Role.rollout, "node", 2 + number))
    receiving = asyncio.create_task(worker.sockets.receive())
    while len(worker.core.registry.workers) < len(joined):
        receiving = await worker.receive(receiving)
    worker.machine.do(Ended(0.0, ""))
    joined["trainer"].say(*last)
    for number in range(LOAD.workers):
        joined[f"rollout {number}"].say(*[HEARTBEAT] * 20, Goodbye())
    for peer in joined.values():
        peer.leave()
        await until_gone(worker, peer.name)
    return await shutdown.Shutdown(worker).go(receiving)


@pytest.mark.parametrize(("last", "state", "cause"), [
    ([HEARTBEAT] * 20 + [Goodbye()], "finished", ""),
    ([HEARTBEAT] * 20, "failed", "trainer 0 (process 1 on node) was lost: its connection broke and it did not come back in 0.5 s"),
], ids=["it has said Goodbye", "it has not"])
def test_a_trainer_whose_connection_breaks_while_the_run_ends_has_failed_unless_it_said_goodbye(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: list[Message], state: str, cause: str) -> None:
    """It may not have exported the model. What has arrived from it is read first, among what others say."""
    run = make_run(tmp_path, LOAD)

    async def scenario() -> None:
        worker = CoordinatorWorker(run, EPOCH, None)
        worker.core.registry.reconnect_grace_s = 0.5
        with zmq.Context() as context:
            joined = {name: Joined(context, run, worker, name.encode()) for name in ("trainer", *(f"rollout {n}" for n in range(LOAD.workers)))}
            try:
                status = await asyncio.wait_for(ending(worker, joined, last), LIMIT_S)
            finally:
                for peer in joined.values():
                    peer.socket.close(linger=0)
                worker.sockets.close()
                worker.records.close()
        assert status == (1 if cause else 0)

    monkeypatch.setattr(shutdown, "cancel_waiting", lambda *_: None)  # no SLURM here
    asyncio.run(scenario())
    outcome = run.ended()
    assert outcome is not None and outcome["state"] == state and cause in outcome["cause"]
