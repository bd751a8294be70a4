"""What workers leave in partials/ is taken up by the next coordinator, and kept until no crash can lose it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.support.groups import make_group, make_partial
from tests.support.small_run import Prompts, make_config
from workers.config import Bound
from workers.coordinator.core import Coordinator
from workers.coordinator.process.machine import Machine
from workers.coordinator.process.recovered_partials import RecoveredPartials
from workers.messages.codec import pack
from workers.messages.from_worker import Draining, GroupFinished, GroupParked, GroupRejected
from workers.messages.parts import Message, Version
from workers.run import incarnations
from workers.run.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """In its second incarnation: the first one's attempts are 1000 and more."""
    run = RunFolder.create(tmp_path / "run")
    for _ in range(2):
        incarnations.claim(run, "", "", 0, "node", 1, 0)
    return run


def make_spilled(run: RunFolder) -> tuple[Coordinator, RecoveredPartials]:
    core = Coordinator(make_config(4, 2, Bound.admission, 9), Prompts(), run.newest_epoch(), 0.0)
    return core, RecoveredPartials(run, Machine(core), 1)


def leave(run: RunFolder, name: str, message: Message) -> Path:
    path = run.partials / f"{name}.msgpack"
    path.write_bytes(pack(message))
    return path


def test_files_stay_until_a_checkpoint_with_what_they_hold_is_complete(run: RunFolder) -> None:
    """The first one is complete when the second one begins."""
    paths = [leave(run, "g0.1007", GroupFinished(make_group("g0", 1007))), leave(run, "g1.1007", GroupParked(make_partial("g1", 1007)))]
    core, recovered = make_spilled(run)
    recovered.absorb()
    assert list(core.ledger.finished) == ["g0"] and list(core.ledger.parked) == ["g1"]
    recovered.in_checkpoint(Version(2, 1))
    later = leave(run, "g2.1007", GroupParked(make_partial("g2", 1007)))
    recovered.absorb()
    assert all(path.exists() for path in paths), "that checkpoint may never be complete"
    (run.checkpoints / "2.1").mkdir()
    recovered.in_checkpoint(Version(2, 2))
    assert not any(path.exists() for path in paths) and later.exists()
    (run.checkpoints / "2.2").mkdir()
    recovered.in_checkpoint(Version(2, 3))
    assert not later.exists()


def test_a_rejection_is_taken_once_where_its_lease_is_known(run: RunFolder) -> None:
    """Elsewhere its prompt is sampled anew, and the file is of no use."""
    paths = [leave(run, name, GroupRejected(name[:2], int(name[3:]), 5, 0, 0.5)) for name in ("g0.0", "g1.0", "g1.9")]
    core, recovered = make_spilled(run)
    assert core.ledger.lease(b"gone", 0).attempt == 2000
    paths.append(leave(run, "g0.2000", GroupRejected("g0", 2000, 5, 2, 0.5)))
    recovered.absorb()
    assert core.ledger.num_rejected == 1 and not core.ledger.running and core.ledger.next_index == 1
    assert (core.totals.tokens_generated, core.totals.tokens_interrupted) == (5, 2)
    assert [path.exists() for path in paths] == [False, False, False, True], "until a checkpoint knows it"


def test_files_outlast_a_checkpoint_that_could_not_be_written(run: RunFolder) -> None:
    path = leave(run, "g0.1007", GroupParked(make_partial("g0", 1007)))
    _, recovered = make_spilled(run)
    recovered.absorb()
    recovered.in_checkpoint(Version(2, 1))  # the disk was full
    recovered.in_checkpoint(Version(2, 2))
    assert path.exists()
    (run.checkpoints / "2.2").mkdir()
    recovered.in_checkpoint(Version(2, 3))
    assert not path.exists()


def test_an_incarnation_that_dies_before_its_checkpoint_leaves_the_files_to_the_next(run: RunFolder) -> None:
    path = leave(run, "g0.1007", GroupParked(make_partial("g0", 1007)))
    make_spilled(run)[1].absorb()
    incarnations.claim(run, "", "", 0, "node", 1, 0)
    core, recovered = make_spilled(run)
    recovered.absorb()
    assert list(core.ledger.parked) == ["g0"] and path.exists()


def test_files_that_come_later_are_taken_once_each(run: RunFolder) -> None:
    core, recovered = make_spilled(run)
    recovered.absorb()
    leave(run, "g0.1007", GroupParked(make_partial("g0", 1007)))
    recovered.absorb()
    core.ledger.lease(b"worker", 0)
    recovered.absorb()
    assert core.ledger.running.owner("g0", core.ledger.running["g0"].attempt) == b"worker" and not core.ledger.parked


def test_after_the_last_checkpoint_files_are_left_to_the_next_incarnation(run: RunFolder) -> None:
    core, recovered = make_spilled(run)
    core.suspending = True
    path = leave(run, "g0.1007", GroupParked(make_partial("g0", 1007)))
    recovered.absorb()
    assert path.exists() and not core.ledger.parked and core.ledger.next_index == 0


@pytest.mark.parametrize("fenced", [False, True])
def test_what_nobody_wants_is_removed_unless_another_incarnation_may_want_it(run: RunFolder, fenced: bool) -> None:
    core, recovered = make_spilled(run)
    core.ledger.next_index, core.ledger.num_consumed = 2, 2
    path = leave(run, "g0.1007", GroupFinished(make_group("g0", 1007)))
    if fenced:
        incarnations.claim(run, "", "", 0, "node", 1, 0)
    recovered.absorb()
    assert path.exists() is fenced and not core.ledger.finished


@pytest.mark.parametrize("content", [b"", b"\0\1", pack(GroupParked(make_partial("g0", 1007)))[:-1], pack(Draining("time limit"))])
def test_what_cannot_be_read_is_named_and_left(run: RunFolder, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path, good = run.partials / "g0.1007.msgpack", leave(run, "g1.1007", GroupParked(make_partial("g1", 1007)))
    path.write_bytes(content)
    core, recovered = make_spilled(run)
    recovered.absorb()
    recovered.absorb()
    said = capsys.readouterr().out
    assert said.count(str(path)) == 1 and "left as it is" in said
    assert list(core.ledger.parked) == ["g1"] and path.exists()
    recovered.in_checkpoint(Version(2, 1))
    (run.checkpoints / "2.1").mkdir()
    recovered.in_checkpoint(Version(2, 2))
    assert path.exists() and not good.exists()


def test_a_file_that_cannot_be_read_for_a_while_is_taken_up_later(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(run, "g0.1007", GroupFinished(make_group("g0", 1007)))
    core, recovered = make_spilled(run)

    def away(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(Path, "read_bytes", away)
        recovered.absorb()
    recovered.absorb()
    assert list(core.ledger.finished) == ["g0"]
