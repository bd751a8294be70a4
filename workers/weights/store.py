"""The weights that a node holds, in memory-backed files that its processes share.

    /dev/shm/headway-<uid>-<run>/          0700
        in_use                             every process that uses the store holds a shared lock on it; its content is the node's name
        published/<version>/               what trainer ranks of this node publish
        held/<version>/                    what rollout workers of this node have fetched: complete (renamed), or not there
        held/.<version>.part/              being fetched, by whoever holds the lock
        held/.<version>.arrived            one byte a chunk: 1 when it is there, so that another worker goes on where one died
        held/.<version>.lock               exclusive while it is fetched, shared while it is in use
        held/.<version>.delta              the differences to the version before, as received (delta.py)

The last process that leaves removes the store; what a killed job left is removed by whoever finds that nobody holds it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from workers.messages.parts import Version
from workers.weights.locks import Lock
from workers.weights.manifest import WeightsError
from workers.weights.partial_version import Incoming, allocate, remove_files

LOOK_S = 0.05
JOIN_S = 60.0
REMOVED = ".removed"


class Cancelled(WeightsError):
    """The fetch was given up because a newer version makes it pointless."""


class NodeStore:
    """This node's store at `root`, which is made (0700) where it is not there. Raises `WeightsError` where it is not ours and private."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._locks: dict[Version, Lock] = {}
        self._in_use = self._join()
        for folder in (root / "published", root / "held"):
            folder.mkdir(mode=0o700, exist_ok=True)

    def _join(self) -> Lock:
        """Hold `in_use`. Whoever removes the store meanwhile moves it away first: then it is made anew."""
        deadline = time.monotonic() + JOIN_S
        while time.monotonic() < deadline:
            try:
                make_private(self.root)
                lock = Lock.take(self.root / "in_use", shared=True)
                if lock is not None:
                    lock.write(socket.gethostname().encode())
                    return lock
            except (FileNotFoundError, WeightsError) as error:
                if not isinstance(error if isinstance(error, OSError) else error.__cause__, FileNotFoundError):
                    raise
            time.sleep(LOOK_S)  # flock has no deadline
        raise WeightsError(f"weights.dir: {self.root} is being removed by a process that does not end. Remove it, or choose another weights.dir")

    # -- where things are ----------------------------------------------------------------------------------------------

    def published(self, version: Version) -> Path:
        """Where a trainer rank of this node publishes `version`."""
        return self.root / "published" / str(version)

    def held(self, version: Version) -> Path:
        """Where rollout workers of this node hold `version`, once it is complete."""
        return self.root / "held" / str(version)

    def is_held(self, version: Version) -> bool:
        """Whether this node holds `version` complete."""
        return self.held(version).is_dir()

    def delta(self, folder: Path) -> Path:
        """Where the deltas of the version in `folder` (published or held) lie, if there are any."""
        return folder.with_name(f".{folder.name}.delta")

    def versions(self) -> list[Version]:
        """The complete versions that are held, oldest first."""
        return sorted(Version.parse(path.name) for path in (self.root / "held").iterdir() if not path.name.startswith("."))

    def newest(self) -> Version | None:
        """The newest complete version that is held."""
        return max(self.versions(), default=None)

    def allocate(self, folder: Path, name: str, size: int) -> Path:
        """Make a file of `size` bytes, its memory reserved. Raises `WeightsError` with the remedy when full."""
        return allocate(folder / name, size)

    # -- fetching ------------------------------------------------------------------------------------------------------

    def lock(self, version: Version, silence_s: float, cancelled: threading.Event) -> bool:
        """Wait until this process may fetch `version` (True: `begin`, then `unlock`), or somebody has (False): it stays in use by this process
        until `remove_older` releases it. Takes over from a process that died. Raises `WeightsError` if one that fetches it brings nothing
        for `silence_s`, `Cancelled`."""
        heard, progress = time.monotonic(), -1
        while not cancelled.is_set():
            if self.use(version):
                return False
            lock = Lock.take(self._lock_path(version))
            if lock is not None and not self.is_held(version):
                self._locks[version] = lock
                return True
            if lock is not None:
                lock.release()
            elif progress != (progress := Incoming.last_arrival(self.held(version))):
                heard = time.monotonic()
            elif time.monotonic() - heard > silence_s:
                raise WeightsError(f"{self.held(version)}: the process of this node that fetches it has brought nothing for {silence_s:g} s. "
                                   "Look at the logs of the other rollout workers of this node")
            cancelled.wait(LOOK_S)  # flock has no deadline
        raise Cancelled(f"version {version} is not wanted any more")

    def unlock(self, version: Version) -> None:
        """The fetch that `lock` allowed has ended; others may use what it brought, or go on with it."""
        self._locks.pop(version).release()

    def use(self, version: Version) -> bool:
        """Keep the complete `version` from being removed by other processes, until `remove_older`; false if it is not (any more) there."""
        if not self.is_held(version):
            return False
        if version not in self._locks:
            lock = Lock.take(self._lock_path(version), shared=True)
            if lock is None:
                return False
            self._locks[version] = lock
        if self.is_held(version):
            return True
        self._locks.pop(version).release()
        return False

    def begin(self, manifest_content: bytes, version: Version, threads: int = 1) -> Incoming:
        """Allocate the files of `version`, or take over what another fetch left. Call with the lock. Raises `WeightsError` when full."""
        return Incoming.begin(self.held(version), manifest_content, version, threads)

    @contextlib.contextmanager
    def make(self, version: Version) -> Iterator[tuple[Path, Callable[[], None]]]:
        """Inside the block, the folder in which `version` is made on this node, and what is to be called as it grows, so that whoever waits for it
        knows; after the block it is held. Call with the lock."""
        final = self.held(version)
        part, arrived = final.with_name(f".{final.name}.part"), final.with_name(f".{final.name}.arrived")
        Incoming.abandon(final)
        try:
            part.mkdir(mode=0o700)
            yield part, arrived.touch
            part.rename(final)
        finally:
            Incoming.abandon(final)

    # -- leaving -------------------------------------------------------------------------------------------------------

    def remove_older(self, keep: set[Version]) -> None:
        """Remove what is held and older than the newest of `keep`, not in it, and used by no other process."""
        if not keep:
            return
        for version in [version for version in self._locks if version not in keep]:
            self._locks.pop(version).release()
        for version in self._present():
            if version < max(keep) and version not in keep:
                self._remove(version)

    def _present(self) -> set[Version]:
        """Every version of which there is anything."""
        found = set()
        for path in (self.root / "held").iterdir():
            with contextlib.suppress(ValueError):
                found.add(Version.parse(path.name.removeprefix(".").rpartition(".")[0] if path.name.startswith(".") else path.name))
        return found

    def _remove(self, version: Version) -> None:
        lock = Lock.take(self._lock_path(version))
        if lock is None:
            return
        remove_files(self.held(version))
        Incoming.abandon(self.held(version))
        lock.remove()

    def _lock_path(self, version: Version) -> Path:
        return self.root / "held" / f".{version}.lock"

    def leave(self) -> None:
        """This process is done with the store; the last one removes it. Harmless to repeat."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()
        if self._in_use.alone():
            _remove_store(self.root)
        self._in_use.release()


def open_store(root: Path) -> NodeStore:
    """As `NodeStore`, once what other runs have left beside it is removed, and said."""
    for stale in clean_stale(root.parent):
        print(f"removed {stale}: weights of a run that has ended", flush=True)
    return NodeStore(root)


def clean_stale(parent: Path) -> list[Path]:
    """Remove the stores of this user below `parent` that were left on this node, used by no process any more; returns them."""
    removed = []
    for root in parent.glob(f"headway-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if root.name.endswith(REMOVED):  # by one that died over it
                shutil.rmtree(root, ignore_errors=True)
            elif (root / "in_use").read_bytes() == socket.gethostname().encode():
                lock = Lock.take(root / "in_use")
                if lock is not None:
                    _remove_store(root)
                    lock.release()
                    removed.append(root)
    return removed


def _remove_store(root: Path) -> None:
    aside = root.with_name(f"{root.name}.{os.urandom(6).hex()}{REMOVED}")  # at one stroke, so that nobody joins what is half gone
    with contextlib.suppress(OSError):
        root.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def make_private(folder: Path) -> None:
    """Make `folder`, or take one that is there. Raises `WeightsError` where it is not a folder of this user that nobody else may enter."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        state = folder.lstat()
    except OSError as error:
        raise WeightsError(f"weights.dir: {folder} cannot be made ({error.strerror}). Remove it if it is left over, or choose another "
                           "weights.dir") from error
    if state.st_uid != os.getuid() or state.st_mode & 0o077 or not stat.S_ISDIR(state.st_mode):
        raise WeightsError(f"weights.dir: {folder} is not a private folder of this user (in a shared place it might be somebody else's). "
                           "Remove it, or choose another weights.dir")
