"""Any rank but rank 0: does what rank 0 says (orders.py), together with it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from workers.config import Config
from workers.messages.from_coordinator import Finish
from workers.messages.from_worker import CheckpointRequest
from workers.messages.parts import Version
from workers.run import checkpoints
from workers.run.folder import RunFolder
from workers.slurm.job import Place
from workers.slurm.signals import Signals
from workers.trainer.background import LEAVE_S, PartSaver
from workers.trainer.coordinator_link.endings import RunEnded
from workers.trainer.coordinator_link.share_link import ShareLink
from workers.trainer.heldout import HeldoutExamples
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import collectives, process_group
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.megatron.parallel.stop_gate import StepAbandoned
from workers.trainer.orders import BroadcastWeights, MeasureHeldout, Order, PublishWeights, ShareWeights, TrainStep, WriteAdapters, WriteWeights
from workers.trainer.ranks import Meeting, roster_of, spread_in_copy, wait_for_meeting
from workers.trainer.selftest.self_test import SelfTest, SelfTestFailed
from workers.trainer.train_step import train_batch
from workers.trainer.weights.lanes import Lanes
from workers.trainer.weights.rank_publisher import RankPublisher
from workers.transport.addresses import address_of, interface_of
from workers.weights.update_group import GroupError


def follow(run: RunFolder, config: Config, element: Place, signals: Signals) -> str:
    """The life of any other rank: do what rank 0 says until it says Finish; returns its cause. Raises `RanksError`."""
    meeting = wait_for_meeting(run, element)
    if meeting is None:
        return ""
    own = interface_of(address_of(config.transport.interface))
    gang = Gang(element.rank, element.world_size, element.local_rank, meeting.address, meeting.port, own, roster_of(run, element))
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
        self._lanes = Lanes(config, self._engine.architecture, self._engine.iter_shards) if config.broadcasts else None
        self._saver = PartSaver(self._engine, config.checkpoint.background)
        self._link: ShareLink | None = None
        if process_group.is_leader():
            self._link = ShareLink(run, config.batch_transport, meeting.epoch, process_group.copy_index(), process_group.num_copies())
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
            if self._lanes is not None:
                self._lanes.close(LEAVE_S)
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
                case BroadcastWeights() if self._lanes is not None:
                    with contextlib.suppress(GroupError):  # rank 0 has it too, and tells the coordinator
                        self._lanes.broadcast(order.group)
                case WriteWeights():
                    for _ in self._engine.iter_hf_tensors():
                        pass
                case WriteAdapters():
                    for _ in self._engine.iter_adapter_tensors():
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
