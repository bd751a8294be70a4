"""Text of models and users as it may be shown: what could hide or reorder what is read is shown by its number."""

from __future__ import annotations

_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0xFFF9, 0xFFFC)}
# Unicode's Default_Ignorable_Code_Point, but for U+FE0F, of which emoji are made, and what is assigned to nothing.
_IGNORABLE = {0xAD, 0x034F, 0x061C, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0x200B, 0x2010), *range(0x2060, 0x2070), 0x3164,
              *range(0xFE00, 0xFE0F), 0xFEFF, 0xFFA0, *range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B), *range(0xE0000, 0xE1000)}
_SURROGATES = set(range(0xD800, 0xE000))
_VISIBLE = {code: f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}" for code in (_CONTROLS | _IGNORABLE | _SURROGATES) - {*map(ord, "\n\t")}}


def visible_text(text: str) -> str:
    """`text` with every character that cannot be seen, or cannot be encoded, or turns the direction of text, shown by its number."""
    return text.translate(_VISIBLE)
