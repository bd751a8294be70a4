"""What weight servers and fetchers say to each other: a small msgpack header, and for content one raw frame.

    fetcher (DEALER)   TicketWanted  ManifestWanted        CURVE, the run's keys: each is sure of the other
    server  (ROUTER)   Ticket        Content + frame
    fetcher (DEALER)   ChunkWanted  ChunkWanted ...        plain, with the ticket; the same socket as above with weights.security=curve.
    server  (ROUTER)   Content + frame  ...                The fetcher keeps a window of chunks outstanding, so that nothing is ever queued
                                                           without bound
    instead of an answer: Unavailable

What comes in the clear is believed by its digest, which stands in the manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from workers.config.training import MAX_STREAMS
from workers.messages.parts import Version
from workers.run.folder import RunFolder
from workers.transport.keys import KeyPair, read_keys
from workers.weights.manifest import FileName

ALL = -1  # in place of a chunk's number: the manifest, or the whole version

Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class WeightMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all of them."""


class TicketWanted(WeightMessage, frozen=True):
    """Asks for so many tickets, each good for one connection, and each an answer of its own."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)] = 1


class ManifestWanted(WeightMessage, frozen=True):
    """Asks for the manifest of `version`."""

    version: Version


class ChunkWanted(WeightMessage, frozen=True):
    """Asks for `size` bytes at `offset` of file `name` of `version`, or, with a `base`, for their difference to that version. The answer
    comes when they are there, and names `number`."""

    version: Version
    number: Bytes
    name: FileName
    offset: Bytes
    size: Bytes
    base: Version | None = None


class Ticket(WeightMessage, frozen=True):
    """Where to ask for chunks: at `port` of the same address, with `name` and `secret`; at 0, here."""

    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    secret: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Content(WeightMessage, frozen=True):
    """The bytes of a chunk, their difference to the base (`delta`), or the manifest (`ALL`), in the next frame."""

    number: int
    delta: bool = False


class Unavailable(WeightMessage, frozen=True):
    """The chunk, or anything at all (`ALL`), cannot be had here."""

    number: int
    reason: Annotated[str, msgspec.Meta(max_length=1000)]


FromFetcher = TicketWanted | ManifestWanted | ChunkWanted
FromServer = Ticket | Content | Unavailable

from_fetcher = msgspec.msgpack.Decoder(FromFetcher)
from_server = msgspec.msgpack.Decoder(FromServer)
encode = msgspec.msgpack.encode


@dataclass(frozen=True)
class WeightKeys:
    """The run's keys, for weight sockets."""

    server: KeyPair
    client: KeyPair

    @staticmethod
    def read(run: RunFolder) -> WeightKeys:
        """Read them from the run folder. Raises `RunFolderError`."""
        return WeightKeys(read_keys(run, "server"), read_keys(run, "client"))
