"""An element of an evaluation while the run folder is full or away: it waits, and nothing that was judged is lost."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.config import ClusterConfig, ClusterKind, Config, RunConfig, RunKind
from workers.evaluation import chunks, element
from workers.evaluation.chunks import divide
from workers.evaluation.element import EvaluationElement
from workers.run import outage
from workers.run.folder import RunFolder

NUM_PROMPTS = 5


class Engines:
    """Has room for everything."""

    held, capacity, waiting_for = 0, 8, ""


class Judging:
    """Judges at once, and counts."""

    tokens_generated = 0

    def __init__(self) -> None:
        self.judged: list[int] = []

    async def judge(self, index: int) -> bytes:
        self.judged.append(index)
        return json.dumps({"index": index, "samples": [{"score": 1.0, "answer": "", "tokens": 1}]}).encode()


class Failing:
    """Does what `work` does, but for some calls, by number from 1."""

    def __init__(self, work: Callable[..., Any], number: int, calls: tuple[int, ...], after: bool = False) -> None:
        self._work, self._number, self._calls, self._after, self._count = work, number, calls, after, 0

    def __call__(self, *arguments: object) -> Any:
        self._count += 1
        fails = self._count in self._calls
        done = self._work(*arguments) if self._after or not fails else None
        if fails:
            raise OSError(self._number, "an outage")
        return done


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EvaluationElement:
    monkeypatch.setattr(outage, "NEXT_S", 0.01)
    monkeypatch.setattr(element, "LOOK_S", 0.0)
    monkeypatch.setattr(element, "conclude", lambda *_: "")
    run = RunFolder.create(tmp_path / "run").patient(15)
    run.evaluation.mkdir()
    config = Config(run=RunConfig(kind=RunKind.evaluation), cluster=ClusterConfig(kind=ClusterKind.local))
    begun = EvaluationElement(run, config)
    begun._engines, begun._judging = Engines(), Judging()  # type: ignore[assignment]
    begun._chunks.chunks = divide(NUM_PROMPTS, 1)
    return begun


def judged(begun: EvaluationElement) -> list[int]:
    """Run it to its end; the prompts whose lines stand on disk."""
    async def live() -> None:
        assert (await begun._judge_all(asyncio.get_running_loop().create_future())).how == "finished"

    asyncio.run(asyncio.wait_for(live(), 60.0))
    return sorted(index for number in range(len(begun._chunks.chunks)) for index in begun._chunks.read(number))


@pytest.mark.parametrize(("part", "name", "number"), [
    (element, "write_atomic", errno.ENOSPC), (chunks, "append_whole", errno.ENOSPC), (chunks, "sync", errno.EIO),
    (chunks, "write_once", errno.ESTALE), (chunks, "read_lines", errno.EIO),
    (RunFolder, "stop_requested", errno.EIO), (RunFolder, "ended", errno.ESTALE)])
@pytest.mark.parametrize("after", [False, True], ids=["before it is done", "after it is done"])
def test_an_outage_costs_nothing(
        started: EvaluationElement, monkeypatch: pytest.MonkeyPatch, part: object, name: str, number: int, after: bool) -> None:
    failing = Failing(getattr(part, name), number, (1, 2, 4), after)
    monkeypatch.setattr(part, name, lambda *arguments: failing(*arguments))
    assert judged(started) == list(range(NUM_PROMPTS))
    assert sorted(started._judging.judged) == list(range(NUM_PROMPTS)), "each of them once"  # type: ignore[union-attr]
    assert failing._count >= 1


def test_without_patience_it_fails(started: EvaluationElement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "append_whole", Failing(chunks.append_whole, errno.ENOSPC, (2,)))
    started.run = started.run.patient(0)
    with pytest.raises(OSError, match="an outage"):
        judged(started)
