"""Rewards in elements of their own: real sockets, real processes, some of them really killed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.asyncio

from tests.wire.fleet import TRANSPORT, make_config, make_run, playing
from workers.config import ConfigError, RewardConfig
from workers.messages.from_coordinator import Drain, Finish
from workers.messages.from_worker import Draining, Goodbye, Heartbeat, Register, WorkerFailed
from workers.messages.judging import FromElement, ScoreWanted, ToElement
from workers.messages.parts import Role
from workers.reward.pool.messages import PYTHON_TOOL
from workers.reward.pool.pool import RewardPool, VerifierError
from workers.reward.remote import load_balancer
from workers.reward.remote.client import MAX_LOST, RemoteRewards
from workers.reward.remote.element import RewardElement
from workers.reward.remote.service import RewardService
from workers.run.folder import RunFolder
from workers.slurm import termination
from workers.slurm.termination import Termination
from workers.transport.element_sockets import ElementLinks, ElementSocket, LinkLost
from workers.transport.keys import read_keys

HOSTILE = "tests.support.hostile_verifiers:"
WAIT_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


@pytest.fixture
def note(tmp_path: Path) -> Path:
    """Where a verifier that hangs writes the id of its process, once it runs."""
    return tmp_path / "note"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balancer, "REST_S", 0.05)


class Serving:
    """A reward element without a coordinator, in this process."""

    def __init__(self, run: RunFolder, config: RewardConfig) -> None:
        self.socket, self.pool = ElementSocket(run, TRANSPORT, ToElement), RewardPool(config)
        self.service = RewardService(self.socket, self.pool)
        self.endpoint = self.socket.endpoint


@asynccontextmanager
async def held_up(folder: Path) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """An address for `meets`, and the connections of those that are there: closing one lets its verifier return."""
    guests: list[asyncio.StreamWriter] = []
    meeting = await asyncio.start_unix_server(lambda _, writer: guests.append(writer), str(folder / "meeting"))
    try:
        yield str(folder / "meeting"), guests
    finally:
        for guest in guests:
            guest.close()
        meeting.close()


@asynccontextmanager
async def serving(run: RunFolder, **changes: object) -> AsyncIterator[Serving]:
    one = Serving(run, RewardConfig(**{"timeout_s": WAIT_S, "max_retries": 0, **changes}))  # type: ignore[arg-type]
    async with one.pool:
        task = asyncio.create_task(one.service.serve())
        try:
            yield one
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await one.service.close()
            for _ in range(5):  # pyzmq's authenticator lets go of its file descriptor later; the next sockets may get the same number
                await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)  # a pace of looking, not a wait for anything


async def written(note: Path) -> int:
    await until(lambda: note.exists() and note.read_text())
    return int(note.read_text())


async def bounded(task: asyncio.Task[float]) -> float:
    return await asyncio.wait_for(task, WAIT_S)


def asked(rewards: RemoteRewards, verifier: str = "good", completion: str = "1", reference: str = "") -> asyncio.Task[float]:
    return asyncio.create_task(rewards.score("prompt", completion, reference, HOSTILE + verifier))


async def test_scores_come_from_all_elements(run: RunFolder) -> None:
    async with serving(run) as one, serving(run) as other, RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
        rewards.listed([one.endpoint, other.endpoint])
        scores = [index / 40 for index in range(40)]
        async with asyncio.timeout(WAIT_S):
            assert await asyncio.gather(*(asked(rewards, "good", str(score)) for score in scores)) == scores
        assert one.pool.num_scored + other.pool.num_scored == rewards.num_scored == 40
        assert abs(one.pool.num_scored - other.pool.num_scored) <= 2, "by requests in flight"
        assert (rewards.num_waiting, rewards.waiting_for, one.service.num_requests) == (0, "", 0)


async def test_texts_of_any_length_arrive(run: RunFolder) -> None:
    async with serving(run) as one, RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
        rewards.listed([one.endpoint])
        assert await asyncio.wait_for(rewards.score("p" * 3_000_000, "1", "r" * 3_000_000, f"{HOSTILE}good"), WAIT_S) == pytest.approx(1.0)
        assert await asyncio.wait_for(rewards.score("\ud800", "1\udfff", "1", "numeric"), WAIT_S) == 1.0, "half a surrogate pair too"


async def test_programs_run_at_an_element(run: RunFolder) -> None:
    async with serving(run) as one, RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
        try:
            await one.pool.load(PYTHON_TOOL)
        except VerifierError as error:
            pytest.skip(f"no sandbox on this machine: {error}")
        rewards.listed([one.endpoint])
        assert await asyncio.wait_for(rewards.execute("print(6 * 7)"), WAIT_S) == "42"
        assert (rewards.num_executed, one.pool.num_executed) == (1, 1)


async def test_a_verifier_that_fails_is_not_tried_elsewhere(run: RunFolder) -> None:
    async with serving(run) as one, serving(run) as other, RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
        rewards.listed([one.endpoint, other.endpoint])
        with pytest.raises(VerifierError, match="hostile_verifiers:raises' gave no answer in its only attempt.*LookupError: no such thing"):
            await bounded(asked(rewards, "raises"))
        with pytest.raises(ConfigError, match="no such verifier"):
            await rewards.score("", "", "", "unheard_of")
        assert one.pool.num_failed + other.pool.num_failed == rewards.num_failed == 1


async def test_requests_wait_for_an_element_and_say_so(run: RunFolder) -> None:
    async with RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
        waiting = [asked(rewards) for _ in range(3)]
        await until(lambda: rewards.num_waiting == 3)
        assert rewards.waiting_for == "a reward element to start (reward.placement=array)"
        rewards.listed(["tcp://127.0.0.1:1"])
        await until(lambda: "can be reached from here: the reward element at tcp://127.0.0.1:1" in rewards.waiting_for)
        assert "transport.interface" in rewards.waiting_for
        rewards.listed([])
        async with serving(run) as one:
            rewards.listed([one.endpoint])
            assert [await bounded(task) for task in waiting] == [1.0] * 3
            assert rewards.waiting_for == "" and rewards.wait_s > 0


async def test_what_a_killed_element_was_asked_is_asked_elsewhere(run: RunFolder, note: Path) -> None:
    """The second element comes only after the first has been killed: meanwhile there is none at all."""
    with subprocess.Popen([sys.executable, "-m", "tests.wire.reward_process", str(run.path)], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            endpoint = (await asyncio.to_thread(first.stdout.readline)).strip()
            assert endpoint, "the element did not start"
            async with RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
                rewards.listed([endpoint])
                task = asked(rewards, "hangs_once", reference=str(note))
                at_work = await written(note)
                first.kill()
                await until(lambda: rewards.num_waiting == 1)
                assert not task.done()
                async with serving(run) as second:
                    rewards.listed([endpoint, second.endpoint])
                    assert await bounded(task) == 1.0
                    assert (second.pool.num_scored, rewards.num_failed) == (1, 0)
        finally:
            first.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(at_work).wait(WAIT_S)  # it dies with its element


async def test_a_request_that_ends_every_element_is_given_up(run: RunFolder) -> None:
    async with RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
        task = asked(rewards)
        for _ in range(MAX_LOST):
            socket = ElementSocket(run, TRANSPORT, ToElement)
            rewards.listed([socket.endpoint])
            async with asyncio.timeout(WAIT_S):
                _, request = await socket.receive()
            assert isinstance(request, ScoreWanted)
            socket.close()
            for _ in range(5):
                await asyncio.sleep(0)
        with pytest.raises(VerifierError, match=f"{MAX_LOST} reward elements were lost while they worked on this request"):
            await bounded(task)
        assert rewards.num_failed == 1


async def test_cancelling_kills_the_process_at_the_element(run: RunFolder, note: Path) -> None:
    async with serving(run) as one, RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
        rewards.listed([one.endpoint])
        task = asked(rewards, "hangs", reference=str(note))
        await written(note)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: one.pool.num_killed == 1 and not one.service.num_requests)
        assert await bounded(asked(rewards)) == 1.0


async def test_an_element_that_drains_finishes_what_it_has_begun(run: RunFolder, tmp_path: Path) -> None:
    async with (serving(run) as old, serving(run) as new, RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards,
                held_up(tmp_path) as (address, let_go)):
        rewards.listed([old.endpoint])
        begun = asked(rewards, "meets", reference=address)
        await until(lambda: let_go)
        rewards.listed([new.endpoint])  # what the coordinator says once the element is draining
        assert await bounded(asked(rewards)) == 1.0
        assert (old.pool.num_scored, new.pool.num_scored) == (0, 1)
        let_go.pop().close()
        assert await bounded(begun) == 1.0
        assert old.pool.num_scored == 1


async def test_closing_ends_whoever_waits(run: RunFolder, note: Path) -> None:
    async with serving(run) as one:
        async with RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
            rewards.listed([one.endpoint])
            busy = asked(rewards, "hangs", reference=str(note))
            await written(note)
            rewards.listed([])
            waiting = asked(rewards)
            await until(lambda: rewards.num_waiting == 1)
        results = await asyncio.gather(busy, waiting, return_exceptions=True)
        assert [str(result) for result in results] == ["the reward pool is closed"] * 2


async def test_what_is_no_request_does_no_harm(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    server, client = read_keys(run, "server"), read_keys(run, "client")
    context = zmq.asyncio.Context()
    try:
        async with serving(run) as one, RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
            with context.socket(zmq.DEALER) as dealer:
                dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = server.public, client.public, client.secret
                dealer.connect(one.endpoint)
                await dealer.send_multipart([b"no message"])
                rewards.listed([one.endpoint])
                assert await bounded(asked(rewards)) == 1.0
                output = ""
                async with asyncio.timeout(WAIT_S):
                    while "a rollout worker sent what is no request" not in output:
                        output += capfd.readouterr().out
                        await asyncio.sleep(0.005)
    finally:
        context.destroy(linger=0)


async def test_without_the_keys_of_the_run_nothing_is_answered(run: RunFolder, tmp_path: Path) -> None:
    stranger = ElementLinks(make_run(tmp_path / "other"), TRANSPORT, FromElement)
    try:
        async with serving(run) as one:
            link = stranger.open(one.endpoint)
            await link.send(ScoreWanted(0, "numeric", "", "1", "1"))
            with pytest.raises(LinkLost):
                await asyncio.wait_for(link.receive(), WAIT_S)
            assert one.pool.num_scored == 0
            link.close()
    finally:
        stranger.close()


# -- an element with its coordinator -------------------------------------------------------------------------------------

@asynccontextmanager
async def element_at_work(run: RunFolder, local: bool = False, **changes: object) -> AsyncIterator[tuple[RewardElement, asyncio.Task[Termination]]]:
    config = make_config(run.path, local=local)
    config.reward = RewardConfig(**{"timeout_s": WAIT_S, "max_retries": 0, **changes})  # type: ignore[arg-type]
    config.cluster.signal_delay_s = int(2 * WAIT_S)
    element = RewardElement(run, config)
    task = asyncio.create_task(element.work())
    try:
        yield element, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_an_element_registers_where_it_serves_and_ends_with_the_run(run: RunFolder) -> None:
    async with playing(run, 1) as play, element_at_work(run) as (_, task), RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards:
        await play.until(lambda: play.all(Heartbeat))
        (register,) = play.all(Register)
        assert register.role is Role.reward and register.serves.startswith("tcp://127.0.0.1:")
        rewards.listed([register.serves])
        assert await rewards.score("", " 57", "57", "numeric") == 1.0
        await play.until(lambda: (status := play.all(Heartbeat)[-1].status).reward_busy_s > 0 and status.waiting_for == "requests")
        await play.say(Finish(""))
        assert await asyncio.wait_for(task, WAIT_S) == Termination("finished", "")
        await play.until(lambda: play.all(Goodbye))


async def test_an_element_that_is_told_to_go_answers_first(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "AFTER_USR2_S", WAIT_S)
    async with (playing(run, 1) as play, element_at_work(run) as (_, task), RemoteRewards(run, TRANSPORT, RewardConfig()) as rewards,
                held_up(tmp_path) as (address, let_go)):
        await play.until(lambda: play.all(Heartbeat))
        rewards.listed([play.all(Register)[0].serves])
        begun = asked(rewards, "meets", reference=address)
        await until(lambda: let_go)
        await play.say(Drain("the run pauses"))
        await play.until(lambda: play.all(Draining))
        let_go.pop().close()
        assert await bounded(begun) == 1.0
        assert await asyncio.wait_for(asyncio.shield(task), WAIT_S) == Termination("drained", "the run pauses")
        await play.until(lambda: play.all(Goodbye))
        assert play.all(Goodbye) == [Goodbye("the run pauses")]


async def test_an_element_whose_node_lacks_something_says_so(run: RunFolder) -> None:
    async with playing(run, 1) as play, element_at_work(run, verifier="no_such_module:function") as (_, task):
        with pytest.raises(VerifierError, match="No module named 'no_such_module'"):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)
        await play.until(lambda: play.all(WorkerFailed))
        assert "No module named 'no_such_module'" in play.all(WorkerFailed)[0].cause
