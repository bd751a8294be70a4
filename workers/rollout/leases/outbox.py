"""What this worker has to say of its leases, kept until the coordinator has it.

    add --> kept --deliver--> coordinator --Acknowledged--> forgotten          (again every RESEND_S, and at each welcome)
                 --spill----> partials/ of the run folder                      (the worker leaves without having been heard)

Nothing is sent while no coordinator is in touch: what is kept goes to the next one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from workers.messages.codec import pack
from workers.messages.from_worker import GroupFailed, GroupFinished, GroupParked, GroupRejected
from workers.messages.parts import HeldLease, Lease, Message
from workers.rollout.engines.group_routing import Key, key_of
from workers.run.files import write_atomic
from workers.run.folder import RunFolder

Result = GroupFinished | GroupRejected | GroupFailed | GroupParked
RESEND_S = 5.0
LOOK_S = 0.25


class Link(Protocol):
    """The way to the coordinator."""

    @property
    def in_touch(self) -> bool:
        """Whether there is a coordinator that hears us."""

    async def send(self, message: Message) -> None:
        """Send to it."""


@dataclass
class Kept:
    """A result and when it was sent last (never: minus infinity)."""

    lease: HeldLease
    message: Result
    sent: float = float("-inf")


class Results:
    """Results by lease. Everything is sent by `deliver`, which has to run as a task of its own."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._kept: dict[Key, Kept] = {}
        self._news = asyncio.Event()
        self._acknowledged = asyncio.Event()

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def held(self) -> list[HeldLease]:
        """The leases whose results are kept."""
        return [kept.lease for kept in self._kept.values()]

    def add(self, lease: Lease, message: Result) -> None:
        """Keep a result, and send it as soon as a coordinator is in touch."""
        held = HeldLease(lease.group_id, lease.attempt, lease.purpose, lease.version)
        self._kept[key_of(lease)] = Kept(held, message)
        self._news.set()

    def acknowledged(self, key: Key) -> None:
        """The coordinator has it, or does not want it: forget it."""
        self._kept.pop(key, None)
        self._acknowledged.set()

    def send_again(self) -> None:
        """Send everything now: the coordinator is new, or time is short."""
        for kept in self._kept.values():
            kept.sent = float("-inf")
        self._news.set()

    async def deliver(self) -> None:
        """Send what is due, for as long as the worker runs."""
        while True:
            self._news.clear()
            for kept in list(self._kept.values()):
                if self._link.in_touch and time.monotonic() - kept.sent > RESEND_S:
                    kept.sent = time.monotonic()
                    await self._link.send(kept.message)
            await _set_within(self._news, LOOK_S)

    async def delivered(self, limit_s: float) -> bool:
        """Wait until everything is acknowledged; false once no coordinator is in touch, or after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while self._kept and self._link.in_touch and time.monotonic() < deadline:
            self._acknowledged.clear()
            await _set_within(self._acknowledged, LOOK_S)
        return not self._kept

    def spill(self, run: RunFolder) -> int:
        """Write every finished, rejected or parked group to the run folder, for the next coordinator; returns how many."""
        num_spilled = 0
        for (group_id, attempt), kept in list(self._kept.items()):
            if not isinstance(kept.message, GroupFailed):
                write_atomic(run.partials / f"{group_id}.{attempt}.msgpack", pack(kept.message))
                num_spilled += 1
            del self._kept[group_id, attempt]
        return num_spilled


async def _set_within(event: asyncio.Event, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):  # not wait_for: before Python 3.12 that loses a cancellation that comes with the event
            return await event.wait()
    except TimeoutError:
        return False
