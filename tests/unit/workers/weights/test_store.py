"""The node's store: what several processes share, resume and remove; processes are really killed, memory is really full."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.small_disk import small_disk
from workers.messages.parts import Version
from workers.run.digests import digest_of
from workers.run.folder import RunFolder
from workers.weights.locks import Lock
from workers.weights.manifest import MANIFEST, Chunk, FileEntry, Manifest, WeightsError, describe_files, verify
from workers.weights.mmap import MappedFiles
from workers.weights.partial_version import CorruptChunk, Incoming
from workers.weights.store import Cancelled, NodeStore, clean_stale

PROJECT = Path(__file__).parents[4]
VERSION, NEXT, LAST = Version(1, 7), Version(1, 8), Version(1, 9)
CHUNK, WAIT_S = 1000, 60.0
NEVER = threading.Event()


class Source:
    """A published version: one file of 4.5 chunks and one of one."""

    def __init__(self, folder: Path, version: Version = VERSION, seed: int = 0) -> None:
        folder.mkdir()
        (folder / "shard").write_bytes(bytes((seed + number // 3) % 251 for number in range(4500)))
        (folder / "config.json").write_bytes(b"{}")
        self.manifest = Manifest(version, CHUNK, describe_files(folder, ["shard", "config.json"], CHUNK))
        self.content, self.files, self.chunks = self.manifest.encode(), MappedFiles(folder), self.manifest.chunks()

    def bytes_of(self, number: int) -> memoryview:
        chunk = self.chunks[number]
        view = self.files.view(chunk.name, chunk.offset, chunk.size)
        assert view is not None
        return view

    def write(self, incoming: Incoming, *numbers: int) -> None:
        for number in numbers or range(len(self.chunks)):
            incoming.write(self.chunks[number], self.bytes_of(number))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "source")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NodeStore]:
    store = NodeStore(tmp_path / "store")
    yield store
    store.leave()


def hold(store: NodeStore, source: Source) -> Path:
    version = source.manifest.version
    assert store.lock(version, WAIT_S, NEVER)
    incoming = store.begin(source.content, version)
    source.write(incoming)
    folder = incoming.finish()
    store.unlock(version)
    return folder


class Process:
    """Another process of this node. Runs `code` with `store` open, then says so, and waits to be told to end or be killed."""

    def __init__(self, root: Path, code: str = "", wanted: str = "ready") -> None:
        script = f"""
import sys, threading
from pathlib import Path
from tests.unit.workers.weights.test_store import NEVER, VERSION, NEXT, Source
from workers.weights.store import NodeStore
store = NodeStore(Path({str(root)!r}))
{code}
print("ready", flush=True)
sys.stdin.readline()
store.leave()
"""
        self.process = subprocess.Popen([sys.executable, "-c", script], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline().strip() == wanted

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)

    def end(self) -> None:
        self.process.communicate("\n", timeout=WAIT_S)
        assert self.process.returncode == 0


# -- who uses it -----------------------------------------------------------------------------------------------------------

def test_the_last_one_that_leaves_removes_it(tmp_path: Path) -> None:
    root = tmp_path / "store"
    first, second = NodeStore(root), NodeStore(root)
    assert root.stat().st_mode & 0o777 == 0o700
    other = Process(root)
    first.leave()
    second.leave()
    assert root.is_dir(), "the other process is still there"
    other.end()
    assert not root.exists() and list(tmp_path.iterdir()) == []


def test_one_can_join_while_another_leaves(tmp_path: Path) -> None:
    """Whatever the order, whoever has joined has a store."""
    def come_and_go(_: int) -> None:
        store = NodeStore(tmp_path / "store")
        assert (store.root / "held").is_dir() and (store.root / "published").is_dir()
        store.allocate(store.root / "held", f".{threading.get_ident()}", 10)
        store.leave()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(200)))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_job_left_is_removed_by_the_next(tmp_path: Path) -> None:
    mine, left, used = (RunFolder(tmp_path / name).store(str(tmp_path / "memory")) for name in ("mine", "left", "used"))
    bystander = tmp_path / "memory" / "something else"
    dead, alive = Process(left), Process(used)
    dead.kill()
    bystander.mkdir()
    store = NodeStore(mine)
    half_gone = mine.with_name(mine.name[:-4] + "0000.123.removed")
    half_gone.mkdir()
    assert clean_stale(tmp_path / "memory") == [left]
    assert not left.exists() and not half_gone.exists() and used.is_dir() and mine.is_dir() and bystander.is_dir()
    alive.end()
    store.leave()
    assert clean_stale(tmp_path / "memory") == [] and clean_stale(tmp_path / "nothing") == []


def test_a_store_of_another_node_on_shared_storage_is_left_alone(tmp_path: Path) -> None:
    root = RunFolder(tmp_path / "run").store(str(tmp_path))
    Process(root).kill()
    (root / "in_use").write_text("another-node")
    assert clean_stale(tmp_path) == [] and root.is_dir()


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_folder_that_others_may_enter_is_not_taken(tmp_path: Path, mode: int) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(WeightsError, match=r"weights\.dir: .*store is not a private folder of this user"):
        NodeStore(tmp_path / "store")


@pytest.mark.parametrize("kind", ["file", "link", "below a file"])
def test_what_is_no_folder_is_not_taken(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.touch(mode=0o600)
    with pytest.raises(WeightsError, match=r"weights\.dir: .*place"):
        NodeStore(place / "store" if kind == "below a file" else place)


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, its last holder removed the file, and somebody made and locked a new one."""
    path, flock = tmp_path / "lock", fcntl.flock
    others: list[Lock | None] = []

    def overtaken(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        others.append(Lock.take(path))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    assert Lock.take(path) is None and others[0] is not None
    others[0].remove()
    assert not path.exists()


def test_a_lock_is_given_up_even_where_a_child_has_inherited_it(tmp_path: Path) -> None:
    lock = Lock.take(tmp_path / "lock")
    assert lock is not None and Lock.take(tmp_path / "lock", shared=True) is None
    inherited = os.dup(lock._descriptor)
    lock.release()
    lock.release()
    again = Lock.take(tmp_path / "lock")
    assert again is not None
    again.release()
    os.close(inherited)


# -- fetching --------------------------------------------------------------------------------------------------------------

def test_a_version_is_there_complete_or_not_at_all(store: NodeStore, source: Source) -> None:
    assert store.lock(VERSION, WAIT_S, NEVER) and store.newest() is None
    incoming = store.begin(source.content, VERSION)
    arrived: list[Chunk] = []
    incoming.subscribe(arrived.append)
    assert (incoming.folder / "shard").stat().st_size == 4500, "allocated beforehand"
    source.write(incoming, 0, 2, 5)
    assert [chunk.number for chunk in incoming.missing()] == [1, 3, 4] and not store.is_held(VERSION)
    assert incoming.has(source.chunks[2]) and not incoming.has(source.chunks[1])
    with pytest.raises(WeightsError, match="3 of 6 chunks have not arrived"):
        incoming.finish()
    source.write(incoming, 1, 3, 4)
    assert [chunk.number for chunk in arrived] == [0, 2, 5, 1, 3, 4]
    assert incoming.finish() == store.held(VERSION) and store.newest() == VERSION
    verify(store.held(VERSION), VERSION, digest_of(source.content))
    store.unlock(VERSION)
    assert not store.lock(VERSION, WAIT_S, NEVER), "there is nothing left to fetch"


def test_nothing_enters_that_was_not_announced(store: NodeStore, source: Source) -> None:
    incoming = store.begin(source.content, VERSION)
    for wrong in (bytes(CHUNK), bytes(source.bytes_of(0))[:-1], bytes(source.bytes_of(0)) + b"x", source.bytes_of(1)):
        with pytest.raises(CorruptChunk, match=r"shard: chunk 0 of version 1\.7 is not what was announced"):
            incoming.write(source.chunks[0], wrong)
    assert len(incoming.missing()) == 6


def test_a_manifest_of_another_version_is_refused(store: NodeStore, source: Source) -> None:
    with pytest.raises(WeightsError, match=r"the manifest is of version 1\.7, announced was 1\.8"):
        store.begin(source.content, NEXT)


def test_several_threads_write_at_once(store: NodeStore, source: Source) -> None:
    incoming = store.begin(source.content, VERSION)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: source.write(incoming, number), list(range(6)) * 5))
    verify(incoming.finish(), VERSION, digest_of(source.content))


def test_another_process_goes_on_where_one_was_killed(tmp_path: Path, store: NodeStore, source: Source) -> None:
    dying = Process(store.root, f"""
source = Source(Path({str(tmp_path / 'again')!r}))
assert store.lock(VERSION, 1.0, NEVER)
source.write(store.begin(source.content, VERSION), 0, 3)
""")
    with pytest.raises(WeightsError, match=r"the process of this node that fetches it has brought nothing for 0\.2 s"):
        store.lock(VERSION, 0.2, NEVER)
    dying.kill()
    assert store.lock(VERSION, WAIT_S, NEVER)
    incoming = store.begin(source.content, VERSION)
    assert [chunk.number for chunk in incoming.missing()] == [1, 2, 4, 5]
    source.write(incoming, 1, 2, 4, 5)
    verify(incoming.finish(), VERSION, digest_of(source.content))


def test_one_that_waits_uses_what_another_process_has_fetched(tmp_path: Path, store: NodeStore) -> None:
    other = Process(store.root, f"""
source = Source(Path({str(tmp_path / 'again')!r}))
assert store.lock(VERSION, 1.0, NEVER)
incoming = store.begin(source.content, VERSION)
print("fetching", flush=True)
sys.stdin.readline()
source.write(incoming)
incoming.finish()
store.unlock(VERSION)
assert not store.lock(VERSION, 1.0, NEVER)
""", wanted="fetching")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.lock, VERSION, WAIT_S, NEVER)
        assert other.process.stdin is not None
        other.process.stdin.write("\n")
        other.process.stdin.flush()
        assert waiting.result(WAIT_S) is False and store.newest() == VERSION
    other.end()


def test_waiting_ends_when_the_version_is_not_wanted_any_more(store: NodeStore) -> None:
    other = NodeStore(store.root)
    assert other.lock(VERSION, WAIT_S, NEVER)
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.lock, VERSION, WAIT_S, cancelled)
        cancelled.set()
        with pytest.raises(Cancelled, match=r"version 1\.7 is not wanted any more"):
            waiting.result(WAIT_S)
    other.leave()


@pytest.mark.parametrize("damage", ["a noted chunk", "other manifest", "no manifest", "a size", "the notes"])
def test_what_was_left_is_believed_only_as_far_as_it_is_right(store: NodeStore, source: Source, tmp_path: Path, damage: str) -> None:
    incoming = store.begin(source.content, VERSION)
    source.write(incoming, 0, 1, 2)
    if damage == "a noted chunk":
        with (incoming.folder / "shard").open("r+b") as file:
            file.seek(1500)
            file.write(b"wrong")
    elif damage == "other manifest":
        source = Source(tmp_path / "other", seed=9)
    elif damage == "no manifest":
        (incoming.folder / MANIFEST).unlink()
    elif damage == "a size":
        os.truncate(incoming.folder / "shard", 4499)
    else:
        os.truncate(store.held(VERSION).with_name(f".{VERSION}.arrived"), 5)
    again = store.begin(source.content, VERSION)
    assert [chunk.number for chunk in again.missing()] == ([1, 3, 4, 5] if damage == "a noted chunk" else [0, 1, 2, 3, 4, 5])
    source.write(again)
    verify(again.finish(), VERSION, digest_of(source.content))


def test_what_is_made_here_is_held_complete_or_not_at_all(store: NodeStore, tmp_path: Path) -> None:
    """Also where who made it was killed: the next one begins anew. Who waits sees it grow."""
    half = "store.lock(VERSION, 60, NEVER); making = store.make(VERSION); part, grows = making.__enter__(); (part / 'half').touch(); grows()"
    dead = Process(store.root, half)
    assert Incoming.last_arrival(store.held(VERSION)) > 0 and not store.is_held(VERSION)
    dead.kill()
    assert store.lock(VERSION, WAIT_S, NEVER)
    with pytest.raises(OSError, match="input/output"), store.make(VERSION) as (folder, _):
        raise OSError("input/output error")
    assert sorted(path.name for path in (store.root / "held").iterdir()) == [f".{VERSION}.lock"]
    with store.make(VERSION) as (folder, _):
        (folder / "whole").touch()
    store.unlock(VERSION)
    assert not store.lock(VERSION, WAIT_S, NEVER) and [path.name for path in store.held(VERSION).iterdir()] == ["whole"]
    assert sorted(path.name for path in (store.root / "held").iterdir()) == [f".{VERSION}.lock", str(VERSION)]


# -- full memory -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def big_manifest() -> bytes:
    """Of a version of 1.5 MiB."""
    return Manifest(VERSION, 1 << 20, [FileEntry(f"shard-{number}", 1 << 19, 0, ["0" * 64]) for number in range(3)]).encode()


def test_full_memory_is_an_error_with_a_remedy_before_anything_is_fetched(disk: Path) -> None:
    store = NodeStore(disk / "store")
    with pytest.raises(WeightsError, match=r"0 MiB are free, 0 MiB are needed \(No space left on device\)\. Free some memory.*weights\.dir"):
        store.begin(big_manifest(), VERSION)
    assert store._present() == set() and shutil.disk_usage(disk).used < 1 << 17, "nothing is left of it"
    with pytest.raises(WeightsError, match=r"Free some memory.*weights\.dir"):
        store.allocate(store.root, "file", 1 << 21)
    assert not (store.root / "file").exists()
    store.allocate(store.root, "file", 1 << 19)
    assert (store.root / "file").stat().st_blocks * 512 == 1 << 19, "its memory is reserved"
    store.leave()


def test_a_limit_on_files_is_an_error_too(tmp_path: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
from workers.weights.manifest import WeightsError
from tests.unit.workers.weights.test_store import big_manifest
try:
    store.begin(big_manifest(), VERSION)
except WeightsError as error:
    assert "Free some memory" in str(error), error
    assert store._present() == set()
"""
    Process(tmp_path / "store", code).end()


# -- old versions ----------------------------------------------------------------------------------------------------------

def test_old_versions_are_removed_but_those_that_others_use(store: NodeStore, tmp_path: Path) -> None:
    for number, version in enumerate((VERSION, NEXT, LAST)):
        hold(store, Source(tmp_path / f"source-{number}", version))
    store.delta(store.held(VERSION)).touch()
    other = Process(store.root, "assert store.use(NEXT)")
    assert store.use(VERSION) and store.use(LAST)
    store.remove_older({LAST})
    assert store.versions() == [NEXT, LAST], "what this process used itself is released"
    other.kill()
    store.remove_older({LAST})
    assert store.versions() == [LAST] and not store.use(NEXT)
    assert sorted(path.name for path in (store.root / "held").iterdir()) == [f".{LAST}.lock", str(LAST)]


def test_newer_versions_and_fetches_under_way_are_not_removed(store: NodeStore, source: Source, tmp_path: Path) -> None:
    hold(store, Source(tmp_path / "last", LAST))
    other = NodeStore(store.root)
    assert other.lock(VERSION, WAIT_S, NEVER)
    incoming = other.begin(source.content, VERSION)
    store.remove_older({NEXT})
    assert store.versions() == [LAST] and incoming.folder.is_dir()
    store.remove_older(set())
    other.unlock(VERSION)
    store.remove_older({NEXT})
    assert not incoming.folder.exists() and store.versions() == [LAST]
    other.leave()


def test_versions_are_in_order_of_their_numbers(store: NodeStore, tmp_path: Path) -> None:
    for version in (Version(1, 10), Version(2, 0), Version(1, 9)):
        hold(store, Source(tmp_path / str(version), version))
    assert store.versions() == [Version(1, 9), Version(1, 10), Version(2, 0)] and store.newest() == Version(2, 0)
