"""What a weight server has to give: one version each, complete or still arriving."""

from __future__ import annotations

from pathlib import Path

from workers.messages.parts import Version
from workers.transport.weights.messages import ChunkWanted
from workers.weights.delta import Deltas
from workers.weights.manifest import Chunk, WeightsError
from workers.weights.mmap import MappedFiles
from workers.weights.partial_version import Incoming


class Missing(LookupError):
    """What was asked for is not there, and will not be."""


class Offer:
    """The files of one version; mapped, so that they outlast their removal."""

    def __init__(self, version: Version, folder: Path, manifest_content: bytes | None, names: list[str] | None = None) -> None:
        self.version, self._manifest_content = version, manifest_content
        try:
            self._files = MappedFiles(folder, names)
        except OSError as error:
            raise WeightsError(f"{folder}: version {version} cannot be served ({error})") from error

    def manifest(self) -> bytes:
        """manifest.json's content. Raises `Missing`."""
        if self._manifest_content is None:
            raise Missing(f"version {self.version}: this server has no manifest, the trainer's first one has")
        return self._manifest_content

    def find(self, wanted: ChunkWanted) -> tuple[memoryview | bytes, bool] | None:
        """The bytes, and whether they are the difference; None while they are on their way. Raises `Missing`."""
        deltas = self._deltas()
        if wanted.base is not None and deltas is not None and deltas.base == wanted.base:
            encoded = deltas.find(wanted.name, wanted.offset)
            if encoded is not None:
                return encoded, True
        view = self._files.view(wanted.name, wanted.offset, wanted.size)
        if view is None:
            raise Missing(f"version {self.version}: no {wanted.size} bytes at {wanted.offset} of {wanted.name} here")
        return view, False

    def _deltas(self) -> Deltas | None:
        return None


class CompleteOffer(Offer):
    """A version all of whose files (of this rank) are there."""

    def __init__(self, version: Version, folder: Path, manifest_content: bytes | None, delta: Path | None) -> None:
        super().__init__(version, folder, manifest_content)
        self._differences = Deltas.open(delta) if delta is not None else None

    def _deltas(self) -> Deltas | None:
        return self._differences


class IncomingOffer(Offer):
    """A version that is being fetched."""

    def __init__(self, incoming: Incoming) -> None:
        super().__init__(incoming.version, incoming.folder, incoming.manifest_content, [entry.name for entry in incoming.manifest.files])
        self._incoming = incoming
        self._chunks: dict[tuple[str, int, int], Chunk] = {(chunk.name, chunk.offset, chunk.size): chunk for chunk in incoming.chunks}

    def find(self, wanted: ChunkWanted) -> tuple[memoryview | bytes, bool] | None:
        """As above."""
        chunk = self._chunks.get((wanted.name, wanted.offset, wanted.size))
        if chunk is None:
            raise Missing(f"version {self.version}: no chunk of {wanted.size} bytes at {wanted.offset} of {wanted.name} here")
        return super().find(wanted) if self._incoming.has(chunk) else None

    def _deltas(self) -> Deltas | None:
        return self._incoming.deltas
