"""What a run has kept of its rollouts, in the terminal and as a page: `headway rollouts RUN`."""

from launcher.rollouts.listing import main

__all__ = ["main"]
