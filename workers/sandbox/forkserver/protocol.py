"""Requests and replies of one session: a pure state machine. Both are framed by a 4-byte big-endian length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LENGTH_BYTES = 4


class OutOfTurn(Exception):
    """The program sent what nobody has asked for."""


class Dialogue:
    """One request at a time: `next_request`, then `received` until a reply is whole, until `is_over`. `replies`: those that have come."""

    def __init__(self, requests: Sequence[bytes], accept: Callable[[int, bytes], bool] | None) -> None:
        self.replies: list[bytes] = []
        self._requests, self._accept = requests, accept
        self._asked = 0
        self._refused = False
        self._buffer = bytearray()

    @property
    def is_over(self) -> bool:
        """Whether all requests were answered, or a reply was not accepted."""
        return self._refused or len(self.replies) == len(self._requests)

    def next_request(self) -> bytes:
        """The frame of the next request, the last one being answered."""
        assert not self.is_over and self._asked == len(self.replies)
        request = self._requests[self._asked]
        self._asked += 1
        return len(request).to_bytes(LENGTH_BYTES, "big") + request

    def received(self, data: bytes) -> bool:
        """Take bytes from the program; whether they end a reply. Raises `OutOfTurn`."""
        self._buffer += data
        if self._buffer and self._asked == len(self.replies):
            raise OutOfTurn
        end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if len(self._buffer) < max(end, LENGTH_BYTES):
            return False
        if len(self._buffer) > end:
            raise OutOfTurn
        reply = bytes(self._buffer[LENGTH_BYTES:])
        self._buffer.clear()
        self.replies.append(reply)
        self._refused = self._accept is not None and not self._accept(len(self.replies) - 1, reply)
        return True
