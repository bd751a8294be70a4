"""What weight servers and fetchers say to each other: a small msgpack header, and for content one raw frame.

    fetcher (DEALER)   Hello   ManifestWanted   ChunkWanted ...       the fetcher keeps a window of chunks outstanding, so that
    server  (ROUTER)           Content + frame  Content + frame ...   nothing is ever queued without bound; or Unavailable

`Hello` proves that the fetcher knows the run's keys; every request names the same nonce.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import msgspec
from blake3 import blake3

from workers.messages.parts import Version
from workers.run.folder import RunFolder
from workers.transport.keys import KeyPair, read_keys
from workers.weights.manifest import FileName

TOKEN_CONTEXT = "headway 2025-11 token of a fetcher of weights"
ALL = -1  # in place of a chunk's number: the manifest, or the whole version

Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Token = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class WeightMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all of them."""


class Hello(WeightMessage, frozen=True):
    """A fetcher wants `version`. `token`: `WeightKeys.token`; good for once."""

    version: Version
    nonce: Nonce
    token: Token


class ManifestWanted(WeightMessage, frozen=True):
    """Asks for the manifest."""

    nonce: Nonce


class ChunkWanted(WeightMessage, frozen=True):
    """Asks for `size` bytes at `offset` of file `name`, or, with a `base`, for their difference to that version. The answer comes when
    they are there, and names `number`."""

    nonce: Nonce
    number: Bytes
    name: FileName
    offset: Bytes
    size: Bytes
    base: Version | None = None


class Content(WeightMessage, frozen=True):
    """The bytes of a chunk, their difference to the base (`delta`), or the manifest (`ALL`), in the next frame."""

    number: int
    delta: bool = False


class Unavailable(WeightMessage, frozen=True):
    """The chunk, or anything at all (`ALL`), cannot be had here."""

    number: int
    reason: Annotated[str, msgspec.Meta(max_length=1000)]


FromFetcher = Hello | ManifestWanted | ChunkWanted
FromServer = Content | Unavailable

from_fetcher = msgspec.msgpack.Decoder(FromFetcher)
from_server = msgspec.msgpack.Decoder(FromServer)
encode = msgspec.msgpack.encode


@dataclass(frozen=True)
class WeightKeys:
    """The run's keys, for weight sockets. Whoever cannot read the run folder cannot make a token."""

    server: KeyPair
    client: KeyPair

    @staticmethod
    def read(run: RunFolder) -> WeightKeys:
        """Read them from the run folder. Raises `RunFolderError`."""
        return WeightKeys(read_keys(run, "server"), read_keys(run, "client"))

    def hello(self, endpoint: str, version: Version) -> Hello:
        """Introduce a fetcher to the server at `endpoint`."""
        nonce = os.urandom(16)
        return Hello(version, nonce, self.token(endpoint, version, nonce))

    def token(self, endpoint: str, version: Version, nonce: bytes) -> bytes:
        """Keyed BLAKE3 of where, what and a nonce: nobody can make one without the keys, or use one elsewhere."""
        key = blake3(self.server.secret + self.client.secret, derive_key_context=TOKEN_CONTEXT).digest()
        return blake3(msgspec.msgpack.encode([endpoint, str(version), nonce]), key=key).digest()
