"""Tickets to a socket that is not encrypted: given over one that is, each good for one connection."""

from __future__ import annotations

import secrets

MAX_TICKETS = 4096


class Tickets(dict[str, str]):
    """The tickets that have not been used, name -> secret. Whoever looks a secret up has used the ticket."""

    def issue(self) -> tuple[str, str]:
        """A new one. Of very many that nobody comes with the oldest are good no more."""
        name = secrets.token_hex(16)
        self[name] = secret = secrets.token_hex(32)
        while len(self) > MAX_TICKETS:
            self.pop(next(iter(self)), None)
        return name, secret

    def __getitem__(self, name: str) -> str:
        return self.pop(name)
