"""The trainer's state, saved and restored: exact to the bit, and refused as a whole where anything about it is wrong."""

from __future__ import annotations

import dataclasses
import errno
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import config, make_groups, write_model
from tests.support.megatron_case import train as train_on
from workers.config import Advantage, Dtype, Schedule
from workers.run import checkpoints
from workers.trainer.megatron.checkpoint import checkpoint
from workers.trainer.megatron.checkpoint.checkpoint import BrokenState, CheckpointError
from workers.trainer.megatron.checkpoint.optimizer_shards import boxes
from workers.trainer.megatron.checkpoint.state_copy import Shard
from workers.trainer.megatron.engine import MegatronEngine

pytestmark = pytest.mark.usefixtures("megatron_groups")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root / kind) for kind in ("llama", "qwen2", "qwen3-tied", "qwen3moe", "deepseek")}


def train(engine: MegatronEngine, first: int, last: int) -> list[dict[str, float]]:
    """Steps `first` to `last`, each with its own groups."""
    batches = [make_groups(4, seed=step) for step in range(first, last + 1)]
    return [train_on(engine, groups) for groups in batches]


def everything(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Copies of the weights, the master weights and Adam's moments, of policy and critic."""
    found = {name: tensor.clone() for name, tensor in engine.iter_hf_tensors()}
    for model, trained in (("policy", engine._policy.trained), ("critic", engine._critic.trained if engine._critic else None)):
        optimizers = [entry.optimizer for entry in trained.optimizer.chained_optimizers] if trained else []
        parameters = [(adam, parameter) for adam in optimizers for group in adam.param_groups for parameter in group["params"]]
        for number, (adam, parameter) in enumerate(parameters):
            tensors = {"parameter": parameter.detach(), **adam.state.get(parameter, {})}
            found |= {f"{model}.{number}.{name}": tensor.clone() for name, tensor in tensors.items()}
    return found


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def saved(engine: MegatronEngine, folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    engine.save_state(folder)
    return folder


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3-tied", "qwen3moe", "deepseek"])
def test_a_resumed_run_is_the_uninterrupted_one(folders: dict[str, Path], tmp_path: Path, kind: str, dtype: Dtype, share: bool) -> None:
    setup = config(dtype=dtype, share_prompts=share, num_minibatches=2, warmup_steps=3, lr_schedule=Schedule.cosine)
    engine = MegatronEngine(setup, folders[kind])
    train(engine, 1, 2)
    folder = saved(engine, tmp_path / "state")
    random_numbers = torch.rand(3)
    expected = train(engine, 3, 5)
    resumed = MegatronEngine(setup, folders[kind])
    train(resumed, 7, 7)  # leaves nothing behind
    resumed.load_state(folder)
    assert resumed.num_steps == 2
    assert torch.equal(torch.rand(3), random_numbers)
    assert train(resumed, 3, 5) == expected
    assert_same(everything(resumed), everything(engine))


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_a_critic_resumes_with_its_policy(folders: dict[str, Path], tmp_path: Path, dtype: Dtype) -> None:
    setup, plain = config(dtype=dtype, num_minibatches=2), MegatronEngine(config(dtype=dtype), folders["qwen2"])
    setup.algorithm.advantage, setup.algorithm.critic_warmup_steps = Advantage.gae, 1
    engine = MegatronEngine(setup, folders["qwen2"])
    train(engine, 1, 1)
    first = saved(engine, tmp_path / "first")
    train(engine, 2, 2)
    folder = saved(engine, tmp_path / "state")
    expected = train(engine, 3, 4)
    resumed = MegatronEngine(setup, folders["qwen2"])
    resumed.load_state(folder)
    assert train(resumed, 3, 4) == expected
    assert_same(everything(resumed), everything(engine))
    resumed.load_state(first)
    assert train(resumed, 2, 4)[1:] == expected, "the policy has made no update yet, the critic has"
    with pytest.raises(CheckpointError, match=r"critic True \(here False\)"):
        plain.load_state(folder)


def test_the_state_before_the_first_step(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    folder = saved(engine, tmp_path / "state")
    expected = train(engine, 1, 1)
    engine.load_state(folder)
    assert engine.num_steps == 0
    assert train(engine, 1, 1) == expected


def test_hyper_parameters_are_those_of_the_config(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    train(engine, 1, 1)
    folder = saved(engine, tmp_path / "state")
    changed = MegatronEngine(config(lr=5e-3, adam_beta2=0.99, weight_decay=0.3), folders["qwen2"])
    changed.load_state(folder)
    groups = changed._policy.trained.optimizer.param_groups
    assert {(group["lr"], group["betas"], group["step"]) for group in groups} == {(5e-3, (0.9, 0.99), 1)}
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0}
    assert train(changed, 2, 2)[0]["lr"] == 5e-3


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


FILES = ["__0_0.distcp", ".metadata", "common.pt", "metadata.json", "state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_what_is_broken_is_refused_before_anything_is_touched(folders: dict[str, Path], tmp_path: Path, name: str, harm: Callable) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    train(engine, 1, 1)
    folder = saved(engine, tmp_path / "state")
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    harm(folder / name)
    train(engine, 2, 2)
    before = everything(engine)
    with pytest.raises(CheckpointError, match=f"{folder}: .*older checkpoint|{folder}: is the state of another model|{folder}: has format") as caught:
        engine.load_state(folder)
    assert name == "state.json" or caught.type is BrokenState
    assert engine.num_steps == 2
    assert_same(everything(engine), before)
    train(engine, 3, 3)


def test_what_one_node_cannot_read_is_not_taken_for_broken(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    folder, looked = saved(engine, tmp_path / "state"), []

    def stale(path: Path) -> str:
        looked.append(path)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(checkpoint, "digest_file", stale)
    monkeypatch.setattr(checkpoints, "RETRY_S", 0.0)
    with pytest.raises(CheckpointError, match=f"{folder}: .* cannot be read .Stale file handle.") as caught:
        engine.load_state(folder)
    assert caught.type is CheckpointError and len(looked) == checkpoints.RETRIES


def test_a_folder_that_is_not_there_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    with pytest.raises(CheckpointError, match=r"none: holds no complete state, state\.json cannot be read \(No such file"):
        engine.load_state(tmp_path / "none")


@pytest.mark.parametrize(("kind", "dtype", "named"), [("llama", Dtype.float32, "family qwen2 .here llama."),
                                                      ("qwen2", Dtype.bfloat16, "dtype float32 .here bfloat16.")])
def test_the_state_of_another_model_is_refused(folders: dict[str, Path], tmp_path: Path, kind: str, dtype: Dtype, named: str) -> None:
    folder = saved(MegatronEngine(config(), folders["qwen2"]), tmp_path / "state")
    other = MegatronEngine(config(dtype=dtype), folders[kind])
    before = everything(other)
    with pytest.raises(CheckpointError, match=f"another model: .*{named}.*Resume with the model and trainer.dtype"):
        other.load_state(folder)
    assert_same(everything(other), before)


def test_only_an_empty_folder_is_saved_to(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    with pytest.raises(CheckpointError, match="is no folder"):
        engine.save_state(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="holds files already"):
        engine.save_state(tmp_path)


def test_a_folder_that_is_away_as_a_save_begins_is_told_to_all_ranks(folders: dict[str, Path], tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def away(path: Path) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    engine, agreed = MegatronEngine(config(), folders["qwen2"]), []
    monkeypatch.setattr(Path, "iterdir", away)
    monkeypatch.setattr(checkpoint.collectives, "first_text", lambda text: agreed.append(text) or text)
    with pytest.raises(CheckpointError, match="cannot be read .Stale file handle.. Save again"):
        engine.begin_save(tmp_path)
    assert len(agreed) == 1, "the others are told, and do not wait"


def full_disk(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["write_part", "write_index"])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_leaves_nothing_that_could_be_loaded(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               place: str, background: bool) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    monkeypatch.setattr(checkpoint, place, full_disk)
    with pytest.raises(CheckpointError, match=r"could not be written .*No space left on device.*Free space"):
        (engine.begin_save(tmp_path).write if background else lambda: engine.save_state(tmp_path))()
    with pytest.raises(CheckpointError, match="holds no complete state"):
        engine.load_state(tmp_path)
    train(engine, 1, 1)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_is_written_beside_training_is_the_state_at_its_beginning(folders: dict[str, Path], tmp_path: Path, dtype: Dtype, steps: int) -> None:
    """To the byte: the same files as those saved at once, but for the time of saving in torch's metadata."""
    engine = MegatronEngine(config(dtype=dtype), folders["qwen3-tied"])
    train(engine, 1, steps)
    at_once = saved(engine, tmp_path / "at once")
    (tmp_path / "beside").mkdir()
    saving = engine.begin_save(tmp_path / "beside")
    assert list((tmp_path / "beside").iterdir()) == []
    written: dict[str, tuple[int, str]] = {}
    thread = threading.Thread(target=lambda: written.update(saving.write()))
    thread.start()
    expected = train(engine, steps + 1, steps + 3)
    thread.join()
    assert {name: (path.stat().st_size, checkpoint.digest_file(path)) for name in written for path in [tmp_path / "beside" / name]} == written
    for name in ("__0_0.distcp", "common.pt", "metadata.json"):
        assert (tmp_path / "beside" / name).read_bytes() == (at_once / name).read_bytes()
    resumed = MegatronEngine(config(dtype=dtype), folders["qwen3-tied"])
    resumed.load_state(tmp_path / "beside")
    assert resumed.num_steps == steps and train(resumed, steps + 1, steps + 3) == expected
    assert_same(everything(resumed), everything(engine))


def test_what_is_not_all_there_is_not_sealed(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    capture = checkpoint.capture

    def without_a_row(*args: Any) -> list[Shard]:
        first, *others = capture(*args)
        return [dataclasses.replace(first, values=first.values[1:]), *others]

    monkeypatch.setattr(checkpoint, "capture", without_a_row)
    with pytest.raises(CheckpointError, match="embedding.word_embeddings.weight: 3072 of 3104 elements were written"):
        engine.save_state(tmp_path)


@given(shape=st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple), data=st.data())
def test_boxes_make_up_a_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Each is a contiguous part of the range, in order."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    end = data.draw(st.integers(start, numbers.size))
    found = boxes(shape, start, end)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(len(box.offset) == len(box.sizes) == len(shape) for box in found)
    parts = [numbers[tuple(slice(first, first + size) for first, size in zip(box.offset, box.sizes, strict=True))] for box in found]
    assert [int(part.flat[0]) for part in parts] == [box.start for box in found]
    assert np.array_equal(np.concatenate([part.flatten() for part in parts] or [np.arange(0)]), np.arange(start, end))


def test_an_engine_that_is_partly_loaded_can_only_load(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    train(engine, 1, 1)
    folder = saved(engine, tmp_path / "state")
    expected = everything(engine)
    train(engine, 2, 2)
    # The disk fails after the folder was checked.
    check = checkpoint.check
    monkeypatch.setattr(checkpoint, "check", lambda *args: (check(*args), shutil.move(folder, tmp_path / "moved")))
    with pytest.raises(CheckpointError, match="could not be read"):
        engine.load_state(folder)
    groups = make_groups()
    for call in (lambda: train_on(engine, groups), lambda: engine.logprobs(groups), engine.iter_hf_tensors,
                 lambda: engine.save_state(tmp_path / "state")):
        with pytest.raises(CheckpointError, match="partly loaded.*older checkpoint, or build a new engine"):
            call()
    monkeypatch.setattr(checkpoint, "check", check)
    engine.load_state(tmp_path / "moved")
    assert_same(everything(engine), expected)
