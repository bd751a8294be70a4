"""How a connection is known to be gone: heartbeats of ZeroMQ (ZMTP PING), and events of a socket's monitor."""

from __future__ import annotations

import zmq

ALIVE_MS = 2000
DEAD_MS = 10_000
HANDSHAKE = "the handshake failed (are the run's keys the same there?)"
GONE: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "the connection broke",
    zmq.EVENT_CLOSED: "cannot be reached",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused our key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: HANDSHAKE,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: HANDSHAKE,
}
