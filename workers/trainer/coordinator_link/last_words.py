"""What a link puts on record at its end, and asks the run folder then. That may be what has failed: nothing here raises OSError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from workers.run.folder import RunFolder


class LastWords:
    """`crashed` is told why this incarnation fails; where none would follow it (not `replaceable`), the run ends by it."""

    def __init__(self, run: RunFolder, replaceable: bool, crashed: Callable[[str], None]) -> None:
        self._run, self._replaceable, self._crashed = run, replaceable, crashed

    def record(self, cause: str) -> None:
        """Put the cause on record, if that can be."""
        try:
            self._crashed(cause)
            if not self._replaceable:
                self._run.end(cause, "trainer")
        except OSError as error:
            print(f"not on record ({error}): {cause}", flush=True)

    def remove_weights_if_over(self, where: str) -> None:
        """Remove what was published to `where` (`weights.dir`), unless another incarnation follows."""
        if not self._replaceable or self._run.known_end() is not None:
            self._run.remove_weights(where)

    def exit_status(self) -> int:
        """0 after an orderly stop, which is no error; but with a bad one srun ends the other ranks, who may wait for this one in a collective."""
        with contextlib.suppress(OSError):
            return 0 if self._run.stop_requested() is not None and os.environ.get("SLURM_NTASKS", "1") == "1" else 1
        return 1
