"""What the servers of a worker are asked for in an update group: to join all its lanes, to take a version bucket by bucket, to leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from workers.config import Config, Interrupt
from workers.messages.broadcasts import JoinUpdateGroup, lane_name
from workers.messages.parts import Version
from workers.rollout.engines.client import Bucket, EngineClient, EngineError, GroupPlace, NoAnswer

JOIN_S, LEAVE_S = 60.0, 20.0
"""Joining: more than the coordinator, and the trainer, allow for it. When they give it up, the servers' attempts end by themselves."""
GIVES_UP_S = 10.0
"""So much longer than the trainer a server is waited for: when the trainer gives up, the servers' calls fail, and they need not be ended."""
Shapes = Mapping[str, tuple[int, ...]]


async def join(clients: Sequence[EngineClient], message: JoinUpdateGroup, ranks_each: int) -> str:
    """Have all servers join, lane after lane, each with `ranks_each` ranks; returns what has gone wrong."""
    deadline = time.monotonic() + JOIN_S

    async def enter(client: EngineClient, first_rank: int) -> None:
        for lane in _lanes(message):
            place = GroupPlace(lane, message.address, message.port, message.backend, first_rank, message.num_ranks)
            await client.join_group(place, _left(deadline))

    joins = [enter(client, message.first_rank + number * ranks_each) for number, client in enumerate(clients)]
    outcomes = await asyncio.gather(*joins, return_exceptions=True)
    return next((str(outcome) for outcome in outcomes if isinstance(outcome, Exception)), "")


async def leave(clients: Sequence[EngineClient], message: JoinUpdateGroup) -> None:
    """Have these servers leave, those that can."""
    await asyncio.gather(*(client.leave_group(lane, LEAVE_S) for client in clients for lane in _lanes(message)), return_exceptions=True)


def taking(config: Config, message: JoinUpdateGroup, version: Version, shapes: Shapes) -> Callable[[EngineClient], Awaitable[None]]:
    """What has a server take `version`; `shapes`: of the model's tensors. It raises `EngineError`."""
    buckets = [_bucket(config, message, number, shapes) for number in range(len(message.buckets))]

    async def take(client: EngineClient) -> None:
        deadline = time.monotonic() + config.weights.timeout_s + GIVES_UP_S
        try:
            await client.begin_update(_left(deadline))
            for number, bucket in enumerate(buckets, 1):
                last, flush = number == len(buckets), config.engine.interrupt is not Interrupt.in_place
                await client.receive(bucket, version if last else None, last and flush, _left(deadline))
            await client.end_update(_left(deadline))
        except NoAnswer:
            raise
        except EngineError:
            with contextlib.suppress(EngineError):
                await client.end_update(LEAVE_S)
            raise

    return take


def _lanes(message: JoinUpdateGroup) -> list[str]:
    return [lane_name(message.group, lane) for lane in sorted({bucket.lane for bucket in message.buckets})]


def _bucket(config: Config, message: JoinUpdateGroup, number: int, shapes: Shapes) -> Bucket:
    lane, pieces = message.buckets[number].lane, message.buckets[number].pieces
    cut = any(tuple(piece.shape) != shapes[piece.name] for piece in pieces)
    return Bucket(lane_name(message.group, lane), [piece.name for piece in pieces], [piece.shape for piece in pieces], config.engine.dtype.value,
                  [piece.starts for piece in pieces] if cut else None)


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
