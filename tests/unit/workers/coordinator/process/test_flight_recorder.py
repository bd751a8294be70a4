"""What a coordinator's process records: on disk within a second, bounded, and where the disk is full not at all, which it says and gets over."""

from __future__ import annotations

import asyncio
import errno
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.groups import make_group
from tests.support.small_disk import small_disk
from tests.support.small_run import Prompts, make_config
from workers.config import Bound
from workers.coordinator.core import Coordinator
from workers.coordinator.monitoring.waiting_reasons import waiting
from workers.coordinator.process import flight_recorder, journal_files
from workers.coordinator.process.flight_recorder import FLUSH_S, RETRY_S, STUCK_S, FlightRecorder
from workers.coordinator.process.machine import Machine
from workers.coordinator.process.replay_run import audit, replay
from workers.coordinator.recording.frozen_state import freeze
from workers.coordinator.recording.inputs import Arrived, Ticked
from workers.messages.from_worker import BatchRequest, GroupFinished, Heartbeat, Register, StepFinished
from workers.messages.parts import Announcement, Role, Version
from workers.run.files import write_from
from workers.run.folder import RunFolder


class Driven:
    """A coordinator that is told of a worker that gives back all leases at once, and of a trainer; and its recorder."""

    def __init__(self, folder: Path, journal_mb: int = 8, num_steps: int = 1000) -> None:
        self.run, config = RunFolder.create(folder), make_config(2, 2, Bound.hard, num_steps)
        config.run.journal_mb, config.evaluation.enabled = journal_mb, False
        self.run.config.write_bytes(msgspec.json.encode(config))
        self.core, self.now = Coordinator(config, Prompts(), 1, 0.0), 0.0
        self.recorder = FlightRecorder(self.run, self.core, lambda: (self.now, 1000.0 + self.now, self.now))
        self.machine = Machine(self.core, self.recorder.note)

    def begin(self) -> None:
        self.recorder.begin(self.now)
        for given in (Register(Role.rollout, "node", 1), Register(Role.trainer, "node", 2)):
            self.machine.do(Arrived(self.now, given.role.value.encode(), given))
        self.publish()

    def publish(self) -> None:
        step = self.core.training.step + 1
        self.machine.do(Arrived(self.now, b"trainer", StepFinished(Announcement(Version(1, step), "/weights", "digest"), {})))
        self.machine.do(Arrived(self.now, b"trainer", BatchRequest(step)))

    def second(self) -> None:
        """Groups are finished, and a step with them."""
        self.now += 1.0
        self.machine.do(Arrived(self.now, b"rollout", Heartbeat(held=self.core.training.announcement.version, capacity=100)))  # type: ignore[union-attr]
        for group_id, lease in list(self.core.ledger.running.items()):
            group = make_group(group_id, lease.attempt, [self.core.training.step] * 2)
            self.machine.do(Arrived(self.now, b"rollout", GroupFinished(group)))
        if self.core.training.in_training:
            self.publish()
        self.machine.do(Ticked(self.now))
        self.machine.take_records()

    async def written(self) -> None:
        """As the loop does it."""
        self.recorder.look(self.now)
        if self.recorder._writing is not None:
            await asyncio.wait([self.recorder._writing])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


def play(scenario: Callable[[], object]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_what_is_recorded_is_private_and_on_disk_when_it_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "GRANTED_S", 600.0)
    driven = Driven(tmp_path / "run")

    async def scenario() -> None:
        driven.begin()
        for _ in range(20):
            driven.second()
            await driven.written()
        assert replay(driven.run).replay.num_inputs == driven.recorder._number, "without any word of an end"

    play(scenario)
    [part] = journal_files.parts(driven.run)
    assert part.path.stat().st_mode & 0o777 == 0o600 and part.path.parent.stat().st_mode & 0o777 == 0o700
    told = audit(driven.run)
    assert told.sound and told.replay.num_points > 10 and told.replay.core is not None
    assert freeze(told.replay.core) == freeze(driven.core) and FLUSH_S < 1


def test_parts_are_bounded_and_the_newest_can_be_replayed(tmp_path: Path) -> None:
    driven = Driven(tmp_path / "run", journal_mb=1)
    driven.recorder._limit = 40 << 10

    async def scenario() -> None:
        driven.begin()
        for _ in range(250):
            driven.second()
            await driven.written()

    play(scenario)
    parts = journal_files.parts(driven.run)
    assert 2 < len(parts) < 12 and parts[0].number > 0 and sum(part.path.stat().st_size for part in parts) < 1.5 * driven.recorder._limit
    told = audit(driven.run)
    assert told.sound and told.parts == len(parts) and freeze(told.replay.core) == freeze(driven.core)  # type: ignore[arg-type]


async def until_full(driven: Driven, disk: Path) -> None:
    """Recorded for a while, then there is no room, and the recorder has seen it."""
    driven.begin()
    driven.second()
    await driven.written()
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    for _ in range(300):
        driven.second()
        await driven.written()
        if driven.recorder.trouble:
            break
    assert "No space left" in driven.recorder.trouble and driven.core.ended is None


def test_what_a_full_disk_does_not_take_is_written_later(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driven = Driven(disk / "run")

    async def scenario() -> None:
        await until_full(driven, disk)
        for _ in range(40):
            driven.second()
            await driven.written()
        assert "kept in memory" in driven.recorder.trouble and not driven.recorder._pending, "without tokens"
        (disk / "filler").unlink()
        driven.second()
        await driven.written()
        assert not driven.recorder.trouble and not driven.recorder._backlog

    play(scenario)
    assert capsys.readouterr().out.count("what headway replay needs cannot be written: the journal cannot be written: [Errno 28] No space left") == 1
    told = audit(driven.run)
    assert told.sound and told.parts == 1 and told.replay.num_inputs == driven.recorder._number
    assert freeze(told.replay.core) == freeze(driven.core)  # type: ignore[arg-type]


def test_what_is_kept_is_bounded_and_another_part_goes_on_later(
        disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(disk / "run")
    monkeypatch.setattr(flight_recorder, "BACKLOG_BYTES", 5000)

    async def scenario() -> None:
        await until_full(driven, disk)
        for _ in range(300):
            driven.second()
            await driven.written()
            if "kept" not in driven.recorder.trouble:
                break
        assert "No space left" in driven.recorder.trouble and not driven.recorder._backlog
        lost = driven.recorder._number
        (disk / "filler").unlink()
        driven.second()
        await driven.written()
        assert driven.recorder.trouble, "not tried again at once"
        driven.now += RETRY_S
        await driven.written()
        assert not driven.recorder.trouble
        driven.second()
        await driven.written()
        assert driven.recorder._number > lost

    play(scenario)
    assert capsys.readouterr().out.count("nothing is recorded for headway replay any more") == 1
    told = audit(driven.run)
    assert told.sound and told.parts == 2 and freeze(told.replay.core) == freeze(driven.core)  # type: ignore[arg-type]


@pytest.mark.parametrize("leaves", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("limit", [8 << 20, 200 << 10])
def test_what_a_failed_write_leaves_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: float, limit: int) -> None:
    """As where a file system tells of its quota when a file is closed; also while parts begin."""
    driven, full = Driven(tmp_path / "run"), OSError(errno.EDQUOT, "Disk quota exceeded")
    driven.recorder._limit = limit

    def fails(path: Path, start: int, content: bytes) -> None:
        write_from(path, start, content[:int(len(content) * leaves)])
        raise full

    async def scenario() -> None:
        driven.begin()
        for number in range(60):
            monkeypatch.setattr(flight_recorder, "write_from", fails if 10 <= number % 20 < 15 else write_from)
            driven.second()
            await driven.written()
            assert bool(driven.recorder.trouble) == (10 <= number % 20 < 15)

    play(scenario)
    told = audit(driven.run)
    assert told.sound and not told.replay.notes and freeze(told.replay.core) == freeze(driven.core)  # type: ignore[arg-type]
    assert told.replay.num_inputs == driven.recorder._number and (told.parts == 1) == (limit == 8 << 20)


def test_flush_on_a_full_disk_leaves_no_write_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path / "run")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        driven.begin()
        driven.second()
        await driven.recorder.flush()
        monkeypatch.setattr(flight_recorder, "write_from", full)
        driven.second()
        await driven.recorder.flush()
        assert driven.recorder._backlog and driven.recorder._writing is not None and driven.recorder._writing.done()

    play(scenario)


def test_a_journal_that_is_removed_is_begun_anew(tmp_path: Path) -> None:
    driven = Driven(tmp_path / "run")

    async def scenario() -> None:
        driven.begin()
        driven.second()
        await driven.written()
        shutil.rmtree(driven.run.journal)
        driven.second()
        await driven.written()
        assert "No such file" in driven.recorder.trouble and not driven.recorder._backlog
        driven.now += RETRY_S
        await driven.written()
        driven.second()
        await driven.written()
        assert not driven.recorder.trouble

    play(scenario)
    told = audit(driven.run)
    assert told.sound and told.parts == 1 and freeze(told.replay.core) == freeze(driven.core)  # type: ignore[arg-type]


def test_a_run_folder_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path / "run")

    async def scenario() -> None:
        driven.begin()
        driven.second()
        await driven.written()
        answered, append = asyncio.Event(), driven.recorder._append
        loop = asyncio.get_running_loop()

        def stuck(*given: object) -> None:
            asyncio.run_coroutine_threadsafe(answered.wait(), loop).result()
            append(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(driven.recorder, "_append", stuck)
        for _ in range(int(STUCK_S) + 3):
            driven.second()
            driven.recorder.look(driven.now)
            await asyncio.sleep(0)
        assert "has not answered" in driven.recorder.trouble and not driven.recorder._pending, "nothing is piled up"
        answered.set()
        assert driven.recorder._writing is not None
        await driven.recorder._writing
        driven.now += RETRY_S
        await driven.written()
        assert not driven.recorder.trouble

    play(scenario)
    assert audit(driven.run).sound


def test_an_input_that_the_coordinator_dies_of_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path / "run")

    async def scenario() -> None:
        driven.begin()
        driven.second()
        tick, driven.now = Coordinator.tick, 60.0
        monkeypatch.setattr(Coordinator, "tick", lambda core, now: tick(core, now // (now < 60)))
        with pytest.raises(ZeroDivisionError):
            driven.machine.do(Ticked(driven.now))
        await driven.recorder.flush()

    play(scenario)
    assert "(Ticked): ZeroDivisionError: float floor division by zero. So it was then" in replay(driven.run).difference
    monkeypatch.undo()
    assert "then the coordinator died; now nothing was sent" in replay(driven.run).difference


def test_the_state_at_a_step_and_at_a_time_and_what_moved_last(tmp_path: Path) -> None:
    driven = Driven(tmp_path / "run")

    async def scenario() -> None:
        driven.begin()
        for _ in range(10):
            driven.second()
        for _ in itertools.repeat(None, 30):  # the rollout worker is silent
            driven.now += 1.0
            driven.machine.do(Ticked(driven.now))
        await driven.recorder.flush()

    play(scenario)
    status = replay(driven.run, at_step=4).status
    assert status is not None and status["step"] == 4 and replay(driven.run, at_step=99).status is None
    early, late = replay(driven.run, until=1005.5).status, replay(driven.run, stall=True)
    assert early is not None and 0 < early["step"] < 10 and early["workers"][0]["name"] == "rollout 0"
    assert late.moved is not None and late.status is not None
    assert 1010 <= late.moved["wall"] <= 1011 and late.status["time"] == pytest.approx(1040, abs=2)
    assert late.moved["input"].startswith(("StepFinished", "GroupFinished")) and late.status["waiting"] == waiting(driven.core)


def test_a_journal_of_other_code_is_replayed_as_far_as_it_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path / "run")

    async def scenario() -> None:
        driven.begin()
        for _ in range(5):
            driven.second()
        await driven.recorder.flush()

    with monkeypatch.context() as patch:
        patch.setattr(journal_files, "code", lambda: "headway 0.0 other")
        driven.recorder._code = journal_files.code()
        play(scenario)
    told = replay(driven.run)
    assert told.sound and told.replay.notes and "headway 0.0 other" in told.replay.notes[0]
    greet = Coordinator._announce
    monkeypatch.setattr(Coordinator, "_announce", lambda core, given: greet(core, given) if given.version.step < 3 else None)
    told = replay(driven.run)
    assert told.replay.num_inputs > 10 and "StepFinished" in told.difference and "VersionAnnounced to everyone" in told.difference


def test_nothing_is_recorded_where_that_is_not_wanted(tmp_path: Path) -> None:
    driven = Driven(tmp_path / "run", journal_mb=0)

    async def scenario() -> None:
        driven.begin()
        driven.second()
        await driven.written()
        await driven.recorder.flush()

    play(scenario)
    assert not driven.run.journal.exists() and not journal_files.parts(driven.run) and not driven.recorder.trouble
