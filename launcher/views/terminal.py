"""The console that every command prints on: words from elsewhere are no markup, and lines are as wide as the terminal."""

from __future__ import annotations

import shutil

from rich.console import Console


def terminal() -> Console:
    """Standard output. rich takes every dumb terminal (TERM=dumb) for 80 columns wide: what it says of itself counts more."""
    console = Console(markup=False, highlight=False)
    if not console.is_dumb_terminal:
        return console
    size = shutil.get_terminal_size(console.size)
    return Console(markup=False, highlight=False, width=size.columns, height=size.lines)
