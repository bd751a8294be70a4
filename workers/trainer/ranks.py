"""The ranks of one training element: how they find each other, and how rank 0 tells the others what to do (orders.py, follower.py).

    rank 0      claims the epoch --> rendezvous/ranks.<job>.<restarts>.json (address, port, checkpoint) --> the others join
    rank 0      TrainStep | PublishWeights | CheckpointRequest | ... | Finish --broadcast of some bytes--> rank r: does its part
    coordinator Batch (a share for each copy of the model) --> the copy's leader (share_link.py) --broadcast in the copy--> its other ranks

A rank that dies ends the element: srun kills the others (--kill-on-bad-exit), and so would their broken connections.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from workers.config import Config
from workers.messages.codec import MANY_ARRAYS, Decoder, pack
from workers.messages.from_coordinator import Batch
from workers.run.files import write_once
from workers.run.folder import RunFolder
from workers.run.outage import patiently
from workers.slurm.job import Place
from workers.trainer.megatron.parallel import collectives, process_group, store_guard
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.orders import Order, StillThere
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


class Ranks:
    """Rank 0's view of the others; without others it does nothing."""

    def __init__(self, gang: Gang | None = None) -> None:
        self.gang = gang
        self.others = gang is not None and gang.world_size > 1

    def tell(self, order: Order) -> None:
        """Have the others do their part of `order`."""
        if self.others:
            collectives.broadcast_bytes(msgspec.msgpack.encode(order))

    def keep_waiting(self) -> bool:
        """Tell the others that more is to come; False, since whoever waits for a disk (`outage.patiently`) is in no hurry."""
        self.tell(StillThere())
        return False


def spread_in_copy(share: Batch | None) -> Batch:
    """The share of this rank's copy of the model, from its leader to all of its ranks. They call this together."""
    if process_group.num_copies() == process_group.world_size():
        assert share is not None
        return share
    content = collectives.broadcast_in_copy(pack(share) if share is not None else None)
    if share is not None:
        return share
    received = Decoder(Batch, MAX_BYTES, MANY_ARRAYS).unpack(content)
    assert isinstance(received, Batch)
    return received


def gather(run: RunFolder, config: Config, element: Place, epoch: int, checkpoint: Path | None) -> Ranks:
    """Called by rank 0: tell the others where to meet."""
    if element.world_size == 1:
        return Ranks()
    address = address_of(config.transport.interface)
    listener = store_guard.reserve(address)
    port = listener.getsockname()[1]
    meeting, roster = Meeting(epoch, address, port, str(checkpoint or "")), roster_of(run, element)
    patiently(run, lambda: roster.mkdir(mode=0o700, exist_ok=True))
    patiently(run, lambda: write_once(_meeting_file(run, element), msgspec.json.encode(meeting)))
    return Ranks(Gang(0, element.world_size, element.local_rank, address, port, interface_of(address), roster, listener))


def roster_of(run: RunFolder, element: Place) -> Path:
    """The folder in which the ranks of an element say where they come from."""
    return _meeting_file(run, element).with_suffix(".roster")


def _meeting_file(run: RunFolder, element: Place) -> Path:
    return run.rendezvous / f"ranks.{element.job}.{element.restarts}.json"


def wait_for_meeting(run: RunFolder, element: Place) -> Meeting | None:
    """What rank 0 has said, for any other rank; None where the run has ended. Raises `RanksError`."""
    deadline, path = time.monotonic() + MEET_S, _meeting_file(run, element)
    while time.monotonic() < deadline:
        # A listing, because shared file systems cache missing names.
        names = patiently(run, lambda: {entry.name for entry in run.rendezvous.iterdir()})
        if path.name in names:
            return msgspec.json.decode(path.read_bytes(), type=Meeting)
        if patiently(run, run.ended) is not None:
            return None
        time.sleep(1.0)
    raise RanksError(f"rank {element.rank} of job {element.name}: rank 0 has not said where to meet in {MEET_S:g} s. Look at the element's log")
