"""Groups that workers left in partials/ because they had to go while no coordinator was there.

They are read at the start of an incarnation and as they come, and their files removed once a checkpoint holds what was in them.
"""

from __future__ import annotations

import time
from pathlib import Path

from workers.coordinator.process.machine import Machine
from workers.coordinator.recording.inputs import Absorbed
from workers.messages.codec import MessageError, from_workers
from workers.messages.from_worker import GroupFinished, GroupParked, GroupRejected
from workers.messages.parts import Version
from workers.run.folder import RunFolder


class RecoveredPartials:
    """The files of partials/."""

    def __init__(self, run: RunFolder, machine: Machine, max_message_mb: int) -> None:
        self._run, self._machine = run, machine
        self._decoder = from_workers(max_message_mb << 20)
        self._absorbed: list[Path] = []
        self._in_checkpoint: list[Path] = []
        self._checkpoint: Version | None = None
        self._seen: set[Path] = set()

    def absorb(self) -> None:
        """Take over every new file that can be read; another one is named and left. Not once the last state has been saved. Raises OSError; the
        file is then taken over by a later call."""
        if self._machine.core.suspending:
            return
        for path in sorted(set(self._run.partials.glob("*.msgpack")) - self._seen):
            content = path.read_bytes()
            self._seen.add(path)
            try:
                message = self._decoder.unpack(content)
                if not isinstance(message, GroupFinished | GroupRejected | GroupParked):
                    raise MessageError(f"a {type(message).__name__}: must be a finished, a rejected or a parked group")
                outcome = self._machine.do(Absorbed(time.monotonic(), message))
                trouble = outcome.trouble
            except MessageError as error:
                trouble = str(error)
            if trouble:
                print(f"{path}: left as it is ({trouble})", flush=True)
            elif outcome.wanted:
                self._absorbed.append(path)
            elif self._run.newest_epoch() == self._machine.core.epoch:  # the state that this incarnation goes on from is past it
                path.unlink(missing_ok=True)

    def in_checkpoint(self, version: Version) -> None:
        """Note that the checkpoint of `version` is being written; what the one before holds is not needed any more if that is complete."""
        if self._checkpoint is not None and (self._run.checkpoints / str(self._checkpoint)).is_dir():
            for path in self._in_checkpoint:
                path.unlink(missing_ok=True)
            self._in_checkpoint = []
        self._in_checkpoint, self._absorbed, self._checkpoint = self._in_checkpoint + self._absorbed, [], version
