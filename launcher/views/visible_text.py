"""Text of models and users as it may be shown: what could hide or reorder what is read is shown by its number."""

from __future__ import annotations

_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), 0x061C, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF}
_VISIBLE = {code: f"\\u{code:04x}" for code in (_CONTROLS | set(range(0xD800, 0xE000))) - {ord("\n"), ord("\t")}}


def visible_text(text: str) -> str:
    """`text` with every character that cannot be seen, or cannot be encoded, or turns the direction of text, shown by its number."""
    return text.translate(_VISIBLE)
