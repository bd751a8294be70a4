"""Checkpoints: the whole state of a run after one training step, complete or not there at all.

    .7.120.tmp/  trainer/ (every rank)  coordinator.msgpack  --digests--> manifest.json --fsync, rename--> checkpoints/7.120/

A checkpoint is named by the version it is of, EPOCH.STEP; the newest epoch and step is the newest state. Only the holder of the
newest epoch may publish one. A broken one is passed over, loudly, for the one before.
Which of them stay: retention.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from workers.messages.version import Version
from workers.run.digests import digest_file
from workers.run.files import read_lines, sync
from workers.run.folder import RunFolder
from workers.run.outage import patiently
from workers.run.retention import Retention, best_of, scores

MANIFEST = "manifest.json"
COORDINATOR = "coordinator.msgpack"
TRAINER = "trainer"
RETRIES, RETRY_S = 4, 3.0
SMALL_BYTES = 1 << 20
"""A file of the trainer's that is smaller says what the others are."""


class Fenced(RuntimeError):
    """Another incarnation of this run has begun: this one may publish nothing any more."""


def check_epoch(run: RunFolder, version: Version, what: str, hurry: Callable[[], bool] = lambda: False) -> None:
    """Raise `Fenced` unless the incarnation that made `version` still holds the run. `what`: that which it is about to publish, in words; `hurry`: as
    of `patiently`."""
    if (newest := patiently(run, run.newest_epoch, hurry=hurry)) != version.epoch:
        raise Fenced(f"{what} {version}: epoch {newest} has begun, this one may publish nothing any more")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its path within the checkpoint, size in bytes, and BLAKE3 digest (hex)."""

    name: str
    size: int
    digest: str


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a checkpoint, by path within it. `time`: seconds since 1970."""

    version: Version
    time: float
    files: list[FileEntry]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    version: Version

    @property
    def trainer(self) -> Path:
        """The trainer's part, a folder."""
        return self.folder / TRAINER

    @property
    def coordinator(self) -> Path:
        """The coordinator's part, a file."""
        return self.folder / COORDINATOR


def begin(run: RunFolder, version: Version) -> Path:
    """A new private folder for the parts of the checkpoint of `version`, with an empty folder for the trainer's."""
    folder = run.checkpoints / f".{version}.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    if run.newest_epoch() == version.epoch:
        for leftover in run.checkpoints.glob(".*.tmp"):  # of incarnations that were killed while they saved
            shutil.rmtree(leftover, ignore_errors=True)
    folder.mkdir(mode=0o700)
    (folder / TRAINER).mkdir(mode=0o700)
    return folder


def commit(run: RunFolder, folder: Path, version: Version, retention: Retention, written: Mapping[str, tuple[int, str]] | None = None) -> Checkpoint:
    """Publish what stands in `folder` as the checkpoint of `version`, and remove those that do not stay.

    `written`: (bytes, BLAKE3 digest) by path of the files that were hashed when they were written. Raises `Fenced`; OSError where a file
    cannot be read or is not as long as it was written.
    """
    known = written or {}
    listed = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    files = [_entry(folder, name, known) for name in sorted(listed | known.keys())]  # a shared file system may not list new files of other nodes
    with (folder / MANIFEST).open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(CheckpointManifest(version, time.time(), files))))
        file.flush()
        os.fsync(file.fileno())
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(inner)
    if run.newest_epoch() != version.epoch:
        shutil.rmtree(folder, ignore_errors=True)
        raise Fenced(f"checkpoint {version}: epoch {run.newest_epoch()} has begun, this one may publish nothing any more")
    final = run.checkpoints / str(version)
    if final.exists():  # of the same step: saved by time and then again at the end
        final.rename(run.checkpoints / f".{version}.old")
    folder.rename(final)
    sync(run.checkpoints)
    _remove_old(run, retention)
    return Checkpoint(final, version)


def _entry(folder: Path, name: str, written: Mapping[str, tuple[int, str]]) -> FileEntry:
    path = folder / name
    found = path.stat().st_size
    size, digest = written.get(name) or (found, digest_file(path))
    if size != found:
        raise OSError(f"{path}: has {found} bytes, {size} were written. Check the file system")
    return FileEntry(name, size, digest)


def all_checkpoints(run: RunFolder) -> list[Checkpoint]:
    """What has been published, oldest first; not verified."""
    versions = sorted(Version.parse(path.name) for path in run.checkpoints.iterdir() if re.fullmatch(r"\d+\.\d+", path.name))
    return [Checkpoint(run.checkpoints / str(version), version) for version in versions]


def can_go_on(run: RunFolder) -> bool:
    """Whether there is something to go on from: a checkpoint, or what an evaluation has judged."""
    return run.evaluation.is_dir() or any((saved.folder / MANIFEST).is_file() for saved in all_checkpoints(run))


def describe(run: RunFolder, known: Mapping[int, float], now: float) -> dict[str, float] | None:
    """What has been published, for people: 'step' and 'age_s' of the newest, 'best_step' and 'best_accuracy', or 'best_loss', where one has
    been evaluated; None before the first. `known`: `scores` by step; `now`: seconds since 1970. Nothing is verified."""
    published = all_checkpoints(run)
    if not published:
        return None
    newest = published[-1]
    try:
        found = {"step": newest.version.step, "age_s": round(now - newest.folder.stat().st_mtime, 1)}
    except FileNotFoundError:  # another one has just been published, and this one removed
        return None
    best = best_of([checkpoint.version for checkpoint in published], known)
    if best is None:
        return found
    score = known[best.step]
    return found | {"best_step": best.step, **({"best_accuracy": score} if score >= 0 else {"best_loss": -score})}


def _displaced(run: RunFolder) -> list[Checkpoint]:
    """What was taken out of the way for a newer checkpoint of the same version, by someone who died before that one was in its place."""
    return [Checkpoint(path, Version.parse(path.name[1:].removesuffix(".old"))) for path in run.checkpoints.glob(".*.old")]


def newest(run: RunFolder, by_digests: bool = True) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None. Broken ones are named on stdout and passed over. Raises OSError where the run folder is away.

    `by_digests` False: the trainer's files are compared by their sizes only. Several ranks compare their digests together when they load
    them, and one that turns out broken then is put aside (`put_aside`).
    """
    for checkpoint in sorted([*all_checkpoints(run)[::-1], *_displaced(run)], key=lambda checkpoint: checkpoint.version, reverse=True):
        try:
            problem = retried(partial(find_problem, checkpoint, by_digests))
        except OSError as error:
            problem = str(error)
        if not problem:
            return checkpoint
        next(run.checkpoints.iterdir())  # where the whole folder is away, no checkpoint is broken for that
        print(f"checkpoint {checkpoint.folder} is broken and is passed over: {problem}", flush=True)
    return None


def none_whole(run: RunFolder, published: list[Checkpoint]) -> str:
    """What to say where there are checkpoints, but `newest` finds none."""
    return f"none of the {len(published)} checkpoints in {run.checkpoints} is whole. Remove them to begin from step 0"


def put_aside(checkpoint: Checkpoint, problem: str) -> None:
    """Take a checkpoint whose files are not what was written out of the race: who comes next goes on from the one before."""
    print(f"checkpoint {checkpoint.folder} is broken and is put aside: {problem}", flush=True)
    checkpoint.folder.rename(checkpoint.folder.with_name(f".{checkpoint.version}.broken"))


def retried(find: Callable[[], str]) -> str:
    """What `find` finds. Shared storage may fail for a moment: then it looks again, before a good checkpoint is passed over. Raises OSError where
    that does not help."""
    for _ in range(RETRIES - 1):
        with contextlib.suppress(OSError):
            return find()
        time.sleep(RETRY_S)
    return find()


def find_problem(checkpoint: Checkpoint, by_digests: bool = True) -> str:
    """What is wrong with a checkpoint, '' if it is whole: every file is compared with its digest, but for the trainer's large ones, with their sizes
    only unless `by_digests`. Raises OSError where that fails."""
    try:
        manifest = msgspec.json.decode((checkpoint.folder / MANIFEST).read_bytes(), type=CheckpointManifest)
        if manifest.version != checkpoint.version:
            return f"its manifest is of version {manifest.version}"
        for entry in manifest.files:
            path = checkpoint.folder / entry.name
            hashed = by_digests or entry.size < SMALL_BYTES or not entry.name.startswith(f"{TRAINER}/")
            if path.stat().st_size != entry.size or (hashed and digest_file(path) != entry.digest):
                return f"{entry.name} is not what was written"
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, ValueError) as error:
        return str(error)
    return ""


def _remove_old(run: RunFolder, retention: Retention) -> None:
    published = all_checkpoints(run)
    staying = retention.choose([checkpoint.version for checkpoint in published], scores(read_lines(run.evaluations)))
    for checkpoint in published:
        if checkpoint.version not in staying:
            shutil.rmtree(checkpoint.folder, ignore_errors=True)
    for leftover in run.checkpoints.glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)
