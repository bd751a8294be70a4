"""Why a trainer stops asking for batches, as exceptions."""

from __future__ import annotations


class RunEnded(Exception):
    """The run is over; the text is the cause, empty if it is complete."""


class DrainRequested(Exception):
    """This incarnation is to save its state and leave; the text says why."""
