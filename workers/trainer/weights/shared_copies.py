"""Versions as files on storage that all nodes share (weights=disk, or where a worker cannot have them streamed), as far as a training rank is
concerned.

    only way     a disk that is full or away is waited for (run.outage_minutes)
    second way   what cannot be copied is said, and the version announced without a folder: those that stream it do not wait for the others
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workers.messages.parts import Version
from workers.run.folder import RunFolder
from workers.run.outage import patiently
from workers.weights.manifest import Manifest, WeightsError
from workers.weights.publisher import Publisher, SharedFolder


class SharedCopies:
    """Below `folder` (None: there is no such storage), of the incarnation `epoch`."""

    def __init__(self, run: RunFolder, folder: Path | None, epoch: int, only_way: bool) -> None:
        self._run, self._path, self._epoch, self._only_way = run, folder, epoch, only_way

    def copy(self, own: Publisher | None, version: Version) -> str:
        """Copy this rank's files of `version`; returns why that could not be, '' where it could. Raises `WeightsError`, OSError where it is the
        only way."""
        if own is None or self._path is None:
            return ""
        files = own

        def work() -> None:
            self._folder().copy(version, files.folder(version), files.names)

        if self._only_way:
            patiently(self._run, work)
            return ""
        try:
            work()
        except (WeightsError, OSError) as error:
            return str(error)
        return ""

    def complete(self, manifest: Manifest, troubles: Sequence[str]) -> str:
        """All ranks have copied their files, or have had `troubles`: returns the folder there, '' where there is none. Raises as `copy`."""
        if self._only_way:
            return str(patiently(self._run, lambda: self._folder().complete(manifest)))
        why = next(filter(None, troubles), "")
        try:
            folder = self._folder()
            try:
                if not why:
                    return str(folder.complete(manifest))
            finally:
                folder.abandon(manifest.version)
        except (WeightsError, OSError) as error:
            why = why or str(error)
        print(f"warning: version {manifest.version} is streamed, and does not lie on shared storage: {why}", flush=True)
        return ""

    def remove_older(self, newest: Version, needed: Version) -> None:
        """Remove versions that nobody needs any more."""
        if self._path is not None:
            self._folder().remove_older(newest, needed)

    def _folder(self) -> SharedFolder:
        assert self._path is not None
        folder = SharedFolder(self._path)
        folder.remove_unfinished(self._epoch)
        return folder
