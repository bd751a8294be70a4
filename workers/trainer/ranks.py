"""The ranks of one training element: how they find each other, and what rank 0 tells the others.

    rank 0   claims the epoch --> rendezvous/ranks.<job>.<restarts>.json (address, port, checkpoint) --> the others join
    rank 0   Batch | CheckpointRequest | Finish --broadcast of bytes--> rank r: train_step | save_state | leave

A rank that dies ends the element: srun kills the others (--kill-on-bad-exit), and so would their broken connections.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import msgspec

from workers import checkpoints
from workers.config import Config
from workers.files import write_once
from workers.messages.codec import Decoder, pack
from workers.messages.types import Batch, CheckpointRequest, Finish, HeartbeatReply, Message
from workers.rundir import RunFolder
from workers.signals import Signals
from workers.slurm import SlurmElement
from workers.trainer.megatron import process_group
from workers.trainer.megatron.checkpoint import CheckpointError
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.gang import Gang
from workers.trainer.megatron.stop import StepAbandoned
from workers.trainer.train_batch import train_batch
from workers.transport.interface import address_of, interface_of

MEET_S = 3600.0
IDLE_S = 60.0
MAX_BYTES = 1 << 40


class RanksError(RuntimeError):
    """The ranks of an element did not find each other."""


class Meeting(msgspec.Struct, frozen=True):
    """What rank 0 tells the others to begin with; `checkpoint`: the folder to go on from, '' for none."""

    epoch: int
    address: str
    port: int
    checkpoint: str


class Ranks:
    """Rank 0's view of the others; without others it does nothing."""

    def __init__(self, gang: Gang | None = None) -> None:
        self.gang = gang
        self.others = gang is not None and gang.world_size > 1

    def tell(self, message: Message) -> None:
        """Have the others do their part of `message`."""
        if self.others:
            process_group.broadcast_bytes(pack(message))

    def idle(self) -> None:
        """Nothing to do yet, but still there."""
        self.tell(HeartbeatReply(None, known=True))


def gather(run: RunFolder, config: Config, element: SlurmElement, epoch: int, checkpoint: Path | None) -> Ranks:
    """Called by rank 0: tell the others where to meet."""
    if element.world_size == 1:
        return Ranks()
    address = address_of(config.transport.interface)
    with socket.socket() as probe:  # a free port; taken between here and the store's listening, the element fails and the next one tries
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    meeting = Meeting(epoch, address, port, str(checkpoint or ""))
    write_once(_meeting_file(run, element), msgspec.json.encode(meeting))
    return Ranks(Gang(0, element.world_size, element.local_rank, address, port, interface_of(address)))


def follow(run: RunFolder, config: Config, element: SlurmElement, signals: Signals) -> str:
    """The life of any other rank: do what rank 0 says until it says Finish; returns its cause. Raises `RanksError`."""
    meeting = _wait_for_meeting(run, element)
    if meeting is None:
        return ""
    own = interface_of(address_of(config.transport.interface))
    gang = Gang(element.rank, element.world_size, element.local_rank, meeting.address, meeting.port, own)
    engine = MegatronEngine(config, Path(config.model.path), gang)
    if meeting.checkpoint:
        engine.load_state(Path(meeting.checkpoint) / checkpoints.TRAINER)
    decoder = Decoder(Batch | CheckpointRequest | Finish | HeartbeatReply, MAX_BYTES)
    while True:
        message = decoder.unpack(process_group.broadcast_bytes(None))
        match message:
            case Batch():
                try:
                    train_batch(engine, config, message, lambda: signals.received is not None)
                except StepAbandoned:
                    continue
            case CheckpointRequest():
                with contextlib.suppress(CheckpointError):  # rank 0 has the same one, and decides
                    engine.save_state(Path(message.folder) / checkpoints.TRAINER)
            case Finish():
                return message.cause


def _meeting_file(run: RunFolder, element: SlurmElement) -> Path:
    return run.rendezvous / f"ranks.{element.job}.{element.restarts}.json"


def _wait_for_meeting(run: RunFolder, element: SlurmElement) -> Meeting | None:
    deadline, path = time.monotonic() + MEET_S, _meeting_file(run, element)
    while time.monotonic() < deadline:
        names = {entry.name for entry in run.rendezvous.iterdir()}  # a listing, because shared file systems cache missing names
        if path.name in names:
            return msgspec.json.decode(path.read_bytes(), type=Meeting)
        if run.ended() is not None:
            return None
        time.sleep(1.0)
    raise RanksError(f"rank {element.rank} of job {element.name}: rank 0 has not said where to meet in {MEET_S:g} s. Look at the element's log")
