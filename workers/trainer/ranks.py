"""The ranks of one training element: how they find each other, and what rank 0 tells the others.

    rank 0      claims the epoch --> rendezvous/ranks.<job>.<restarts>.json (address, port, checkpoint) --> the others join
    rank 0      TrainStep | PublishWeights | CheckpointRequest | ... | Finish --broadcast of some bytes--> rank r: does its part
    coordinator Batch (a share for each copy of the model) --> the copy's leader (share_link.py) --broadcast in the copy--> its other ranks

A rank that dies ends the element: srun kills the others (--kill-on-bad-exit), and so would their broken connections.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import msgspec

from workers.config import Config
from workers.messages.codec import Decoder, pack
from workers.messages.types import Batch, CheckpointRequest, Finish, Version
from workers.run import checkpoints
from workers.run.files import write_once
from workers.run.folder import RunFolder
from workers.slurm.job import Place
from workers.slurm.signals import Signals
from workers.trainer.background import LEAVE_S, PartSaver
from workers.trainer.coordinator_link.client import RunEnded
from workers.trainer.coordinator_link.share_link import ShareLink
from workers.trainer.heldout import HeldoutExamples
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import collectives, process_group
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.megatron.parallel.stop import StepAbandoned
from workers.trainer.selftest.selftest import SelfTest, SelfTestFailed
from workers.trainer.train_step import train_batch
from workers.trainer.weights.rank_publisher import PublishWeights, RankPublisher, ShareWeights
from workers.transport.addresses import address_of, interface_of

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


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Take training step `step`; the leaders fetch their shares of its batch."""

    step: int


class WriteWeights(msgspec.Struct, frozen=True, tag=True):
    """Give rank 0 the weights, to export."""


class MeasureHeldout(msgspec.Struct, frozen=True, tag=True):
    """Take part in measuring the held-out loss of a supervised run."""


class StillThere(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do yet."""


Order = TrainStep | PublishWeights | ShareWeights | WriteWeights | MeasureHeldout | StillThere | CheckpointRequest | Finish


class Ranks:
    """Rank 0's view of the others; without others it does nothing."""

    def __init__(self, gang: Gang | None = None) -> None:
        self.gang = gang
        self.others = gang is not None and gang.world_size > 1

    def tell(self, order: Order) -> None:
        """Have the others do their part of `order`."""
        if self.others:
            collectives.broadcast_bytes(msgspec.msgpack.encode(order))


def spread_in_copy(share: Batch | None) -> Batch:
    """The share of this rank's copy of the model, from its leader to all of its ranks. They call this together."""
    if process_group.num_copies() == process_group.world_size():
        assert share is not None
        return share
    content = collectives.broadcast_in_copy(pack(share) if share is not None else None)
    if share is not None:
        return share
    received = Decoder(Batch, MAX_BYTES).unpack(content)
    assert isinstance(received, Batch)
    return received


def gather(run: RunFolder, config: Config, element: Place, epoch: int, checkpoint: Path | None) -> Ranks:
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


def follow(run: RunFolder, config: Config, element: Place, signals: Signals) -> str:
    """The life of any other rank: do what rank 0 says until it says Finish; returns its cause. Raises `RanksError`."""
    meeting = _wait_for_meeting(run, element)
    if meeting is None:
        return ""
    own = interface_of(address_of(config.transport.interface))
    gang = Gang(element.rank, element.world_size, element.local_rank, meeting.address, meeting.port, own)
    return Follower(run, config, gang, meeting, signals).live()


class Follower:
    """Any rank but rank 0. The leader of a copy has a link to the coordinator for its share of each batch."""

    def __init__(self, run: RunFolder, config: Config, gang: Gang, meeting: Meeting, signals: Signals) -> None:
        self._signals = signals
        self._engine = MegatronEngine(config, Path(config.model.path), gang)
        if meeting.checkpoint:
            self._engine.load_state(Path(meeting.checkpoint) / checkpoints.TRAINER)
        begins_with = Version(meeting.epoch, self._engine.num_steps)
        self._self_test = SelfTest(config, self._engine.architecture, begins_with, lambda _: None)  # rank 0 tells
        self._heldout = HeldoutExamples(config, self._engine) if config.supervised else None
        self._publisher = None if config.supervised else RankPublisher(run, config, self._engine, meeting.epoch)
        self._saver = PartSaver(self._engine, config.checkpoint.background)
        self._link: ShareLink | None = None
        if process_group.is_leader():
            self._link = ShareLink(run, config.transport, meeting.epoch, process_group.copy_index(), process_group.num_copies())
            self._link.ask(self._engine.num_steps)

    def live(self) -> str:
        """Do what rank 0 says until it says Finish, or the run ends; returns the cause."""
        try:
            cause = self._follow()
        except RunEnded as end:
            cause = str(end)
        finally:
            if self._publisher is not None:
                self._publisher.close()
        if self._link is not None:
            self._link.close(cause)
        self._saver.writing.abandon(LEAVE_S)
        self._engine.close()
        return cause

    def _follow(self) -> str:
        decoder = msgspec.msgpack.Decoder(Order)
        while True:
            order = decoder.decode(collectives.broadcast_bytes(None))
            match order:
                case TrainStep():
                    self._train(order.step)
                case PublishWeights() if self._publisher is not None:
                    self._publisher.publish(order)
                case ShareWeights() if self._publisher is not None:
                    self._publisher.share(order)
                case WriteWeights():
                    for _ in self._engine.iter_hf_tensors():
                        pass
                case MeasureHeldout() if self._heldout is not None:
                    self._heldout.measure()
                case CheckpointRequest():
                    self._saver.follow(Path(order.folder) / checkpoints.TRAINER, order.final)
                case Finish():
                    return order.cause

    def _train(self, step: int) -> None:
        share = None
        if self._link is not None:
            share = self._link.fetch(step)
            self._link.ask(step + 1)  # it comes once rank 0 has asked, too
        with contextlib.suppress(StepAbandoned, SelfTestFailed):  # rank 0 has it too, and says what follows
            train_batch(self._engine, spread_in_copy(share), lambda: self._signals.received is not None, self._self_test)


def _meeting_file(run: RunFolder, element: Place) -> Path:
    return run.rendezvous / f"ranks.{element.job}.{element.restarts}.json"


def _wait_for_meeting(run: RunFolder, element: Place) -> Meeting | None:
    deadline, path = time.monotonic() + MEET_S, _meeting_file(run, element)
    while time.monotonic() < deadline:
        names = {entry.name for entry in run.rendezvous.iterdir()}  # a listing, because shared file systems cache missing names
        if path.name in names:
            return msgspec.json.decode(path.read_bytes(), type=Meeting)
        if run.ended() is not None:
            return None
        time.sleep(1.0)
    raise RanksError(f"rank {element.rank} of job {element.name}: rank 0 has not said where to meet in {MEET_S:g} s. Look at the element's log")
