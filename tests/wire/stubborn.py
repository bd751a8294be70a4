"""A verifier that is never content."""

from __future__ import annotations


def never_right(prompt: str, completion: str, reference: str) -> float:
    """0, whatever was said."""
    return 0.0
