"""Texts that can be written down: what comes from models and from the user's functions may hold halves of surrogate pairs, which UTF-8 has not."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """`text` with its surrogate pairs as characters, and U+FFFD for every half of one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
