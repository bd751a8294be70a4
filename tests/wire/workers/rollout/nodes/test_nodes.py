"""A replica over two nodes: a rollout worker here, and the task on the other node as SLURM starts it, a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.support.model_folders import write_random_model
from tests.support.processes import command_line, lives
from tests.wire.fetching_worker import make_config as fetching_config
from tests.wire.fleet import DEADLINE_S, Weights, ended, engine_state, generated, make_config, make_lease, make_run, playing, working
from tests.wire.weight_nodes import Origin, make_weights, read
from tests.wire.workers.rollout.leases.test_drain import assert_nothing_runs, versions_of
from workers.config import Config, EngineParallelConfig, Interrupt, LoraConfig, TransportConfig
from workers.messages.from_coordinator import Finish, Sources, VersionAnnounced
from workers.messages.from_worker import GroupFailed, GroupFinished, GroupParked, Heartbeat, WorkerFailed
from workers.messages.groups import check_group, check_partial
from workers.messages.parts import Announcement, Version
from workers.model.adapter_shapes import pair_shapes
from workers.rollout.nodes import node as node_module
from workers.rollout.nodes.node import EngineNode, run_node
from workers.rollout.nodes.other_nodes import OtherNodes
from workers.rollout.weights.streaming import Streaming
from workers.run.folder import RunFolder
from workers.slurm.job import Place
from workers.slurm.termination import Termination
from workers.transport.door import PortError
from workers.weights.manifest import WeightsError, make_manifest
from workers.weights.peft_folder import iter_merged, write_peft_folder

V1, V2 = Version(1, 1), Version(1, 2)
TASK = "import sys; from workers.entry import Element; Element('rollout', sys.argv[1])()"
PLACE = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_END_TIME": "9999999999"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(autouse=True)
def first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)


def spread(weights: Weights, heartbeat_timeout_s: float = 30.0, tokens_per_s: float = 600.0) -> Config:
    config = make_config(weights.models[0], tokens_per_s=tokens_per_s)
    config.engine.parallel, config.allocation.replica_size = EngineParallelConfig(tp=2), 2
    config.engine.interrupt = Interrupt.abort  # brings back what servers have
    config.transport = TransportConfig(heartbeat_s=0.1, heartbeat_timeout_s=heartbeat_timeout_s)
    return config


@asynccontextmanager
async def other_node(run: RunFolder, config: Config) -> AsyncIterator[psutil.Process]:
    """The task of the second node; whatever is left of it at the end is killed."""
    run.config.write_bytes(msgspec.json.encode(config))
    task = await asyncio.create_subprocess_exec(sys.executable, "-c", TASK, str(run.path), env=os.environ | {"SLURM_PROCID": "1"})
    try:
        yield psutil.Process(task.pid)
    finally:
        if task.returncode is None:
            task.kill()
        await task.wait()


async def rank_of(node: psutil.Process, but: int = 0) -> psutil.Process:
    """The server's part on that node."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := [child for child in node.children() if child.pid != but and "--node-rank" in command_line(child)]):
            await asyncio.sleep(0.02)
    return found[0]


async def gone(process: psutil.Process) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while lives(process):
            await asyncio.sleep(0.02)


async def test_a_part_that_dies_on_the_other_node_starts_the_server_again_and_its_samples_go_on(run: RunFolder, weights: Weights) -> None:
    config, first = spread(weights), weights.publish(V1)
    async with playing(run, 1, first) as play, other_node(run, config) as node, working(run, config) as (worker, task):
        await play.until_ready()
        await play.lease(make_lease("g1"))
        await generated(worker, 300)
        play.announcement = weights.publish(V2, 1)
        await play.server.publish(VersionAnnounced(play.announcement))
        await play.until(lambda: play.all(Heartbeat)[-1].held == V2)
        base = (await engine_state(worker))["generated_tokens"]
        await generated(worker, base + 100)
        rank = await rank_of(node)
        port = rank.cmdline()[rank.cmdline().index("--dist-init-addr") + 1]
        os.kill(rank.pid, signal.SIGKILL)
        await play.until(lambda: any("node 1" in beat.status.waiting_for and "SIGKILL" in beat.status.waiting_for for beat in play.all(Heartbeat)))
        again = await rank_of(node, but=rank.pid)
        assert port not in again.cmdline(), "a port of its own for each start"
        await play.until(lambda: play.all(GroupFinished))
        await play.until(lambda: play.all(Heartbeat)[-1].held == V2)
        assert play.all(Heartbeat)[-1].status.num_restarts == 1
        await play.say(Finish(""))
        assert await ended(task) == Termination("finished", "")
        await gone(node)
    (finished,) = play.all(GroupFinished)
    check_group(finished.group)
    versions = versions_of(finished.group)
    assert finished.group.lengths.tolist() == [600] * 3 and set(versions) == {V1, V2}
    assert versions.count(V1) >= 250, "what had come back by then was kept"
    assert play.all(GroupFailed) == play.all(WorkerFailed) == []
    assert_nothing_runs()


async def test_a_node_that_is_lost_has_the_worker_hand_its_samples_over(run: RunFolder, weights: Weights) -> None:
    config = spread(weights, heartbeat_timeout_s=6.0, tokens_per_s=40.0)  # samples are not done before it is missed
    async with playing(run, 1, weights.publish(Version(1, 3))) as play, other_node(run, config) as node, working(run, config) as (worker, task):
        await play.until_ready()
        await play.lease(make_lease("g1"))
        await generated(worker, 100)
        node.suspend()  # with all that it does, and nobody is told: its heartbeats stay away
        try:
            termination = await ended(task)
        finally:
            node.resume()
        assert termination.how == "drained" and "of this replica has given no sign of life for 6 s" in termination.cause
        await play.until(lambda: play.all(GroupParked))
        await gone(node)
    parked = play.all(GroupParked)[0]  # it may be told more than once
    check_partial(parked.partial)
    assert parked.partial.tokens.size >= 80
    assert_nothing_runs()


async def test_a_node_whose_worker_is_gone_leaves(run: RunFolder, weights: Weights) -> None:
    config = spread(weights, heartbeat_timeout_s=6.0)
    async with playing(run, 1, weights.publish(Version(1, 4))) as play, other_node(run, config) as node:
        worker = await asyncio.create_subprocess_exec(sys.executable, "-c", TASK, str(run.path))
        await play.until_ready()
        rank = await rank_of(node)
        worker.kill()
        await worker.wait()
        await gone(node)
        await gone(rank)
    assert_nothing_runs()


async def test_a_node_that_cannot_begin_says_so_to_the_worker(run: RunFolder, tmp_path: Path) -> None:
    """Its port range is that of a socket which is in use."""
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = fetching_config(str(tmp_path / "there"), {})
    others = OtherNodes(run, config, Place("17", "17_0", "17", 0, 0, 2, 0), lost.set_result)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        full = replace(config.transport, port_range=f"{number}-{number}")
        with pytest.raises(PortError):
            await asyncio.to_thread(run_node, run, replace(config, transport=full), Place("17", "17_0", "17", 0, 1, 2, 0))
    try:
        assert "could not begin: transport.port_range" in await asyncio.wait_for(lost, DEADLINE_S)
    finally:
        await others.close()


async def test_what_is_being_stopped_is_stopped_before_the_next_begins() -> None:
    """Whoever else ends it meanwhile."""
    begun, released, order = asyncio.Event(), asyncio.Event(), list[str]()

    async def stop() -> None:
        begun.set()
        await released.wait()
        order.append("stopped")

    async def serve() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await node_module._to_its_end(asyncio.ensure_future(stop()))

    async def again() -> None:
        order.append("again")

    first = asyncio.create_task(EngineNode._after(None, serve()))
    await asyncio.sleep(0)
    first.cancel()
    await begun.wait()
    skipped = asyncio.create_task(EngineNode._after(first, again()))
    await asyncio.sleep(0)
    second = asyncio.create_task(EngineNode._after(skipped, again()))
    await asyncio.sleep(0)
    released.set()
    await asyncio.wait_for(second, DEADLINE_S)
    assert order == ["stopped", "again"] and first.cancelled() and skipped.cancelled()


# -- weights -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def origin(run: RunFolder, tmp_path: Path) -> Iterator[Origin]:
    origin = Origin(run, tmp_path / "trainer")
    yield origin
    origin.close()


@asynccontextmanager
async def two_nodes(run: RunFolder, folder: Path, given: Config | None = None, **changes: object) -> AsyncIterator[tuple[OtherNodes, list[str]]]:
    """The first node's view of the second one, which lives in this process, with a store below `folder`; and what it hears of its loss."""
    config, lost = given or fetching_config(str(folder), changes), list[str]()
    node = EngineNode(run, config, Place("17", "17_0", "17", 0, 1, 2, 0))
    serving = asyncio.create_task(node.work())
    others = OtherNodes(run, config, Place("17", "17_0", "17", 0, 0, 2, 0), lost.append)
    try:
        yield others, lost
    finally:
        await others.close()
        await asyncio.wait_for(serving, DEADLINE_S)


async def test_weights_come_to_the_other_node_from_this_one_as_they_arrive_here(run: RunFolder, tmp_path: Path, origin: Origin) -> None:
    content = make_weights(1)
    announcement = origin.publish(V1, content)
    here = Streaming(run, fetching_config(str(tmp_path / "here"), {}))
    try:
        async with two_nodes(run, tmp_path / "there") as (others, lost):
            here.expect(V1)
            silent = msgspec.structs.replace(announcement, sources=["tcp://127.0.0.1:9"] * len(announcement.sources))
            async with others.fetching(silent, here.endpoint, None):  # the other node cannot have it from the trainer
                await here.fetch(announcement, Sources(V1, []), lambda _: None)
            (folder,) = (tmp_path / "there").glob(f"*/held/{V1}")
            assert (read(folder) == content).all() and lost == []
    finally:
        await asyncio.to_thread(here.close)


async def test_adapters_that_come_alone_are_merged_on_the_other_node_too(run: RunFolder, tmp_path: Path) -> None:
    config, model, folder = fetching_config(str(tmp_path / "there"), {"adapter_only": True}), tmp_path / "model", tmp_path / "1.1"
    architecture, lora = write_random_model(model, "llama"), LoraConfig(rank=4)
    config.model.path, config.trainer.lora = str(model), lora
    write_peft_folder(folder, ((name, torch.randn(shape)) for name, shape in pair_shapes(architecture, lora).items()), lora, model)
    announcement = Announcement(V1, str(folder), make_manifest(folder, V1))
    async with two_nodes(run, tmp_path / "there", config) as (others, lost):
        async with others.fetching(announcement, "", None):
            pass
        found = load_file(run.merged(str(tmp_path / "there")) / "held" / str(V1) / "model-00000.safetensors")
        expected = dict(iter_merged(folder, lora, model, torch.float32))
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found) and lost == []


async def test_what_the_other_node_cannot_have_is_told(run: RunFolder, tmp_path: Path, origin: Origin) -> None:
    announcement = origin.publish(V1, make_weights(1))
    async with two_nodes(run, tmp_path / "there", timeout_s=0.4) as (others, _):
        with pytest.raises(WeightsError, match=r"node 1 \(.*\) of this replica has not got version 1.1: .*is not seen on this node"):
            async with others.fetching(msgspec.structs.replace(announcement, folder=str(tmp_path / "nowhere" / "1.1")), "", None):
                pass
