"""Who may fetch weights, and which version: fetchers that have shown a token of this run, each good for once. No sockets."""

from __future__ import annotations

import hmac

from workers.messages.parts import Version
from workers.transport.weights.messages import Hello, WeightKeys


class Sessions:
    """The fetches that have begun and not ended, by the fetcher's routing id."""

    def __init__(self, keys: WeightKeys) -> None:
        self._keys = keys
        self._open: dict[bytes, Hello] = {}
        self._nonces: set[bytes] = set()  # 16 bytes for every fetch that was ever let in

    def begin(self, peer: bytes, hello: Hello, endpoint: str) -> bool:
        """Let `peer` fetch from the server at `endpoint`, if its token is good; says whether."""
        token = self._keys.token(endpoint, hello.version, hello.nonce)
        if hello.nonce in self._nonces or not hmac.compare_digest(token, hello.token):
            return False
        self._nonces.add(hello.nonce)
        self._open[peer] = hello
        return True

    def version(self, peer: bytes, nonce: bytes) -> Version | None:
        """What `peer` fetches in the session that `nonce` began; None where there is none."""
        hello = self._open.get(peer)
        return hello.version if hello is not None and hello.nonce == nonce else None

    def end(self, peer: bytes) -> None:
        """Nothing more is sent to `peer`; harmless to repeat."""
        self._open.pop(peer, None)

    def end_all(self, version: Version) -> None:
        """Nothing more of `version` is sent to anybody."""
        self._open = {peer: hello for peer, hello in self._open.items() if hello.version != version}
