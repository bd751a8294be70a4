"""Attacks on the sandbox, each a real program in it, as the user who runs the tests and (where that is root) as an unprivileged one.

Every test asserts both that the attack failed and that the host is as it was: its files, sockets and processes, the server, the run's folder.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from tests.sandbox import attacks
from tests.sandbox.as_user import ROOT, UsersSandbox
from tests.sandbox.host import ENVIRONMENT_SECRET, Host, host
from workers.config import SandboxConfig
from workers.sandbox.confinement.counting import MAX_THREADS
from workers.sandbox.sandbox import Limits, Outcome, Sandbox

UNPRIVILEGED = 54321
SHORT = Limits(wall_s=1.0, cpu_s=1.0, memory_mb=256, output_bytes=1 << 16, file_mb=1, num_files=8)
LONG = Limits(wall_s=120.0, cpu_s=60.0, memory_mb=512, output_bytes=1 << 20, file_mb=1, num_files=100)
X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the attack is in x86_64's machine code or numbers")


class Case:
    """A sandbox under attack, and what it is to protect."""

    def __init__(self, sandbox: Sandbox | UsersSandbox, there: Host) -> None:
        self.sandbox, self.host = sandbox, there

    def run(self, source: str, limits: Limits = LONG) -> Outcome:
        return self.sandbox.run(source, b"", limits)

    def assert_untouched(self) -> None:
        self.host.assert_untouched()
        left = self.sandbox.left() if isinstance(self.sandbox, UsersSandbox) else sorted(path.name for path in self.sandbox._folder.work.iterdir())
        assert left == []


def interpreter_for_anybody() -> str | None:
    """An interpreter that an unprivileged user can run, with the sandbox's modules."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import workers.sandbox.forkserver.server; assert sys.version_info >= (3, 11)"
    for python in dict.fromkeys([os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"]):
        try:
            subprocess.run([python, "-I", "-c", code], user=UNPRIVILEGED, group=UNPRIVILEGED, extra_groups=[], cwd="/", check=True,
                           capture_output=True, timeout=60)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


@pytest.fixture(scope="module", params=["own user", "unprivileged user"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    os.environ[ENVIRONMENT_SECRET] = "x"
    if request.param == "own user":
        with host(os.getuid()) as there, Sandbox(SandboxConfig()) as sandbox:
            yield Case(sandbox, there)
        return
    if os.getuid() != 0:
        pytest.skip("not root: the tests above ran as an unprivileged user already")
    python = interpreter_for_anybody()
    if python is None:
        pytest.skip(f"no Python 3.11 or newer, and {ROOT}, that another user could read")
    with host(UNPRIVILEGED) as there:
        users = UsersSandbox(UNPRIVILEGED, python)
        try:
            yield Case(users, there)
        finally:
            users.close()


@pytest.mark.parametrize("name", attacks.REFUSED)
def test_every_way_is_refused(case: Case, name: str) -> None:
    outcome = case.run(attacks.PRELUDE.format(facts=case.host.facts, more=()) + attacks.REFUSED[name])
    lines = outcome.stdout.decode().splitlines()
    assert (outcome.status, outcome.stderr) == ("ok", b"")
    assert len(lines) >= 10 and [line for line in lines if not line.endswith(" refused")] == []
    case.assert_untouched()


@X86
def test_calls_that_no_program_needs_are_refused(case: Case) -> None:
    outcome = case.run(attacks.PRELUDE.format(facts=case.host.facts, more=()) + attacks.EXOTIC)
    lines = outcome.stdout.decode().splitlines()
    assert (outcome.status, outcome.stderr, len(lines)) == ("ok", b"", attacks.EXOTIC.count('", '))
    assert [line for line in lines if not line.endswith(" refused")] == []
    case.assert_untouched()


@X86
@pytest.mark.parametrize("code", [attacks.INT_80, attacks.X32], ids=["int 0x80", "x32"])
def test_other_ways_into_the_kernel_kill(case: Case, code: str) -> None:
    outcome = case.run(attacks.MACHINE_CODE.format(code=code))
    assert (outcome.status, outcome.stdout) == ("killed", b"ready\n")
    case.assert_untouched()


@pytest.mark.parametrize("name", attacks.BOMBS)
def test_bombs_end_within_their_limits(case: Case, name: str) -> None:
    source, statuses = attacks.BOMBS[name]
    outcome = case.run(source, SHORT if "timeout" in statuses else LONG)
    assert outcome.status in statuses, outcome
    assert len(outcome.stdout) + len(outcome.stderr) <= LONG.output_bytes
    case.assert_untouched()


def test_a_fork_bomb_starts_nothing(case: Case) -> None:
    outcome = case.run(attacks.FORK_BOMB)
    assert (outcome.status, outcome.stdout) == ("ok", b"0\n")
    case.assert_untouched()


def test_threads_are_counted(case: Case) -> None:
    outcome = case.run(attacks.THREAD_BOMB)
    assert (outcome.status, int(outcome.stdout)) == ("ok", MAX_THREADS)
    case.assert_untouched()


def test_a_program_fills_no_disk(case: Case) -> None:
    """Not even with files that it deletes."""
    limits = replace(LONG, num_files=20)
    outcome = case.run(attacks.DISK_BOMB, limits)
    assert outcome.status == "ok", outcome
    made, total, number = map(int, outcome.stdout.split())
    assert (made, total, number) == (20, 20 * limits.file_mb << 20, errno.EDQUOT)
    case.assert_untouched()


def test_folders_are_counted(case: Case) -> None:
    outcome = case.run(attacks.FOLDER_BOMB)
    assert outcome.status == "ok", outcome
    made, number = map(int, outcome.stdout.split())
    assert (made, number) == (LONG.num_files, errno.EDQUOT)
    case.assert_untouched()


def test_a_program_inherits_nothing(case: Case) -> None:
    outcome = case.run(attacks.DESCRIPTORS)
    names = ["HOME", "LANG", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "TMPDIR"]
    assert (outcome.status, outcome.stdout.decode()) == ("ok", f"[0, 1, 2] {names}\n")


def test_what_a_program_does_to_its_own_process_ends_with_it(case: Case) -> None:
    outcome = case.run(attacks.SABOTAGE)
    assert outcome.status in ("error", "killed")
    assert case.run("print('next')").stdout == b"next\n"
    case.assert_untouched()


def test_nothing_is_left_of_all_this() -> None:
    """Of this process's children, only servers remain, without children of their own."""
    with Sandbox(SandboxConfig()) as sandbox:
        server = psutil.Process(sandbox.pid)
        sandbox.run(attacks.THREAD_BOMB, limits=LONG)
        assert server.children(recursive=True) == []
        base = sandbox._folder.path
        assert sorted(path.name for path in base.iterdir()) == ["canary", "work"]
    assert not base.exists() and not server.is_running()
