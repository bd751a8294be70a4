"""One's own pauses: a process that is suspended, or starved, looks later than it meant to. What it missed meanwhile is nobody's silence. Pure."""

from __future__ import annotations

FAR = 5.0


def own_pause(gap_s: float, interval_s: float) -> float:
    """Seconds that this process has missed between two of its looks, `gap_s` apart, that were to be `interval_s` apart: 0 unless that is far more."""
    return gap_s - interval_s if gap_s > FAR * interval_s else 0.0
