"""Publishing weights: what transformers reads back, what `verify` refuses, full disks, old versions, and where all of it lies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

from workers import rundir  # noqa: E402
from workers.messages.types import Announcement, Version  # noqa: E402
from workers.rundir import RunFolder  # noqa: E402
from workers.weights import publisher  # noqa: E402
from workers.weights.architecture import check_tensors, read_architecture  # noqa: E402
from workers.weights.manifest import MANIFEST, WeightsError, verify  # noqa: E402
from workers.weights.publisher import Publisher, write_hf_folder  # noqa: E402
from workers.weights.starting import make_tiny  # noqa: E402

VERSION = Version(1, 7)
MIB = 1 << 20
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, 1)
    return folder


def weights(model: Path, seed: int = 0) -> Tensors:
    """Random float32 tensors of the model's shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in read_architecture(model).tensor_shapes().items()}


class Published(NamedTuple):
    """One version, and who published it."""

    publisher: Publisher
    announcement: Announcement
    folder: Path

    def check(self) -> None:
        verify(self.folder, self.announcement.version, self.announcement.digest)


@pytest.fixture
def published(model: Path, tmp_path: Path) -> Published:
    source = Publisher(tmp_path / "weights", model, torch.float32)
    announcement = source.publish(weights(model).items(), VERSION)
    return Published(source, announcement, Path(announcement.folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_version_loads_in_transformers(model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = weights(model)
    announcement = Publisher(tmp_path / "weights", model, dtype).publish(tensors.items(), VERSION)
    folder = Path(announcement.folder)
    assert announcement.version == VERSION and folder == tmp_path / "weights" / "1.7"
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = loaded.state_dict()
    for name, tensor in tensors.items():
        assert state[name].dtype == dtype and torch.equal(state[name], tensor.to(dtype)), name
    assert read_architecture(folder) == read_architecture(model)
    check_tensors(folder, read_architecture(folder))
    assert {entry.name for entry in verify(folder, VERSION, announcement.digest).files} == \
        {"config.json", "model-00000.safetensors", "model.safetensors.index.json"}


def test_an_old_dtype_in_the_config_does_not_stay(model: Path, tmp_path: Path) -> None:
    old = shutil.copytree(model, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({**config, "dtype": "float16", "torch_dtype": "float16"}))
    write_hf_folder(tmp_path, weights(model).items(), old, torch.bfloat16)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["dtype"] == "bfloat16" and "torch_dtype" not in found


def test_what_is_published_is_a_copy(model: Path, tmp_path: Path) -> None:
    """Views, transposed and shared tensors, and tensors that need gradients, as a training engine gives them."""
    tensors = weights(model)
    storage = torch.cat([tensor.flatten() for tensor in tensors.values()]).requires_grad_()
    views, start = {}, 0
    for name, tensor in tensors.items():
        view = storage[start: start + tensor.numel()]
        views[name] = view.view(tensor.shape[::-1]).t() if tensor.dim() == 2 else view
        start += tensor.numel()
    announcement = Publisher(tmp_path / "weights", model, torch.float32).publish(views.items(), VERSION)
    expected = {name: view.detach().clone() for name, view in views.items()}
    with torch.no_grad():
        storage.zero_()
    state = transformers.AutoModelForCausalLM.from_pretrained(announcement.folder, dtype="auto").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_tensors_are_taken_one_by_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later tensor is asked for only after full shards before it are on disk: the whole model is never held twice."""
    monkeypatch.setattr(publisher, "SHARD_BYTES", 1)
    seen: list[int] = []

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights(model).items():
            seen.append(len(list((tmp_path / "weights").glob(".*.tmp/*.safetensors"))))
            yield item

    Publisher(tmp_path / "weights", model, torch.float32).publish(one_by_one(), VERSION)
    assert seen[:4] == [0, 0, 1, 2] and seen[-1] == len(seen) - 2


@pytest.mark.parametrize("limit", [1, 40_000, 10**9])
def test_shards_keep_to_their_limit_and_hold_everything_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(publisher, "SHARD_BYTES", limit)
    tensors = weights(model)
    announcement = Publisher(tmp_path / "weights", model, torch.float32).publish(tensors.items(), VERSION)
    folder = Path(announcement.folder)
    largest = max(tensor.nbytes for tensor in tensors.values())
    names: list[str] = []
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        shard = load_file(file)
        assert sum(tensor.nbytes for tensor in shard.values()) <= max(limit, largest)
        names += shard
    assert sorted(names) == sorted(tensors)
    assert len(files) == {1: len(tensors), 10**9: 1}.get(limit, len(files)) and (limit != 40_000 or 2 < len(files) < len(tensors))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(tensors) and {folder / name for name in index.values()} == set(files)
    verify(folder, VERSION, announcement.digest)
    state = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_folders_are_private(published: Published) -> None:
    for folder in (published.folder, published.folder.parent):
        assert folder.stat().st_mode & 0o077 == 0


# -- verify --------------------------------------------------------------------------------------------------------------

def shard_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def rewrite_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"step":7', b'"step":8'))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "first byte of a shard": (lambda folder: flip(shard_of(folder), 0), r"model-00000\.safetensors: not the announced content"),
    "last byte of a shard": (lambda folder: flip(shard_of(folder), -1), r"model-00000\.safetensors: not the announced content"),
    "byte of the config": (lambda folder: flip(folder / "config.json", 40), r"config\.json: not the announced content"),
    "shard one byte short": (lambda folder: os.truncate(shard_of(folder), shard_of(folder).stat().st_size - 1), "not the announced content"),
    "shard with a byte more": (lambda folder: os.truncate(shard_of(folder), shard_of(folder).stat().st_size + 1), "not the announced content"),
    "empty shard": (lambda folder: os.truncate(shard_of(folder), 0), "not the announced content"),
    "no shard": (lambda folder: shard_of(folder).unlink(), r"version 1\.7 cannot be read.*model-00000"),
    "no index": (lambda folder: (folder / "model.safetensors.index.json").unlink(), r"version 1\.7 cannot be read"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), r"version 1\.7 cannot be read.*manifest\.json"),
    "no folder": (shutil.rmtree, r"version 1\.7 cannot be read"),
    "other manifest": (rewrite_manifest, "the manifest is not the announced one"),
    "empty manifest": (lambda folder: os.truncate(folder / MANIFEST, 0), "the manifest is not the announced one"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_verify_catches(published: Published, damage: str) -> None:
    published.check()
    harm, text = DAMAGES[damage]
    harm(published.folder)
    with pytest.raises(WeightsError, match=text) as caught:
        published.check()
    assert str(published.folder) in str(caught.value)


def test_verify_catches_another_version_and_another_digest(published: Published) -> None:
    digest = published.announcement.digest
    with pytest.raises(WeightsError, match=r"holds version 1\.7, announced was 1\.8"):
        verify(published.folder, Version(1, 8), digest)
    with pytest.raises(WeightsError, match=r"holds version 1\.7, announced was 2\.7"):
        verify(published.folder, Version(2, 7), digest)
    with pytest.raises(WeightsError, match="the manifest is not the announced one"):
        verify(published.folder, VERSION, "0" * len(digest))


def test_other_weights_have_another_digest(published: Published, model: Path, tmp_path: Path) -> None:
    def digest(seed: int, version: Version, name: str) -> str:
        return Publisher(tmp_path / name, model, torch.float32).publish(weights(model, seed).items(), version).digest

    assert digest(0, VERSION, "same") == published.announcement.digest
    assert digest(1, VERSION, "tensors") != published.announcement.digest
    assert digest(0, Version(1, 8), "version") != published.announcement.digest


def test_a_file_that_nobody_announced_is_noticed(published: Published, model: Path) -> None:
    """Whoever loads the folder reads every *.safetensors in it, so one more is as bad as a changed one."""
    shutil.copy(model / "model.safetensors", published.folder / "more.safetensors")
    with pytest.raises(WeightsError, match=r"more\.safetensors"):
        published.check()


# -- full disks ----------------------------------------------------------------------------------------------------------

def test_too_little_space_is_said_before_anything_is_written(published: Published, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = published.folder.parent
    monkeypatch.setattr(publisher.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9 * MIB, 7 * MIB, 2 * MIB))  # type: ignore[attr-defined]
    with pytest.raises(WeightsError, match=r"weights: 2 MiB are free, the next shard.* takes 5 MiB\. Free some space.*weights\.dir") as caught:
        published.publisher.publish([*weights(model).items(), ("more", torch.zeros(MIB))], Version(1, 8))
    assert str(parent) in str(caught.value)
    assert [path.name for path in parent.iterdir()] == ["1.7"]
    published.check()


def test_a_later_shard_without_room_leaves_nothing(published: Published, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, sizes = published.folder.parent, iter([8 * MIB, 8 * MIB, 1000])
    monkeypatch.setattr(publisher, "SHARD_BYTES", 40_000)
    monkeypatch.setattr(publisher.shutil, "disk_usage",
                        lambda folder: shutil._ntuple_diskusage(9 * MIB, 0, next(sizes)))  # type: ignore[attr-defined]
    with pytest.raises(WeightsError, match="0 MiB are free"):
        published.publisher.publish(weights(model).items(), Version(1, 8))
    assert [path.name for path in parent.iterdir()] == ["1.7"]


class Disk(NamedTuple):
    """A small file system of its own."""

    folder: Path
    size: int

    def fill(self, leave: int) -> Path:
        ballast = self.folder / "ballast"
        with ballast.open("wb") as file:
            file.write(bytes(shutil.disk_usage(self.folder).free - leave))
        return ballast


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder, size = tmp_path / "disk", 8 * MIB
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if not mounted or mounted.returncode:
        pytest.skip(f"no small disk can be mounted here ({mounted.stderr.strip() if mounted else 'no mount command'})")
    yield Disk(folder, size)
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("leave", [600_000, 1_800_000])  # the model takes 1.2 MiB, and one is held in reserve
def test_a_really_full_disk(disk: Disk, model: Path, leave: int) -> None:
    source = Publisher(disk.folder / "weights", model, torch.float32)
    first = source.publish(weights(model).items(), Version(1, 0))
    ballast = disk.fill(leave)
    with pytest.raises(WeightsError, match=r"/disk/weights: \d MiB are free.*Free some space, or choose another folder.*weights\.dir"):
        source.publish(weights(model, 1).items(), Version(1, 1))
    assert [path.name for path in (disk.folder / "weights").iterdir()] == ["1.0"]
    verify(Path(first.folder), Version(1, 0), first.digest)
    ballast.unlink()
    second = source.publish(weights(model, 1).items(), Version(1, 1))  # with room again, it goes on
    verify(Path(second.folder), Version(1, 1), second.digest)


def test_a_disk_that_fills_up_while_a_shard_is_written(disk: Disk, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Publisher(disk.folder / "weights", model, torch.float32)
    monkeypatch.setattr(publisher.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(8 * MIB, 0, 8 * MIB))  # type: ignore[attr-defined]
    monkeypatch.setattr(publisher, "RESERVE_BYTES", -(1 << 40))
    with pytest.raises(WeightsError, match=r"/disk/weights.*Free some space, or choose another folder.*weights\.dir"):
        source.publish([*weights(model).items(), ("more", torch.zeros(4 * MIB))], VERSION)
    assert list((disk.folder / "weights").iterdir()) == []


def test_a_disk_without_room_for_the_small_files(disk: Disk, model: Path, tmp_path: Path) -> None:
    """config.json comes before the first shard, manifest and index after the last."""
    source = Publisher(disk.folder / "weights", model, torch.float32)
    disk.fill(0)
    with pytest.raises(WeightsError, match=r"/disk/weights.*weights\.dir"):
        source.publish(weights(model).items(), VERSION)
    assert list((disk.folder / "weights").iterdir()) == []


def test_a_tensor_that_cannot_be_made_leaves_nothing(published: Published, model: Path) -> None:
    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(model).items())[:3]
        raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError, match="the engine is gone"):
        published.publisher.publish(breaks(), Version(1, 8))
    assert [path.name for path in published.folder.parent.iterdir()] == ["1.7"]


def test_a_folder_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"weights\.dir: .*file/weights cannot be made \(Not a directory\).*choose another weights\.dir"):
        Publisher(tmp_path / "file" / "weights", model, torch.float32)


def test_an_own_private_folder_is_taken_over_from_an_earlier_incarnation(published: Published, model: Path) -> None:
    parent = published.folder.parent
    (parent / ".1.8.tmp").mkdir()  # it died while it was publishing
    (parent / ".1.8.tmp" / "model-00000.safetensors").touch()
    later = Publisher(parent, model, torch.float32).publish(weights(model, 1).items(), Version(2, 7))
    assert sorted(path.name for path in parent.iterdir()) == ["1.7", "2.7"]
    published.check()
    verify(Path(later.folder), Version(2, 7), later.digest)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_folder_that_others_may_enter_is_not_taken(published: Published, model: Path, mode: int) -> None:
    """In a shared place it might be somebody else's."""
    parent = published.folder.parent
    parent.chmod(mode)
    with pytest.raises(WeightsError, match=r"weights is not a private folder of this user.*Remove it, or choose another weights\.dir"):
        Publisher(parent, model, torch.float32)
    assert parent.stat().st_mode & 0o777 == mode
    published.check()


def test_a_folder_of_another_user_is_not_taken(published: Published, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    monkeypatch.setattr(publisher.os, "getuid", lambda: user + 1)
    with pytest.raises(WeightsError, match="is not a private folder of this user"):
        Publisher(published.folder.parent, model, torch.float32)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_not_taken(published: Published, model: Path, tmp_path: Path, kind: str) -> None:
    """A link might lead to anything, even to a private folder of this user."""
    place = tmp_path / "place"
    if kind == "file":
        place.touch(mode=0o600)
    else:
        place.symlink_to(published.folder.parent)
    with pytest.raises(WeightsError, match=r"weights\.dir: .*place"):
        Publisher(place, model, torch.float32)
    published.check()


# -- old versions --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("present", "needed", "kept"), [
    (["1.0"], Version(9, 9), ["1.0"]),
    (["1.0", "1.1"], Version(9, 9), ["1.0", "1.1"]),
    (["1.0", "1.1", "1.2", "1.3"], Version(1, 3), ["1.2", "1.3"]),
    (["1.0", "1.1", "1.2", "1.3"], Version(9, 9), ["1.2", "1.3"]),
    (["1.0", "1.1", "1.2", "1.3"], Version(1, 1), ["1.1", "1.2", "1.3"]),
    (["1.0", "1.1", "1.2", "1.3"], Version(0, 0), ["1.0", "1.1", "1.2", "1.3"]),
    (["1.8", "1.9", "1.10", "1.11"], Version(1, 11), ["1.10", "1.11"]),  # numbers, not letters
    (["1.99", "2.0", "2.1"], Version(2, 1), ["2.0", "2.1"]),
    (["1.98", "1.99", "2.0"], Version(1, 99), ["1.99", "2.0"]),
])
def test_old_versions_are_removed(model: Path, tmp_path: Path, present: list[str], needed: Version, kept: list[str]) -> None:
    folder = tmp_path / "weights"
    source = Publisher(folder, model, torch.float32)
    for name in [*present, ".2.5.tmp"]:  # the last is being published by nobody we know
        (folder / name).mkdir()
        (folder / name / "file").touch()
    source.remove_older(needed)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, ".2.5.tmp"])


# -- where they lie ------------------------------------------------------------------------------------------------------

def test_in_the_run_folder(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).weights("run") == tmp_path / "weights"


def test_automatic_is_in_memory_where_there_is_such_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"
    monkeypatch.setattr(rundir, "MEMORY", memory)
    run = RunFolder(tmp_path / "run")
    assert run.weights("auto").parent == run.path
    memory.mkdir()
    assert run.weights("auto").parent == memory


def test_below_a_given_folder_runs_do_not_meet(tmp_path: Path) -> None:
    given = str(tmp_path / "given")
    folders = [RunFolder(tmp_path / name).weights(given) for name in ("a", "b", "a/c")]
    assert len(set(folders)) == 3 and {folder.parent for folder in folders} == {tmp_path / "given"}
    assert folders[0] == RunFolder(tmp_path / "a").weights(given) and f"-{os.getuid()}-" in folders[0].name


@pytest.mark.parametrize("kind", ["auto", "run", "given"])
def test_removing_all_versions(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    monkeypatch.setattr(rundir, "MEMORY", parent)
    where, run = str(parent) if kind == "given" else kind, RunFolder.create(tmp_path / "run")
    bystander = RunFolder(tmp_path / "other").weights(where)
    bystander.mkdir(parents=True)
    folder = run.weights(where)
    Publisher(folder, model, torch.float32).publish(weights(model).items(), VERSION)
    (folder / ".1.8.tmp").mkdir()
    assert (folder / "1.7" / MANIFEST).is_file()
    run.remove_weights(where)
    assert not folder.exists() and bystander.is_dir() and run.jobs.is_dir() and parent.is_dir()
    run.remove_weights(where)  # nothing there is nothing to do
