"""When the state of a run is saved and its model exported, beside training: with a real engine and run folder, and no coordinator."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

import transformers
from safetensors.torch import load_file, save_file

from tests.support.megatron_case import config, make_groups, train, write_model
from workers.config import Config, Dtype
from workers.messages.parts import Version
from workers.model.architecture import read_architecture
from workers.run import checkpoints, incarnations
from workers.run.checkpoints import Fenced
from workers.run.folder import RunFolder
from workers.trainer.background import Background
from workers.trainer.coordinator_link.client import CoordinatorLink
from workers.trainer.coordinator_link.endings import RunEnded
from workers.trainer.megatron.checkpoint.checkpoint import CheckpointError
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.orders import StillThere
from workers.trainer.ranks import Ranks
from workers.trainer.saving import exporter
from workers.trainer.saving.export_folder import digest, verify
from workers.trainer.saving.exporter import Exporter
from workers.trainer.saving.run_saver import RunSaver
from workers.weights.manifest import WeightsError
from workers.weights.manifest import verify as verify_manifest

pytestmark = pytest.mark.usefixtures("megatron_groups")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3-tied", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    claim(run)
    return run


def claim(run: RunFolder) -> int:
    return incarnations.claim(run, "", "", 0, "node", 1, 0)


class Link:
    """The coordinator's side: writes its part when asked."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, bool]] = []
        self.problem: Exception | None = None

    def save(self, step: int, folder: Path, final: bool) -> None:
        if self.problem is not None:
            raise self.problem
        (folder / checkpoints.COORDINATOR).write_text(f"ledger of {step}")
        self.saved.append((step, final))


class Trainer:
    """What TrainerWorker does, with batches out of nowhere."""

    def __init__(self, run: RunFolder, model: Path, background: bool = True, **settings: Any) -> None:
        self.config: Config = config(**settings)
        self.config.model.path, self.config.checkpoint.every_steps, self.config.checkpoint.every_minutes = str(model), 1, 0.0
        self.config.checkpoint.background = background
        self.run, self.link, self.engine = run, Link(), MegatronEngine(self.config, model)
        self.version = Version(run.newest_epoch(), 0)
        self.saver = RunSaver(run, self.config, cast(CoordinatorLink, self.link), Ranks(), self.engine, self.version, None)
        self.exporter = Exporter(run, self.config, Ranks(), self.engine.architecture, self.engine.iter_hf_tensors, self.engine.iter_adapter_tensors)

    def step(self) -> None:
        train(self.engine, make_groups(4, seed=self.version.step))
        self.version = Version(self.version.epoch, self.version.step + 1)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.iter_hf_tensors()}


def published(run: RunFolder) -> list[str]:
    assert all(checkpoints.find_problem(checkpoint) == "" for checkpoint in checkpoints.all_checkpoints(run))
    return [str(checkpoint.version) for checkpoint in checkpoints.all_checkpoints(run)]


class Gate:
    """Holds back the thread that publishes until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.reached, self.opened, real = threading.Event(), threading.Event(), getattr(module, name)

        def held(*args: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            return real(*args)

        monkeypatch.setattr(module, name, held)


def test_training_goes_on_while_a_checkpoint_is_written(run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, gate = Trainer(run, model), Gate(monkeypatch, checkpoints, "commit")
    trainer.step()
    expected = trainer.weights()
    trainer.saver.after_step(trainer.version)
    assert gate.reached.wait(60)
    trainer.step()
    assert published(run) == [] and trainer.link.saved == [(1, False)]
    gate.opened.set()
    trainer.saver.wait()
    assert published(run) == ["1.1"]
    other = MegatronEngine(trainer.config, model)
    newest = checkpoints.newest(run)
    assert newest is not None and newest.coordinator.read_text() == "ledger of 1"
    other.load_state(newest.trainer)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in other.iter_hf_tensors())


def test_the_next_one_waits_for_the_one_before(run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, gate = Trainer(run, model), Gate(monkeypatch, checkpoints, "commit")
    trainer.step()
    trainer.saver.after_step(trainer.version)

    def open_gate() -> None:
        gate.reached.wait(60)
        gate.opened.set()

    threading.Thread(target=open_gate).start()
    trainer.step()
    trainer.saver.after_step(trainer.version)
    assert "1.1" in published(run) and trainer.link.saved == [(1, False), (2, False)]
    trainer.step()
    trainer.saver.save_last(trainer.version)
    assert published(run) == ["1.2", "1.3"], "the last one is there when it returns"
    metrics = trainer.saver.take_metrics()
    assert metrics["checkpoint_wait_s"] > 0 and metrics["checkpoint_s"] > 0
    assert trainer.saver.take_metrics() == {"checkpoint_s": 0, "checkpoint_wait_s": 0}


@pytest.mark.parametrize("background", [False, True])
def test_what_cannot_be_written_is_said_and_tried_again(run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch, background: bool,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(run, model, background)
    with monkeypatch.context() as full:
        def no_space(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr("workers.trainer.megatron.checkpoint.checkpoint.write_part", no_space)
        trainer.step()
        trainer.saver.after_step(trainer.version)
        trainer.saver.wait()
    assert list(run.checkpoints.iterdir()) == [], "there is room again"
    trainer.step()
    trainer.saver.after_step(trainer.version)
    trainer.saver.wait()
    said = capsys.readouterr().out
    assert said.count("could not be written, training goes on without it") == 1
    assert "the checkpoint of step 1 could" in said and "No space left on device" in said
    assert published(run) == ["1.2"] and [path.name for path in run.checkpoints.iterdir()] == ["1.2"]


def test_without_the_coordinators_part_there_is_none(run: RunFolder, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(run, model)
    trainer.step()
    trainer.link.problem = TimeoutError("the coordinator has not written its part")
    trainer.saver.after_step(trainer.version)
    assert "the coordinator has not written its part" in capsys.readouterr().out and published(run) == []
    with pytest.raises(TimeoutError):
        trainer.saver.save_last(trainer.version)


def test_of_a_complete_run_no_half_checkpoint_is_left(run: RunFolder, model: Path) -> None:
    """Its coordinator had ended the run before it wrote its part: a supervised run ends with its last step."""
    trainer = Trainer(run, model)
    trainer.step()
    trainer.link.problem = RunEnded("")
    with pytest.raises(RunEnded):
        trainer.saver.after_step(trainer.version)
    assert list(run.checkpoints.iterdir())
    trainer.saver.finish()
    assert not list(run.checkpoints.iterdir())


def test_whoever_is_fenced_off_while_writing_learns_of_it(run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, gate = Trainer(run, model), Gate(monkeypatch, checkpoints, "commit")
    trainer.step()
    trainer.saver.after_step(trainer.version)
    assert gate.reached.wait(60)
    assert claim(run) == 2
    gate.opened.set()
    with pytest.raises(Fenced, match="epoch 2 has begun"):
        trainer.saver.wait()
    assert list(run.checkpoints.iterdir()) == []


def test_when_it_is_due(run: RunFolder, model: Path) -> None:
    def due(every_steps: int, every_minutes: float, evaluated: int, keep_best: bool) -> list[int]:
        trainer = Trainer(run, model)
        trainer.config.checkpoint.every_steps, trainer.config.checkpoint.every_minutes = every_steps, every_minutes
        trainer.config.evaluation.every_steps, trainer.config.checkpoint.keep_best = evaluated, keep_best
        saver = RunSaver(run, trainer.config, cast(CoordinatorLink, trainer.link), Ranks(), trainer.engine, Version(1, 10), None)
        return [step for step in range(11, 21) if saver.due(step)]

    assert due(5, 0, 0, True) == [15, 16, 17, 18, 19, 20]
    assert due(0, 1e-9, 0, True) == list(range(11, 21))
    assert due(0, 60, 0, True) == []
    assert due(0, 0, 4, True) == [12, 16, 20]
    assert due(0, 0, 4, False) == []


def test_background_work_tells_once_how_it_ended() -> None:
    work, begin = Background("work"), threading.Event()
    assert work.end() and not work.busy

    def wait() -> None:
        assert begin.wait(60)

    work.start(wait)
    assert work.busy and not work.end(0)
    begin.set()
    assert work.end() and work.end() and not work.busy

    def fail() -> None:
        raise CheckpointError("full")

    work.start(fail)
    with pytest.raises(CheckpointError, match="full"):
        work.end()


@pytest.mark.parametrize("leave", [Background.end, lambda work: work.abandon(60.0)], ids=["waited for", "abandoned"])
def test_nothing_of_background_work_is_left_when_its_end_has_been_waited_for(leave: Callable[[Background], None]) -> None:
    """A thread that is in torch when the interpreter is taken down aborts the process."""
    entered, leaving = threading.Event(), threading.Event()

    def ended() -> None:
        entered.set()
        assert leaving.wait(60)

    work = Background("work", ended)
    work.start(lambda: None)
    assert entered.wait(60)
    threading.Timer(0.05, leaving.set).start()
    leave(work)
    assert "work" not in [thread.name for thread in threading.enumerate()]
    assert work.end()


# -- exports -------------------------------------------------------------------------------------------------------------

def exports(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.exports.iterdir()) if run.exports.exists() else []


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_exports_are_models_that_transformers_loads(run: RunFolder, model: Path, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is the engine's at that step, though training has gone on; and the logits are those of these weights."""
    trainer, gate = Trainer(run, model, dtype=dtype, export_every_steps=2, export_keep=2), Gate(monkeypatch, exporter, "make_manifest")
    expected = {}
    for number in range(1, 7):
        trainer.step()
        expected[number] = trainer.weights()
        trainer.exporter.after_step(trainer.version)
        if number == 2:
            assert gate.reached.wait(60) and exports(run) == [".2.tmp"]
        if number == 3:
            gate.opened.set()
    trainer.exporter.finish(trainer.version)
    assert exports(run) == ["4", "6"]
    loaded: Any = None
    for folder, step in ((run.exports / "4", 4), (run.exports / "6", 6), (run.final_model, 6)):
        loaded, info = cast(Any, transformers.AutoModelForCausalLM).from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        state = loaded.state_dict()
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert all(torch.equal(state[name], tensor) for name, tensor in expected[step].items())
        content = (folder / "manifest.json").read_bytes()
        verify_manifest(folder, Version(1, step), checkpoints.digest_file(folder / "manifest.json"))
        assert b"model-00000.safetensors" in content
    assert trainer.exporter.take_metrics()["export_s"] > 0
    if dtype is Dtype.float32:
        groups = make_groups(2)
        logits = loaded(torch.from_numpy(groups[0].prompt).long()[None]).logits[0, -1].float() / trainer.config.workflow.temperature
        first = trainer.engine.logprobs(groups)[0][0][0]
        assert float(logits.detach().log_softmax(-1)[int(groups[0].responses[0][0])]) == pytest.approx(float(first), abs=1e-4)


def test_a_complete_run_without_a_final_model_waits_for_the_last_export(run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, gate = Trainer(run, model, export_every_steps=1, export_final=False), Gate(monkeypatch, exporter, "make_manifest")
    trainer.step()
    trainer.exporter.after_step(trainer.version)
    assert gate.reached.wait(60) and exports(run) == [".1.tmp"]
    monkeypatch.setattr(exporter, "IDLE_S", 0.05)
    monkeypatch.setattr(Ranks, "tell", lambda ranks, order: gate.opened.set())  # the others are kept waiting: so it waits
    trainer.exporter.finish(trainer.version)
    assert exports(run) == ["1"] and not run.final_model.exists()


def test_while_the_last_export_is_read_back_the_other_ranks_are_kept_waiting(run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, gate = Trainer(run, model), Gate(monkeypatch, exporter, "verify")
    monkeypatch.setattr(exporter, "IDLE_S", 0.05)
    monkeypatch.setattr(Ranks, "tell", lambda ranks, order: gate.opened.set())
    trainer.exporter.finish(trainer.version)
    assert gate.opened.is_set() and run.final_model.is_dir()


def test_an_export_without_the_model_that_training_began_with_is_said(run: RunFolder, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(run, model, export_every_steps=1)
    trainer.step()
    trainer.exporter._model = run.path / "purged"
    trainer.exporter.after_step(trainer.version)
    assert "the model could not be exported, training goes on" in capsys.readouterr().out and exports(run) == []


def test_an_export_that_nobody_waits_for_is_said(
        run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, gate = Trainer(run, model, export_every_steps=1), Gate(monkeypatch, exporter, "verify")
    monkeypatch.setattr(exporter, "LEAVE_S", 0.05)
    trainer.step()
    trainer.exporter.after_step(trainer.version)
    trainer.exporter.abandon()
    assert "the export of step 1 was not read back before this process left" in capsys.readouterr().out
    gate.opened.set()


def test_an_export_that_fails_is_said_and_its_weights_are_gone_through(run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    trainer, given = Trainer(run, model, export_every_steps=1), 0

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal given
        for entry in trainer.engine.iter_hf_tensors():
            given += 1
            yield entry

    def full(*args: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer.exporter = Exporter(run, trainer.config, Ranks(), trainer.engine.architecture, weights, trainer.engine.iter_adapter_tensors)
    with monkeypatch.context() as disk:
        disk.setattr("workers.weights.safetensors_writer.os.pwrite", full)
        trainer.step()
        trainer.exporter.after_step(trainer.version)
        assert "the model could not be exported, training goes on" in capsys.readouterr().out and exports(run) == []
        assert given == len(trainer.engine.architecture.tensor_shapes())
        with pytest.raises(WeightsError, match="No space left"):
            trainer.exporter.finish(trainer.version)
    trainer.exporter.after_step(trainer.version)
    trainer.exporter.finish(trainer.version)
    assert exports(run) == ["1"] and run.final_model.is_dir()
    claim(run)
    trainer.exporter.after_step(trainer.version)
    with pytest.raises(Fenced):
        trainer.exporter.finish(trainer.version)


def test_the_last_export_waits_for_a_disk_that_is_full(run: RunFolder, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, real, left, told = Trainer(run.patient(1), model, export_every_steps=1), os.pwrite, [2], list[object]()

    def full_at_first(*args: Any) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr("workers.weights.safetensors_writer.os.pwrite", full_at_first)
    monkeypatch.setattr("workers.run.outage.NEXT_S", 0.01)
    monkeypatch.setattr(Ranks, "tell", lambda ranks, order: told.append(order))
    trainer.exporter.finish(trainer.version)
    assert run.final_model.is_dir() and told == [StillThere()] * 2, "the other ranks are kept waiting"


def test_exports_of_a_lost_lineage_go_and_none_of_the_present_one_for_them(run: RunFolder, model: Path) -> None:
    trainer = Trainer(run, model, export_every_steps=1, export_keep=2)

    def exported(epoch: int, step: int) -> list[str]:
        trainer.exporter.after_step(Version(epoch, step))
        trainer.exporter._look(wait=True)
        return exports(run)

    assert exported(1, 12) == ["12"] and exported(1, 13) == ["12", "13"]
    assert not trainer.exporter.lacks(Version(1, 13)) and trainer.exporter.lacks(Version(1, 14)), "it has left before that one was verified"
    claim(run)
    assert exported(2, 10) == ["10"] and exported(2, 11) == ["10", "11"] and exported(2, 12) == ["11", "12"]
    assert trainer.exporter.lacks(Version(1, 12)), "this one is another lineage's"


def test_a_damaged_export_is_noticed(run: RunFolder, model: Path) -> None:
    trainer = Trainer(run, model)
    folder, architecture = run.final_model, read_architecture(model)
    digests = {name: digest(tensor) for name, tensor in trainer.weights().items()}
    trainer.exporter.finish(trainer.version)
    verify(folder, architecture, torch.float32, digests)
    path = folder / "model-00000.safetensors"
    good = load_file(path)
    name = "model.norm.weight"
    damages: list[tuple[dict[str, torch.Tensor], str]] = [
        ({key: tensor for key, tensor in good.items() if key != name}, f"tensor {name} is missing"),
        (good | {name: good[name] + 1e-6}, f"tensor {name} is not what was written"),
        (good | {name: good[name].double()}, f"tensor {name} is not what was written"),
        (good | {"more": good[name].clone()}, "tensor more is not what was written"),
    ]
    for tensors, problem in damages:
        save_file(tensors, path)
        with pytest.raises(WeightsError, match=problem):
            verify(folder, architecture, torch.float32, digests)
    save_file(good, path)
    with pytest.raises(WeightsError, match=f"tensor {name} is not what was written"):
        verify(folder, architecture, torch.float32, {key: digest for key, digest in digests.items() if key != name})
