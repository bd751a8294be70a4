"""A whole run with several training ranks, a real coordinator and no SLURM: every leader gets its own share of each batch, and however the ranks
share the work, the same model comes out of it. The rollout worker is played here; its groups depend on their prompts alone."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from safetensors.numpy import load_file

from tests.support.megatron_case import VOCAB, write_model
from tests.wire.gangs import await_ranks, start_rank
from workers.config import (
    Advantage,
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    ClusterKind,
    Config,
    DataConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SelfTestAction,
    SelfTestConfig,
    StalenessConfig,
    TrainerConfig,
    TransportConfig,
    WeightsConfig,
    WorkflowConfig,
)
from workers.coordinator.groups.group_states import index_of
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.from_coordinator import Leases
from workers.messages.from_worker import GroupFinished, Heartbeat, TransportFailed
from workers.messages.parts import Announcement, Group, Lease, Message, Purpose, Role, Version
from workers.run.files import read_lines
from workers.run.folder import RunFolder
from workers.transport.keys import make_keys
from workers.transport.peer import Peer
from workers.weights.manifest import verify
from workers.weights.peft_folder import iter_merged

DEADLINE_S = 800.0
NUM_STEPS, BATCH, SIZE = 3, 6, 4


def make_run(folder: Path, model: Path, parallel: ParallelConfig, kind: ClusterKind = ClusterKind.local, rank: int = 0,
             adapter_only: bool = False) -> RunFolder:
    run = RunFolder.create(folder)
    make_keys(run)
    config = Config(
        run=RunConfig(num_steps=NUM_STEPS), model=ModelConfig(path=str(model)), data=DataConfig(num_heldout=2),
        workflow=WorkflowConfig(group_size=SIZE), engine=EngineConfig(context_length=64), staleness=StalenessConfig(eta=1),
        algorithm=AlgorithmConfig(advantage=Advantage.batch_norm), weights=WeightsConfig(dir="run", adapter_only=adapter_only),
        checkpoint=CheckpointConfig(every_steps=2),
        trainer=TrainerConfig(batch_groups=BATCH, num_minibatches=2, microbatch_tokens=128, lr=1e-3, parallel=parallel,
                              lora=LoraConfig(rank=rank)),
        transport=TransportConfig(heartbeat_s=0.2), selftest=SelfTestConfig(SelfTestAction.off), cluster=ClusterConfig(kind))
    run.config.write_bytes(msgspec.json.encode(dataclasses.asdict(config)))
    return run


def group_of(lease: Lease) -> Group:
    """What is sampled for a lease: the same whoever asks, and whenever."""
    training = lease.purpose is Purpose.training
    rng = np.random.default_rng(index_of(lease.group_id) if training else 0)
    lengths = rng.integers(1, 12, SIZE if training else 1).astype(np.int32)
    total, rewards = int(lengths.sum()), rng.normal(size=lengths.size).astype(np.float32)
    return Group(
        group_id=lease.group_id, attempt=lease.attempt, purpose=lease.purpose, prompt_id=lease.prompt_id, lengths=Int32.of(lengths),
        prompt=Int32.of(rng.integers(0, VOCAB, rng.integers(2, 9)).astype(np.int32)), tokens=Int32.of(rng.integers(0, VOCAB, total).astype(np.int32)),
        logprobs=Float32.of(rng.normal(-4, 0.3, total).astype(np.float32)), loss_mask=Bool.of(rng.random(total) > 0.1),
        rewards=Float32.of(rewards), scores=Float32.of(rewards.clip(0, 1)),
        epochs=Int32.of([lease.version.epoch]), steps=Int32.of([lease.version.step]),
        run_lengths=Int32.of([total]))


class PlayedRollout:
    """A rollout worker that answers every lease at once."""

    def __init__(self, run: RunFolder, config: TransportConfig) -> None:
        self.held: Version | None = None
        self.trained: dict[str, int] = {}
        self.peer = Peer(run, config, Role.rollout, 60.0, heartbeat=lambda: Heartbeat(held=self.held, capacity=1000), on_message=self.take,
                         on_announcement=self.load, follows=True)

    def load(self, announcement: Announcement) -> None:
        self.held = announcement.version
        asyncio.get_running_loop().create_task(self.peer.beat())

    def say(self, message: Message) -> None:
        asyncio.get_running_loop().create_task(self.peer.send(message))

    def take(self, message: Message) -> None:
        if isinstance(message, Leases):
            for lease in message.leases:
                group = group_of(lease)
                self.trained[lease.group_id] = int(group.loss_mask.sum())
                self.say(GroupFinished(group))


class CutOff(PlayedRollout):
    """One that gets no weights but from shared storage; `announced`: what it was told, `read`: the weights of each version."""

    def __init__(self, run: RunFolder, config: TransportConfig) -> None:
        super().__init__(run, config)
        self.announced: list[Announcement] = []
        self.read: dict[Version, dict[str, np.ndarray]] = {}

    def load(self, announcement: Announcement) -> None:
        self.announced.append(announcement)
        if not announcement.folder:
            self.say(TransportFailed(announcement.version, "zmq", "no route"))
            return
        verify(Path(announcement.folder), announcement.version, announcement.digest)
        self.read[announcement.version] = weights_in(Path(announcement.folder))
        super().load(announcement)


async def play(run: RunFolder, world: int, kind: type[PlayedRollout] = PlayedRollout) -> PlayedRollout:
    """Start all ranks and answer their leases until the run is over; what still runs then is killed."""
    rollout, processes = kind(run, TransportConfig(heartbeat_s=0.2)), []
    try:
        for rank in range(world):
            processes.append(start_rank("tests.wire.ranks.gang_rank", run.jobs / f"rank{rank}.log", str(run.path), str(rank), str(world)))
        async with asyncio.timeout(DEADLINE_S), rollout.peer as peer:
            await peer.serve()
        codes = await_ranks(processes, DEADLINE_S)
    finally:
        await_ranks(processes, 0.0)
        logs = "\n".join(path.read_text() for path in sorted(run.jobs.iterdir()))
        print(logs)
    assert codes == [0] * world
    return rollout


def weights_in(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3-tied", tmp_path_factory.mktemp("gang_run") / "model")


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of a single rank."""
    run = make_run(tmp_path_factory.mktemp("alone") / "run", model, ParallelConfig())
    check(run, asyncio.run(play(run, 1)))
    return run


def check(run: RunFolder, rollout: PlayedRollout) -> None:
    """The run is complete; every step has trained on its batch, all of it and nothing else."""
    outcome = run.ended()
    assert outcome is not None and outcome["state"] == "finished", outcome
    steps, consumed = read_lines(run.metrics), read_lines(run.path / "consumed.jsonl")
    assert [record["groups"] for record in consumed] == [list(range(BATCH * step, BATCH * (step + 1))) for step in range(NUM_STEPS)]
    trained = np.cumsum([sum(rollout.trained[f"g{index}"] for index in record["groups"]) for record in consumed])
    assert [record["tokens_trained"] for record in steps] == trained.tolist()
    assert [record["num_tokens"] for record in steps] == np.diff(trained, prepend=0).tolist(), "as the ranks have counted"


@pytest.mark.parametrize(("world", "parallel"), [(2, ParallelConfig()), (2, ParallelConfig(tp=2))], ids=["two copies", "one copy on two ranks"])
def test_ranks_that_fetch_their_shares_train_like_one(model: Path, alone: RunFolder, tmp_path: Path, world: int, parallel: ParallelConfig) -> None:
    run = make_run(tmp_path / "run", model, parallel)
    check(run, asyncio.run(play(run, world)))
    expected, found = weights_in(alone.final_model), weights_in(run.final_model)
    assert expected.keys() == found.keys() and expected
    for name, tensor in expected.items():
        assert np.linalg.norm(found[name] - tensor) <= 1e-5 * np.linalg.norm(tensor), name


def test_two_ranks_export_the_model_and_its_adapters_which_may_be_sent_alone(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", model, ParallelConfig(tp=2), ClusterKind.slurm, rank=4, adapter_only=True)
    rollout = asyncio.run(play(run, 2, CutOff))
    check(run, rollout)
    base, trained, pairs = (weights_in(folder) for folder in (model, run.final_model, run.final_adapter))
    merged = {name: tensor.numpy() for name, tensor in iter_merged(run.final_adapter, LoraConfig(rank=4), model, torch.float32)}
    assert isinstance(rollout, CutOff) and all(len(announcement.sources) == 1 for announcement in rollout.announced)
    for found, expected in ((rollout.read[Version(1, NUM_STEPS)], pairs), (merged, trained)):
        assert found.keys() == expected.keys() and all(np.array_equal(found[name], tensor) for name, tensor in expected.items())
    assert base.keys() == trained.keys() and len(pairs) == 2 * 2 * 7
    for name, tensor in trained.items():
        a, b = (pairs.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{which}.weight") for which in "AB")
        expected = base[name] if a is None or b is None else base[name] + 32 / 4 * b @ a
        assert np.allclose(tensor, expected, rtol=1e-5, atol=1e-6) and (a is None) == np.array_equal(tensor, base[name]), name


def test_weights_go_over_shared_storage_when_nothing_else_gets_through(model: Path, tmp_path: Path) -> None:
    """Of two stages on nodes of their own, the first version at once: no batch comes before that."""
    run = make_run(tmp_path / "run", model, ParallelConfig(pp=2), ClusterKind.slurm)
    rollout = asyncio.run(play(run, 2, CutOff))
    check(run, rollout)
    assert isinstance(rollout, CutOff)
    first, again, *later = rollout.announced
    assert first.folder == "" and len(first.sources) == 2
    assert again == msgspec.structs.replace(first, folder=str(run.path / "weights" / "1.0")), "the same one, in one more way"
    assert [announcement.version for announcement in rollout.announced[1:]] == [Version(1, step) for step in range(NUM_STEPS + 1)]
    assert all(announcement.folder and announcement.sources for announcement in later)
    for folder, version in ((model, Version(1, 0)), (run.final_model, Version(1, NUM_STEPS))):
        expected, found = weights_in(folder), rollout.read[version]
        assert expected.keys() == found.keys() and all(np.array_equal(found[name], tensor) for name, tensor in expected.items())
    assert not (run.path / "weights").exists() and not list(run.path.glob("headway-*")), "nothing of it is left"
