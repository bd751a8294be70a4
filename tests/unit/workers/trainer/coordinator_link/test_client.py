"""The trainer's link at the end of a run, with a coordinator that only says that it is over."""

from __future__ import annotations

import asyncio
import errno
import queue
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

    def describe_end(self, status: int) -> str:
        return f"the coordinator exited with status {status}"

    def close(self) -> int:
        return 0

    def abandon(self) -> None:
        pass

    def finish(self, cause: str) -> None:
        pass


def test_an_incarnations_end_is_on_record_before_goodbye(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator writes the report when all workers have said it, while the main thread may still be in the middle of a step."""
    run, said = RunFolder.create(tmp_path / "run"), []
    parting = Parting(said, "no worker is left")
    monkeypatch.setattr(trainer_link, "Peer", lambda *_, **__: parting)
    monkeypatch.setattr(trainer_link, "CoordinatorProcess", lambda *_: parting)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(trainer_link, "GRACE_S", 600.0)  # or the process exits, which runs other tests
    run.end("no worker is left", "coordinator")
    link = CoordinatorLink(run, Config(), 1, None, Signals(), said.append)
    with pytest.raises(RunEnded, match="no worker is left"):
        link.next_batch(1)
    link.close()
    assert said == ["no worker is left", "goodbye"]


@pytest.mark.parametrize("ends", [
    lambda link: link._coordinator_ended(1), lambda link: link.fail("no memory"), lambda link: link._lost(ConnectionError("silent")),
    lambda link: link._over("no worker is left")], ids=["the coordinator dies", "the trainer fails", "the coordinator is lost", "the run is over"])
def test_what_cannot_be_put_on_record_ends_the_link_all_the_same(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[[CoordinatorLink], None]) -> None:
    """On a full disk, say. Before, the main thread waited for a coordinator that was gone."""
    run = RunFolder.create(tmp_path / "run")
    parting = Parting([], "")
    parting.serve = asyncio.Event().wait  # type: ignore[method-assign, assignment] -- the connection says nothing
    monkeypatch.setattr(trainer_link, "Peer", lambda *_, **__: parting)
    monkeypatch.setattr(trainer_link, "CoordinatorProcess", lambda *_: parting)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    exits: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr("os._exit", exits.put)
    monkeypatch.setattr(trainer_link, "GRACE_S", 0.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for question in ("ended", "stop_requested"):
        monkeypatch.setattr(RunFolder, question, full)
    link = CoordinatorLink(run, Config(), 1, None, Signals(), full)
    ends(link)
    with pytest.raises(RunEnded):
        link.next_batch(1, timeout_s=0.0)
    assert exits.get(timeout=30) == 1, "the main thread has stayed: the process is ended under it"
