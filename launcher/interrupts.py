"""Signals that end the launcher: one exception for all of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """A signal told the launcher to end; its text is the signal's name. It ends a whole sweep."""

    @property
    def words(self) -> str:
        """The signal, as the person at the keyboard knows it."""
        return in_words(str(self))


def in_words(name: str) -> str:
    """A signal's name for people."""
    return {"SIGINT": "Ctrl-C", "SIGHUP": "the end of its terminal"}.get(name, name)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Interrupted` inside."""
    def interrupt(number: int, _: object) -> None:
        raise Interrupted(signal.Signals(number).name)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def without_sigterm() -> Iterator[None]:
    """SIGTERM takes effect at the end of the block. Not by a signal mask: processes that are started inside would inherit it."""
    came: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        if came:
            signal.raise_signal(signal.SIGTERM)
