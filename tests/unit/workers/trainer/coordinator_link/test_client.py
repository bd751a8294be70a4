"""The trainer's link at the end of a run, with a coordinator that only says that it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.config import Config
from workers.run.folder import RunFolder
from workers.slurm.signals import Signals
from workers.trainer.coordinator_link import client as trainer_link
from workers.trainer.coordinator_link.client import CoordinatorLink
from workers.trainer.coordinator_link.endings import RunEnded


class Parting:
    """Stands in for the connection, and for the process at its other end."""

    def __init__(self, said: list[str], cause: str) -> None:
        self.said, self.cause, self.parting = said, cause, ""

    async def __aenter__(self) -> Parting:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.said.append("goodbye")

    async def serve(self) -> str:
        return self.cause

    async def welcomed(self) -> None:
        await asyncio.Event().wait()

    def watch(self, ended: Callable[[int], None]) -> None:
        pass

    def close(self) -> int:
        return 0


def test_an_incarnations_end_is_on_record_before_goodbye(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator writes the report when all workers have said it, while the main thread may still be in the middle of a step."""
    run, said = RunFolder.create(tmp_path / "run"), []
    parting = Parting(said, "no worker is left")
    monkeypatch.setattr(trainer_link, "Peer", lambda *_, **__: parting)
    monkeypatch.setattr(trainer_link, "CoordinatorProcess", lambda *_: parting)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    run.end("no worker is left", "coordinator")
    link = CoordinatorLink(run, Config(), 1, None, Signals(), said.append)
    with pytest.raises(RunEnded, match="no worker is left"):
        link.next_batch(1)
    link.close()
    assert said == ["no worker is left", "goodbye"]
