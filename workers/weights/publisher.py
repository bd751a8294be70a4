"""One trainer rank's files of every version, in its node's memory; and, where workers read files, on storage that all nodes share.

    prepare   allocate, map, write headers                      beforehand, beside training
    fill      tensors --converted, copied--> published/<version>/<files of this rank>         training stands still for this
    describe  digests of their chunks, differences to the version before                      beside training
    SharedFolder: .<version>.part/ <--copies of all ranks' files; with the manifest it is renamed to <version>/
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.config import Dtype
from workers.messages.parts import Version
from workers.run.files import sync
from workers.weights.delta import DeltaSize, make_deltas
from workers.weights.layout import NAMES, ShardFile
from workers.weights.manifest import MANIFEST, FileEntry, Manifest, WeightsError, describe_files, write_manifest
from workers.weights.safetensors_writer import MappedShards
from workers.weights.store import NodeStore, make_private

KEPT = 2
"""Versions that stay whoever needs them: a worker that was just told of one may not have begun to fetch it."""


class Publisher:
    """The files of one `source` in `store`: `files` of the layout that are its, and `small` ones by name. `dtype`: what the engines hold."""

    def __init__(self, store: NodeStore, source: int, files: Sequence[ShardFile], small: dict[str, bytes], dtype: Dtype) -> None:
        self._store, self._source, self._files, self._small, self._dtype = store, source, files, small, dtype
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._prepared: tuple[Version, MappedShards] | None = None
        self._filled: list[Version] = []

    @property
    def names(self) -> list[str]:
        """The names of its files."""
        return [*(file.name for file in self._files), *self._small]

    def folder(self, version: Version) -> Path:
        """Where its files of `version` are; whole where all sources are on this node, and then with the manifest."""
        return self._store.published(version)

    def prepare(self, version: Version) -> None:
        """Make the files of `version`. Raises `WeightsError` with the remedy where there is no room; then nothing is left of them."""
        if self._prepared is not None and self._prepared[0] == version:
            return
        self.discard()
        try:
            try:
                self._make_files(version)
            except FileNotFoundError:  # another rank of this node has given up, and took the folder away with its files
                self._make_files(version)
        except (WeightsError, OSError) as error:
            self.discard()
            self.remove(version)
            raise WeightsError(f"weights.dir: {error}") from error

    def _make_files(self, version: Version) -> None:
        folder = self.folder(version)
        folder.mkdir(mode=0o700, exist_ok=True)
        with torch.cuda.device(self._device) if self._device is not None else contextlib.nullcontext():
            self._prepared = version, MappedShards(folder, self._files, getattr(torch, self._dtype.value), self._store.allocate)
        for name, content in self._small.items():
            self._store.allocate(folder, name, len(content)).write_bytes(content)

    def fill(self, tensors: Iterable[tuple[str, Tensor]], version: Version) -> None:
        """Copy the weights (Hugging Face names) into the files of `version`. Raises `WeightsError`; then nothing is left of them."""
        self.prepare(version)
        assert self._prepared is not None
        _, shards = self._prepared
        try:
            for name, tensor in tensors:
                shards.put(name, tensor)
            shards.complete()
        except BaseException:
            self.discard()
            raise
        self._prepared = None
        shards.close()
        self._filled.append(version)

    def discard(self) -> None:
        """Remove what is prepared."""
        if self._prepared is not None:
            version, shards = self._prepared
            self._prepared = None
            shards.close()
            self.remove(version)

    def describe(self, version: Version, chunk_bytes: int, threads: int) -> list[FileEntry]:
        """What the manifest says of its files of `version`."""
        return describe_files(self.folder(version), self.names, chunk_bytes, self._source, threads)

    def make_deltas(self, version: Version, chunk_bytes: int, threads: int) -> tuple[Path, DeltaSize] | None:
        """The differences of `version`, the newest, to the one before it, with their sizes; None for the first one."""
        if len(self._filled) < 2:
            return None
        base, path, names = self._filled[-2], self._delta(version), [file.name for file in self._files]
        size = make_deltas(self.folder(version), self.folder(base), base, names, path, chunk_bytes=chunk_bytes, width=NAMES[self._dtype][1],
                           threads=threads)
        return path, size

    def remove_older(self, needed: Version) -> list[Version]:
        """Remove its files of versions that nobody fetches any more (older than `needed`), always keeping the newest `KEPT`; returns those."""
        removed = [version for version in self._filled[:-KEPT] if version < needed]
        for version in removed:
            self.remove(version)
        return removed

    def remove_oldest(self) -> list[Version]:
        """Remove its files of the oldest version that is not one of the newest `KEPT`, though somebody may fetch it; returns that."""
        removed = self._filled[:-KEPT][:1]
        for version in removed:
            self.remove(version)
        return removed

    def remove(self, version: Version) -> None:
        """Remove its files of a version; the folder where no other rank's are in it."""
        folder = self.folder(version)
        self._filled = [other for other in self._filled if other != version]
        for path in (*(folder / name for name in self.names), *([folder / MANIFEST] if self._small else []), self._delta(version)):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()

    def remove_all(self) -> None:
        """Remove everything of its: nobody serves it any more."""
        self.discard()
        for version in list(self._filled):
            self.remove(version)

    def remove_earlier(self, epoch: int) -> None:
        """Remove what earlier incarnations have left on this node: nobody serves it any more."""
        for path in (self._store.root / "published").iterdir():
            if int(path.name.removeprefix(".").partition(".")[0]) < epoch:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _delta(self, version: Version) -> Path:
        folder = self.folder(version)
        return folder.with_name(f".{folder.name}.{self._source}.delta")


class SharedFolder:
    """Versions on storage that all nodes see, below `folder`, which is made (0700). Raises `WeightsError` where it is not ours and private."""

    def __init__(self, folder: Path) -> None:
        make_private(folder)
        self._folder = folder

    def copy(self, version: Version, source: Path, names: Iterable[str]) -> None:
        """Copy files of a rank's `source` folder, onto the disk. Raises `WeightsError` where that fails."""
        part = self._part(version)
        try:
            part.mkdir(mode=0o700, exist_ok=True)
            for name in names:
                shutil.copyfile(source / name, part / name)
                sync(part / name)
        except OSError as error:
            free = shutil.disk_usage(self._folder).free
            raise WeightsError(f"{part}: version {version} cannot be written ({error.strerror or error}; {free >> 20} MiB are free). Free some "
                               "space on the storage that all nodes share, or choose another folder there") from error

    def complete(self, manifest: Manifest) -> Path:
        """All ranks have copied their files: returns the folder with its final name. May be tried again after an `OSError`."""
        part, final = self._part(manifest.version), self._folder / str(manifest.version)
        if not final.exists():  # else it has its name, and what failed is what follows
            write_manifest(part, manifest)
            for path in (*part.glob("manifest*"), part):
                sync(path)
            part.rename(final)
        sync(self._folder)
        return final

    def remove_older(self, newest: Version, needed: Version) -> None:
        """Remove versions older than `needed`, always keeping `KEPT` up to `newest`."""
        versions = sorted(Version.parse(path.name) for path in self._folder.iterdir() if not path.name.startswith("."))
        for version in [version for version in versions if version <= newest][:-KEPT]:
            if version < needed:
                shutil.rmtree(self._folder / str(version), ignore_errors=True)

    def remove_unfinished(self, epoch: int) -> None:
        """Remove what earlier incarnations did not complete; what they did is still read by workers."""
        for part in self._folder.glob(".*.part"):
            if int(part.name[1:].partition(".")[0]) < epoch:
                shutil.rmtree(part, ignore_errors=True)

    def abandon(self, version: Version) -> None:
        """Remove what there is of a version that will not be completed."""
        shutil.rmtree(self._part(version), ignore_errors=True)

    def _part(self, version: Version) -> Path:
        return self._folder / f".{version}.part"

