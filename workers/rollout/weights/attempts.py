"""What has been tried to get one version, and what is left. Pure; times are seconds of one clock."""

from __future__ import annotations

from workers.messages.parts import Announcement, Version
from workers.weights.manifest import SourcesFailed, WeightsError

ZMQ, DISK = "zmq", "disk"


def offered(announcement: Announcement) -> list[str]:
    """The transports by which a version is offered."""
    return [way for way, there in ((ZMQ, announcement.sources), (DISK, announcement.folder)) if there]


class Attempts:
    """`causes`: by transport, why it has failed. `limit_s`: sources that bring nothing for so long have failed (weights.timeout_s);
    `arrived`: bytes of the version that are in their place, checked."""

    def __init__(self, version: Version, limit_s: float, arrived: int, now: float) -> None:
        self.causes: dict[str, str] = {}
        self._version, self._limit_s, self._arrived, self._since = version, limit_s, arrived, now
        self._lasting = True

    def next(self, announcement: Announcement, prefers: str) -> str | None:
        """The transport to try, `prefers` first; None where all that are offered have failed."""
        return next((way for way in sorted(offered(announcement), key=lambda way: way != prefers) if way not in self.causes), None)

    def failed(self, way: str, error: WeightsError, arrived: int, now: float) -> None:
        """A transport has failed."""
        self.causes[way] = str(error)
        if arrived > self._arrived:
            self._arrived, self._since = arrived, now
        self._lasting = not isinstance(error, SourcesFailed) or now - self._since >= self._limit_s

    def once_more(self) -> bool:
        """Whether sources that have failed are asked again: they may be away for a while, and what has arrived is kept."""
        return not self._lasting and self.causes.pop(ZMQ, "") != ""

    def error(self) -> WeightsError:
        """That nothing has brought it, and why."""
        why = "; ".join(f"by {way}: {cause}" for way, cause in self.causes.items()) or "it was announced without a way to get it"
        return WeightsError(f"version {self._version} cannot be had: {why}")
