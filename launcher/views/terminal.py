"""The console that every command prints on: words from elsewhere are no markup and command the terminal nothing, and lines are as wide as it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from launcher.views.visible_text import visible_text


class Terminal(Console):
    """Shows control characters that stand in a text, such as a cause of failure that quotes a model, by their numbers; rich's own stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible_text(segment.text), segment.style)


def terminal() -> Console:
    """Standard output. rich takes every dumb terminal (TERM=dumb) for 80 columns wide: what it says of itself counts more."""
    console = Terminal(markup=False, highlight=False)
    if not console.is_dumb_terminal:
        return console
    size = shutil.get_terminal_size(console.size)
    return Terminal(markup=False, highlight=False, width=size.columns, height=size.lines)
