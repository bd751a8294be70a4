"""That this process keeps a run, said in its folder again and again while it does (keeper.json): for those on other machines whom its lock does not
reach. Who was silent for long (suspended, say) and finds that another one has taken over meanwhile keeps it no more."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

from workers.run.folder import KEPT_S, RunFolder


class Keeping:
    """A context manager. `lost`: another machine keeps the run since."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._ends, self.lost = run, threading.Event(), False
        self._saying = threading.Thread(target=self._say, name="keeping", daemon=True)

    def __enter__(self) -> Keeping:
        self._say_once()
        self._saying.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ends.set()
        self._saying.join()
        if not self.lost:
            with contextlib.suppress(OSError):  # it counts for KEPT_S then
                self._run.keeper.unlink(missing_ok=True)

    def _say(self) -> None:
        while not self.lost and not self._ends.wait(KEPT_S / 6):
            self._say_once()

    def _say_once(self) -> None:
        with contextlib.suppress(OSError):  # a folder that is full or away is said where the run is shown
            self.lost = bool(self._run.kept_elsewhere())
            if not self.lost:
                self._run.keep()
