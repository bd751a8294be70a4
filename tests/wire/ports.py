"""Ports that a test names before something listens at them."""

from __future__ import annotations

import errno
import random
import socket

NEVER_GIVEN = range(12000, 28000)
"""Below those that the kernel gives to whoever asks for any port or connects: between the choice of one and its use, nobody is given it."""


def free_port() -> int:
    """A port of this host that nobody has."""
    while True:
        port = random.SystemRandom().choice(NEVER_GIVEN)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
