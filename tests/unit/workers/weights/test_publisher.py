"""A rank's files of every version: made beforehand, filled, described, removed; full memory; copies on shared storage; and where all of it lies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

from tests.support.small_disk import small_disk  # noqa: E402
from workers.config import Dtype  # noqa: E402
from workers.messages.parts import Version  # noqa: E402
from workers.model.architecture import read_architecture  # noqa: E402
from workers.model.initialize import make_tiny  # noqa: E402
from workers.run import paths  # noqa: E402
from workers.run.digests import digest_of  # noqa: E402
from workers.run.folder import RunFolder  # noqa: E402
from workers.weights.layout import lay_out, small_files  # noqa: E402
from workers.weights.manifest import MANIFEST, Manifest, WeightsError, verify, write_manifest  # noqa: E402
from workers.weights.publisher import Publisher, SharedFolder  # noqa: E402
from workers.weights.store import NodeStore  # noqa: E402

MIB, CHUNK = 1 << 20, 1 << 16
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


def make(root: Path, model: Path, dtype: Dtype = Dtype.float32) -> Publisher:
    """The publisher of a model that a single rank has."""
    files = lay_out(read_architecture(model).tensor_shapes(), dtype)
    return Publisher(NodeStore(root), 0, files, small_files(files, model, dtype), dtype)


class Rank(Publisher):
    """One of two; it has `tensors`."""

    tensors: Tensors


def ranks_of_one_node(model: Path, root: Path) -> tuple[Rank, Rank]:
    """The first has what is not in layers."""
    shapes, tensors = read_architecture(model).tensor_shapes(), weights(model)
    files = lay_out(shapes, Dtype.float32, {name: int(".layers." in name) for name in shapes})
    small = small_files(files, model, Dtype.float32)
    ranks = [Rank(NodeStore(root), source, [file for file in files if file.source == source], {} if source else small, Dtype.float32)
             for source in range(2)]
    for source, rank in enumerate(ranks):
        rank.tensors = {name: tensor for name, tensor in tensors.items() if (".layers." in name) == source}
    return ranks[0], ranks[1]


def versions(publisher: Publisher) -> list[Version]:
    """Those of which there is anything."""
    folder = publisher.folder(Version(0, 0)).parent
    return sorted(Version.parse(path.name) for path in folder.iterdir() if not path.name.startswith("."))


def publish(publisher: Publisher, model: Path, version: Version, seed: int = 0) -> Manifest:
    publisher.fill(weights(model, seed).items(), version)
    manifest = Manifest(version, CHUNK, publisher.describe(version, CHUNK, 1))
    write_manifest(publisher.folder(version), manifest)
    return manifest


def check(folder: Path, manifest: Manifest) -> None:
    verify(folder, manifest.version, digest_of(manifest.encode()))


def test_what_is_published_is_the_model_and_private(model: Path, tmp_path: Path) -> None:
    publisher, version = make(tmp_path / "store", model, Dtype.bfloat16), Version(1, 7)
    manifest = publish(publisher, model, version)
    folder = publisher.folder(version)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*publisher.names, MANIFEST])
    check(folder, manifest)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = loaded.state_dict()
    for name, tensor in weights(model).items():
        assert state[name].dtype is torch.bfloat16 and torch.equal(state[name], tensor.bfloat16()), name
    assert all(path.stat().st_mode & 0o077 == 0 for path in (*(folder / name for name in publisher.names), folder, *folder.parents[:2]))


def test_files_are_made_beforehand_once(model: Path, tmp_path: Path) -> None:
    publisher, version = make(tmp_path / "store", model), Version(1, 0)
    publisher.prepare(version)
    made = {path.name: path.stat().st_ino for path in publisher.folder(version).iterdir()}
    publisher.prepare(version)
    publish(publisher, model, version)
    assert {name: (publisher.folder(version) / name).stat().st_ino for name in publisher.names} == made
    publisher.prepare(Version(1, 1))
    publisher.prepare(Version(1, 2))  # it did not come to that
    assert versions(publisher) == [version, Version(1, 2)]
    publisher.discard()
    publisher.discard()
    assert versions(publisher) == [version]


def test_two_sources_of_one_node_share_a_folder(model: Path, tmp_path: Path) -> None:
    ranks, version, entries, tensors = ranks_of_one_node(model, tmp_path / "store"), Version(1, 1), [], weights(model)
    for rank in ranks:
        rank.fill(rank.tensors.items(), version)
        entries += rank.describe(version, CHUNK, 1)
    manifest = Manifest(version, CHUNK, entries)
    assert {entry.source for entry in manifest.files} == {0, 1}
    write_manifest(ranks[0].folder(version), manifest)
    check(ranks[1].folder(version), manifest)
    found: Tensors = {}
    for path in ranks[0].folder(version).glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    ranks[1].prepare(Version(1, 2))
    ranks[0].prepare(Version(1, 2))
    ranks[1].discard()
    assert {path.name for path in ranks[0].folder(Version(1, 2)).iterdir()} == set(ranks[0].names), "the other's files stay"


def test_differences_are_to_the_version_before(model: Path, tmp_path: Path) -> None:
    publisher = make(tmp_path / "store", model)
    publish(publisher, model, Version(1, 0))
    assert publisher.make_deltas(Version(1, 0), CHUNK, 1) is None
    publish(publisher, model, Version(1, 1))  # the same numbers
    path, size = publisher.make_deltas(Version(1, 1), CHUNK, 1) or (None, None)
    assert path is not None and path.is_file() and size is not None and size.encoded < size.raw / 50
    assert versions(publisher) == [Version(1, 0), Version(1, 1)], "it is no version"
    for step in (2, 3):
        publish(publisher, model, Version(1, step))
    publisher.remove_older(Version(1, 3))
    assert not path.exists()


# -- full memory ---------------------------------------------------------------------------------------------------------

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
    with small_disk(tmp_path / "disk", str(8 * MIB)) as folder:
        yield Disk(folder, 8 * MIB)


@pytest.mark.parametrize("leave", [0, 300_000, 1_201_000])  # the model takes 1.2 MiB
def test_full_memory_is_said_with_the_remedy_and_nothing_is_left(disk: Disk, model: Path, leave: int) -> None:
    publisher = make(disk.folder / "store", model)
    first = publish(publisher, model, Version(1, 0))
    ballast = disk.fill(leave)
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"weights\.dir: .*/disk/store/published/1\.1.* MiB are free.*Free some memory.*weights\.dir"):
            publisher.fill(weights(model, 1).items(), Version(1, 1))
        assert versions(publisher) == [Version(1, 0)]
    check(publisher.folder(Version(1, 0)), first)
    ballast.unlink()
    second = publish(publisher, model, Version(1, 1), 1)  # with room again, it goes on
    check(publisher.folder(Version(1, 1)), second)


def test_memory_that_fills_up_later_does_not_matter(disk: Disk, model: Path) -> None:
    """What is prepared is reserved: copying weights into it cannot fail."""
    publisher = make(disk.folder / "store", model)
    publisher.prepare(Version(1, 0))
    disk.fill(4096)  # for the manifest
    check(publisher.folder(Version(1, 0)), publish(publisher, model, Version(1, 0)))


def test_shared_storage_without_room(disk: Disk, model: Path, tmp_path: Path) -> None:
    publisher, shared, version = make(tmp_path / "store", model), SharedFolder(disk.folder / "weights"), Version(1, 0)
    publish(publisher, model, version)
    disk.fill(600_000)
    with pytest.raises(WeightsError, match=r"disk/weights/\.1\.0\.part: version 1\.0 cannot be written.*MiB are free.*that all nodes share"):
        shared.copy(version, publisher.folder(version), publisher.names)


def test_a_tensor_that_cannot_be_made_leaves_nothing(model: Path, tmp_path: Path) -> None:
    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(model).items())[:3]
        raise RuntimeError("the engine is gone")

    publisher = make(tmp_path / "store", model)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        publisher.fill(breaks(), Version(1, 8))
    assert versions(publisher) == []


# -- shared storage ------------------------------------------------------------------------------------------------------

def test_a_version_on_shared_storage_is_whole_or_not_there(model: Path, tmp_path: Path) -> None:
    publisher, folder = make(tmp_path / "store", model), tmp_path / "weights"
    for step in range(4):
        version, shared = Version(2, step), SharedFolder(folder)
        manifest = publish(publisher, model, version, step)
        shared.copy(version, publisher.folder(version), publisher.names)
        assert not (folder / str(version)).exists()
        final = shared.complete(manifest)
        assert shared.complete(manifest) == final, "tried again, as where its folder could not be written through"
        check(final, manifest)
        assert final == folder / str(version) and final.stat().st_mode & 0o077 == 0
    (folder / ".1.9.part").mkdir()  # an earlier incarnation died over it
    (folder / ".2.4.part").mkdir()
    shared.remove_unfinished(2)
    shared.remove_older(Version(2, 3), Version(2, 1))
    assert sorted(path.name for path in folder.iterdir()) == [".2.4.part", "2.1", "2.2", "2.3"]


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_folder_that_others_may_enter_is_not_taken(tmp_path: Path, mode: int) -> None:
    """In a shared place it might be somebody else's."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights").chmod(mode)
    with pytest.raises(WeightsError, match=r"weights is not a private folder of this user.*Remove it, or choose another weights\.dir"):
        SharedFolder(tmp_path / "weights")


# -- old versions --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("present", "needed", "kept"), [
    ([0], Version(9, 9), [0]),
    ([0, 1], Version(9, 9), [0, 1]),
    ([0, 1, 2, 3], Version(1, 3), [2, 3]),
    ([0, 1, 2, 3], Version(9, 9), [2, 3]),
    ([0, 1, 2, 3], Version(1, 1), [1, 2, 3]),
    ([0, 1, 2, 3], Version(0, 0), [0, 1, 2, 3]),
    ([8, 9, 10, 11], Version(1, 11), [10, 11]),  # numbers, not letters
])
def test_old_versions_are_removed(model: Path, tmp_path: Path, present: list[int], needed: Version, kept: list[int]) -> None:
    publisher = make(tmp_path / "store", model)
    for step in present:
        publish(publisher, model, Version(1, step))
        publisher.make_deltas(Version(1, step), CHUNK, 1)
    publisher.prepare(Version(1, present[-1] + 1))
    assert publisher.remove_older(needed) == [Version(1, step) for step in present if step not in kept]
    assert versions(publisher) == [Version(1, step) for step in [*kept, present[-1] + 1]]
    assert publisher.remove_older(needed) == []
    deltas = {path.name for path in (tmp_path / "store" / "published").glob(".*")}
    assert deltas == {f".1.{step}.0.delta" for step in kept if step != present[0]}


def test_ranks_of_one_node_remove_their_own_files(model: Path, tmp_path: Path) -> None:
    first, second = ranks_of_one_node(model, tmp_path / "store")
    for step in range(4):
        for rank in (first, second):
            rank.fill(rank.tensors.items(), Version(1, step))
        write_manifest(first.folder(Version(1, step)), Manifest(Version(1, step), CHUNK, []))
    assert second.remove_older(Version(1, 3)) == [Version(1, 0), Version(1, 1)]
    assert {path.name for path in first.folder(Version(1, 0)).iterdir()} == {*first.names, MANIFEST}
    assert first.remove_older(Version(1, 3)) == [Version(1, 0), Version(1, 1)], "each tells its server"
    assert versions(first) == [Version(1, 2), Version(1, 3)]
    first.remove_all()
    second.remove_all()
    assert versions(first) == []


def test_what_earlier_incarnations_left_is_removed_at_the_beginning_and_all_at_the_end(model: Path, tmp_path: Path) -> None:
    before = make(tmp_path / "store", model)
    for step in (7, 8):
        publish(before, model, Version(1, step))
        before.make_deltas(Version(1, step), CHUNK, 1)
    before.prepare(Version(1, 9))  # it was killed
    after = make(tmp_path / "store", model)
    after.prepare(Version(2, 8))
    after.remove_earlier(2)
    assert [path.name for path in (tmp_path / "store" / "published").iterdir()] == ["2.8"]
    publish(after, model, Version(2, 8))
    after.prepare(Version(2, 9))
    after.folder(Version(3, 8)).mkdir()  # the one that follows has begun already
    after.remove_all()
    assert [path.name for path in (tmp_path / "store" / "published").iterdir()] == ["3.8"]


# -- where they lie ------------------------------------------------------------------------------------------------------

def test_automatic_is_in_memory_where_there_is_such_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"
    monkeypatch.setattr(paths, "MEMORY", memory)
    run = RunFolder(tmp_path / "run")
    assert run.weights("auto").parent == run.path and run.weights("run") == run.path / "weights"
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
    monkeypatch.setattr(paths, "MEMORY", parent)
    where, run, other = str(parent) if kind == "given" else kind, RunFolder.create(tmp_path / "run"), RunFolder.create(tmp_path / "other")
    for folder in (run, other):
        publish(make(folder.store(where), model), model, Version(1, 7))
        SharedFolder(folder.weights("run"))
        NodeStore(folder.merged(where))
    run.remove_weights(where)
    assert not any(path.exists() for path in (run.store(where), run.merged(where), run.weights(where), run.weights("run")))
    assert other.store(where).is_dir() and other.merged(where).is_dir() and other.weights("run").is_dir() and run.jobs.is_dir() and parent.is_dir()
    run.remove_weights(where)  # nothing there is nothing to do
