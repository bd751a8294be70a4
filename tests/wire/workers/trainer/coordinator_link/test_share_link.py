"""A leader's connection to the coordinator over real TCP: its share comes when it is there, and nothing that breaks leaves it waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.groups import make_group
from tests.wire.fleet import TRANSPORT, make_run, playing
from workers.config import Config, TransportConfig
from workers.coordinator.training.batch_split import make_shares
from workers.messages.from_coordinator import Batch, Finish, Refused
from workers.messages.from_worker import BatchRequest, Goodbye, Heartbeat, Register
from workers.messages.parts import Role
from workers.run.folder import RunFolder
from workers.trainer.coordinator_link import share_link
from workers.trainer.coordinator_link.endings import RunEnded
from workers.trainer.coordinator_link.share_link import ShareLink

WAIT_S = 120.0
GROUPS = [make_group(f"g{index}", 0, [0] * (1 + index % 3)) for index in range(6)]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


@asynccontextmanager
async def linked(run: RunFolder, transport: TransportConfig = TRANSPORT) -> AsyncIterator[ShareLink]:
    """The leader of copy 1 of 2, in epoch 1."""
    link = ShareLink(run, transport, 1, 1, 2)
    try:
        yield link
    finally:
        await asyncio.to_thread(link.close, "the test is over")


def share(step: int) -> Batch:
    config = Config()
    config.trainer.num_minibatches = 1
    return make_shares(config, step, GROUPS, 2, 1.0)[1]


async def fetched(link: ShareLink, step: int, timeout_s: float = WAIT_S) -> Batch:
    return await asyncio.to_thread(link.fetch, step, timeout_s)


async def test_a_share_is_asked_for_early_and_kept_until_it_is_fetched(run: RunFolder) -> None:
    async with playing(run, 1) as play, linked(run) as link:
        link.ask(0)  # before it has connected
        await play.until(lambda: play.all(BatchRequest))
        assert play.all(BatchRequest) == [BatchRequest(0, 1, 2)] and play.received[0] == play.all(Register)[0]
        assert play.all(Register)[0].role is Role.trainer_shard
        link.ask(1)
        await play.until(lambda: len(play.all(BatchRequest)) == 2)
        for step in (0, 0, 1):  # the first one twice: it may have been asked for twice
            await play.say(share(step))
        for step in (0, 1):
            batch = await fetched(link, step)
            assert batch.step == step and [group.group_id for group in batch.groups] == [group.group_id for group in share(step).groups]
            assert batch.minibatches == share(step).minibatches
        await play.until(lambda: len(play.all(Heartbeat)) > 2)
        await asyncio.to_thread(link.close, "time limit")
        await play.until(lambda: play.all(Goodbye))
        assert play.all(Goodbye) == [Goodbye("time limit")]


async def test_a_share_that_was_lost_is_asked_for_again_and_one_that_never_comes_is_an_error(
        run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_link, "ASK_AGAIN_S", 0.1)
    async with playing(run, 1) as play, linked(run) as link:
        link.ask(4)
        fetching = asyncio.create_task(fetched(link, 4))
        await play.until(lambda: len(play.all(BatchRequest)) >= 3)
        await play.say(share(4))
        assert (await fetching).step == 4
        with pytest.raises(TimeoutError, match=r"share 1 of the batch of step 5.*0.3 s.*training job's log"):
            await fetched(link, 5, 0.3)


async def test_a_coordinator_that_dies_is_an_error_for_whoever_waits_and_whoever_comes_later(run: RunFolder) -> None:
    transport = TransportConfig(heartbeat_s=0.1, heartbeat_timeout_s=1.0)
    async with linked(run, transport) as link:
        async with playing(run, 1) as play:
            link.ask(0)
            await play.until(lambda: play.all(BatchRequest))
            fetching = asyncio.create_task(fetched(link, 0))
        for waiting in (fetching, fetched(link, 0), fetched(link, 1)):
            with pytest.raises(ConnectionError, match="share 1: this rank lost the coordinator: .*silent"):
                await waiting


async def test_what_cannot_be_sent_is_an_error_and_a_thread_that_has_ended_holds_nothing(run: RunFolder) -> None:
    async with playing(run, 1) as play, linked(run) as link:
        link.ask(0)
        await play.until(lambda: play.all(BatchRequest))
        link._peer.send(BatchRequest(0, 1, object()))  # type: ignore[arg-type]
        with pytest.raises(ConnectionError, match="share 1: this rank lost the coordinator: .*object"):
            await fetched(link, 0)
        await asyncio.to_thread(link.close, "")
        assert link._peer._loop.is_closed()
        link.ask(1)  # nobody is there, and nothing is lost by it


async def test_the_end_of_the_run_wakes_whoever_waits(run: RunFolder) -> None:
    async with playing(run, 1) as play, linked(run) as link:
        link.ask(0)
        await play.until(lambda: play.all(BatchRequest))
        await play.say(Finish("stopped by someone"))
        with pytest.raises(RunEnded, match="stopped by someone"):
            await fetched(link, 0)


async def test_it_stays_in_touch_while_a_complete_run_is_exported(run: RunFolder) -> None:
    async with playing(run, 1) as play, linked(run) as link:
        link.ask(0)
        await play.until(lambda: play.all(BatchRequest))
        await play.say(Finish(""))
        number = len(play.all(Heartbeat))
        await play.until(lambda: len(play.all(Heartbeat)) > number + 3)
        assert play.all(Goodbye) == []


async def test_a_refusal_and_another_epoch_are_errors(run: RunFolder) -> None:
    async with playing(run, 1) as play, linked(run) as link:
        link.ask(7)
        await play.until(lambda: play.all(BatchRequest))
        await play.say(Refused("batch of step 7: this is step 2"))
        with pytest.raises(ConnectionError, match="refused its request: batch of step 7"):
            await fetched(link, 7)
    async with playing(run, 2), linked(run) as link:
        with pytest.raises(ConnectionError, match="epoch 2 has begun, this is one of epoch 1"):
            await fetched(link, 7)
