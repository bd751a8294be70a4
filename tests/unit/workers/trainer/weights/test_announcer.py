"""Versions are published beside training, one after the other: who waits for what, and how failures come to light. With a real engine, store and
server; the coordinator's side is played."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from safetensors.torch import load_file

from tests.support.megatron_case import config, make_groups, train, write_model
from workers.config import ClusterKind, LoraConfig, Transport
from workers.messages.from_worker import Republished
from workers.messages.parts import Announcement, Version
from workers.run import checkpoints, incarnations
from workers.run.checkpoints import Fenced
from workers.run.folder import RunFolder
from workers.trainer.coordinator_link.client import CoordinatorLink
from workers.trainer.coordinator_link.prefetch import Prefetch
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.ranks import Ranks
from workers.trainer.saving.run_saver import RunSaver
from workers.trainer.weights.announcer import Announcer
from workers.trainer.weights.rank_publisher import RankPublisher
from workers.transport.keys import make_keys
from workers.weights.manifest import WeightsError, verify
from workers.weights.publisher import Publisher
from workers.weights.store import NodeStore

pytestmark = pytest.mark.usefixtures("megatron_groups")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3-tied", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    make_keys(run)
    claim(run)
    return run


def claim(run: RunFolder) -> int:
    return incarnations.claim(run, "", "", 0, "node", 1, 0)


class Link:
    """The coordinator's side: what it is told, in order."""

    def __init__(self) -> None:
        self.needed: Version | None = None
        self.fallbacks: dict[str, str] = {}
        self.told: list[Announcement | tuple[str, int]] = []
        self.metrics: dict[str, float] = {}
        self.woken = threading.Event()

    def step_finished(self, announcement: Announcement, metrics: dict[str, float]) -> None:
        self.told.append(announcement)
        self.metrics = metrics

    def say(self, message: Republished) -> None:
        self.told.append(message.announcement)

    def save(self, step: int, folder: Path, final: bool) -> None:
        (folder / checkpoints.COORDINATOR).write_text("ledger")
        self.told.append(("checkpoint", step))

    def wake(self) -> None:
        self.woken.set()


class Trainer:
    """What TrainerWorker has to do with publishing."""

    def __init__(self, run: RunFolder, model: Path, rank: int = 0, kind: ClusterKind = ClusterKind.local, **settings: Any) -> None:
        self.config, self.run, self.link = config(lora=LoraConfig(rank=rank)), run, Link()
        self.config.cluster.kind = kind
        self.config.model.path, self.config.weights.dir = str(model), str(run.path / "memory")
        for name, value in settings.items():
            setattr(self.config.weights, name, value)
        self.engine, self.epoch = MegatronEngine(self.config, model), run.newest_epoch()
        publisher = RankPublisher(run, self.config, self.engine, self.epoch, self.link.wake)
        link = cast(CoordinatorLink, self.link)
        self.announcer = Announcer(run, self.config, link, Ranks(), publisher)
        self.saver = RunSaver(run, self.config, link, Ranks(), self.engine, Version(self.epoch, 0), None, self.announcer.wait)

    def publish(self, step: int) -> dict[str, torch.Tensor]:
        """Begin; returns what is published."""
        weights = {name: tensor.clone() for name, tensor in self.engine.iter_hf_tensors()}
        self.announcer.publish(Version(self.epoch, step), {"loss": float(step)})
        return weights

    def train(self) -> None:
        train(self.engine, make_groups(4))


@pytest.fixture
def trainer(run: RunFolder, model: Path) -> Iterator[Trainer]:
    trainer = Trainer(run, model)
    yield trainer
    trainer.announcer.close()
    assert not run.store(trainer.config.weights.dir).exists()


class Gate:
    """Holds back the thread that makes digests until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened, real = threading.Event(), threading.Event(), Publisher.describe

        def held(*args: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            return real(*args)

        monkeypatch.setattr(Publisher, "describe", held)


def test_training_goes_on_while_a_version_is_published(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    published = trainer.publish(0)
    assert gate.reached.wait(60)
    trainer.train()
    trainer.announcer.attend()
    assert trainer.link.told == []
    gate.opened.set()
    trainer.announcer.wait()
    (announcement,) = trainer.link.told
    assert isinstance(announcement, Announcement) and announcement.folder == "" and len(announcement.sources) == 1
    folder = trainer.run.store(trainer.config.weights.dir) / "published" / "1.0"
    verify(folder, announcement.version, announcement.digest)
    found = load_file(folder / "model-00000.safetensors")
    assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in published.items()), "not what was trained meanwhile"
    metrics = trainer.link.metrics
    assert metrics["loss"] == 0 and metrics["publish_background_s"] > 0 and metrics["publish_s"] > 0
    assert metrics["weights_bytes"] > sum(tensor.nbytes for tensor in found.values()) and metrics["weights_sent_bytes"] == 0


def test_the_next_version_and_checkpoints_wait_for_the_one_on_its_way(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    trainer.publish(0)

    def open_gate() -> None:
        gate.reached.wait(60)
        gate.opened.set()

    threading.Thread(target=open_gate).start()
    trainer.publish(1)
    assert [cast(Announcement, told).version.step for told in trainer.link.told][:1] == [0]
    trainer.saver.save_last(Version(1, 1))
    versions = [told[1] if isinstance(told, tuple) else told.version.step for told in trainer.link.told]
    assert versions == [0, 1, 1] and isinstance(trainer.link.told[2], tuple), "the coordinator is at that step when it is asked for its part"


def test_who_is_overtaken_while_a_version_is_on_its_way_announces_nothing(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    trainer.publish(0)
    assert gate.reached.wait(60)
    claim(trainer.run)
    gate.opened.set()
    assert trainer.link.woken.wait(60), "training may be waiting for a batch"
    with pytest.raises(Fenced, match=r"version 1\.0: epoch 2 has begun"):
        trainer.announcer.attend()
    assert trainer.link.told == []
    with pytest.raises(Fenced):
        trainer.publish(1)


def test_what_fails_beside_training_is_raised_once(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> Any:
        raise OSError("input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Publisher, "describe", breaks)
        trainer.publish(0)
        with pytest.raises(WeightsError, match=r"weights cannot be published\. training rank 0 on .*: input/output error"):
            trainer.announcer.wait()
    trainer.announcer.attend()
    assert trainer.link.told == []


def test_only_versions_that_somebody_may_fetch_stay(trainer: Trainer) -> None:
    published = trainer.run.store(trainer.config.weights.dir) / "published"
    present = []
    for step in range(5):
        trainer.publish(step)
        trainer.announcer.wait()
        present.append(sorted(path.name for path in published.iterdir()))
        trainer.link.needed = Version(1, min(step, 2))
    assert present == [["1.0", "1.1"], ["1.0", "1.1", "1.2"], ["1.1", "1.2", "1.3"], ["1.2", "1.3", "1.4"], ["1.2", "1.3", "1.4", "1.5"]]


@pytest.mark.parametrize("done", [False, True], ids=["one that goes on", "one that has just ended"])
def test_a_slow_fetch_takes_no_more_memory_than_there_is(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    """Its version is withdrawn, and whoever fetches it goes on to a newer one: training does not end by it."""
    published, real = trainer.run.store(trainer.config.weights.dir) / "published", NodeStore.allocate

    def room_for_four(store: NodeStore, folder: Path, name: str, size: int) -> Path:
        if len([path for path in published.iterdir() if not path.name.startswith(".")]) > 4:
            raise WeightsError("no room")
        return real(store, folder, name, size)

    monkeypatch.setattr(NodeStore, "allocate", room_for_four)
    trainer.link.needed = Version(1, 1)
    for step in range(8):
        if done and step == 4:
            trainer.link.needed = Version(1, 3)
        trainer.publish(step)
        trainer.announcer.wait()
    assert [told.version.step for told in trainer.link.told if isinstance(told, Announcement)] == list(range(8))
    assert (published / "1.7").is_dir() and (published / "1.6").is_dir()


class Disk:
    """Copies files, but for the next `failures` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures, real = 0, shutil.copyfile

        def copy(*args: Any) -> Any:
            self.failures -= 1
            if self.failures >= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        monkeypatch.setattr(shutil, "copyfile", copy)
        monkeypatch.setattr("workers.run.outage.NEXT_S", 0.01)


@pytest.mark.parametrize("later", [False, True])
def test_a_second_way_that_is_full_is_no_reason_to_stop(
        run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], later: bool) -> None:
    trainer, disk = Trainer(run, model, kind=ClusterKind.slurm), Disk(monkeypatch)
    try:
        trainer.publish(0)
        trainer.announcer.wait()
        trainer.link.fallbacks["zmq"], disk.failures = "rollout 1 on node: no route", 1
        if later:
            trainer.publish(1)
        else:
            trainer.announcer.attend()
        trainer.announcer.wait()
        assert "does not lie on shared storage" in capsys.readouterr().out and not list((run.path / "weights").glob(".*.part"))
        trainer.publish(2)
        trainer.announcer.wait()
        told = [one for one in trainer.link.told if isinstance(one, Announcement)]
        assert [(one.version.step, one.folder != "") for one in told] == [(0, False), *([(1, False)] if later else []), (2, True)]
        verify(Path(told[-1].folder), told[-1].version, told[-1].digest)
    finally:
        trainer.announcer.close()


def test_the_only_way_is_waited_for(run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, disk = Trainer(run.patient(1), model, kind=ClusterKind.slurm, transport=Transport.disk, dir="run"), Disk(monkeypatch)
    try:
        disk.failures = 2
        trainer.publish(0)
        trainer.announcer.wait()
        (announcement,) = trainer.link.told
        assert isinstance(announcement, Announcement) and "the run folder can be used again" in capsys.readouterr().out
        verify(Path(announcement.folder), announcement.version, announcement.digest)
    finally:
        trainer.announcer.close()
        run.remove_weights("run")


@pytest.mark.parametrize("later", [False, True])
def test_a_fallback_offers_files_at_once_or_with_the_next_version(trainer: Trainer, later: bool, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.publish(0)
    trainer.announcer.wait()
    trainer.link.fallbacks["zmq"] = "rollout 1 on node: no route"
    if later:
        trainer.publish(1)
        trainer.announcer.wait()
    else:
        trainer.announcer.attend()
        trainer.announcer.attend()
    first, second = trainer.link.told
    assert isinstance(first, Announcement) and isinstance(second, Announcement) and len(trainer.link.told) == 2
    assert (first.folder, second.version, second.sources) == ("", Version(1, int(later)), first.sources)
    verify(Path(second.folder), second.version, second.digest)
    assert capsys.readouterr().out.count("weights by zmq have failed: rollout 1 on node: no route") == 1


@pytest.mark.parametrize("where", ["auto", "run"])
def test_on_disk_versions_are_files_only(run: RunFolder, model: Path, where: str) -> None:
    trainer = Trainer(run, model, transport=Transport.disk, dir=where)
    try:
        trainer.publish(0)
        trainer.announcer.wait()
        (announcement,) = trainer.link.told
        assert isinstance(announcement, Announcement) and announcement.sources == []
        expected = run.path / "weights" / "1.0" if where == "run" else run.store("auto") / "published" / "1.0"
        assert announcement.folder == str(expected)
        verify(expected, announcement.version, announcement.digest)
    finally:
        trainer.announcer.close()
        run.remove_weights(where)


def test_batches_are_asked_for_no_sooner_than_they_can_be_formed() -> None:
    asking = Prefetch()
    assert asking.want(5, 5) == [] and asking.announced(5) == [5]
    assert asking.want(5, 5) == [], "once"
    assert asking.want(6, 5) == [6], "it has the batch of step 5, and computes"
    assert asking.want(7, 6) == [], "version 6 is still on its way"
    assert asking.announced(6) == [7] and asking.announced(7) == []
    asking.again()
    assert asking.want(7, 7) == [7], "it may have been lost"
