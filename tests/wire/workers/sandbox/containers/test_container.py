"""What a command may not do, tried by real commands in real containers."""

from __future__ import annotations

import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.sandbox.containers import containers
from tests.support.processes import said
from workers.config import ContainerBackend, ContainerConfig
from workers.sandbox.containers import container, container_choice
from workers.sandbox.containers.container import Container, pack
from workers.sandbox.outcome import SandboxError

LIMITS = ContainerConfig(backend=ContainerBackend.bubblewrap, wall_s=60, memory_mb=256, disk_mb=8, num_processes=32)
IMAGE = os.environ.get("HEADWAY_TEST_IMAGE", "")
"""A root file system, with Python, for Apptainer."""
FILES = pack({"a.txt": "mine\n", "folder/b.txt": "too\n"})
SECRET = "HEADWAY_TEST_SECRET"


@pytest.fixture(scope="module", params=[ContainerBackend.bubblewrap, ContainerBackend.apptainer])
def limits(request: pytest.FixtureRequest) -> ContainerConfig:
    if request.param is ContainerBackend.apptainer and not IMAGE:
        pytest.skip("HEADWAY_TEST_IMAGE names no image for Apptainer")
    return replace(LIMITS, backend=request.param, image=IMAGE if request.param is ContainerBackend.apptainer else "")


@pytest.fixture(scope="module")
def case(limits: ContainerConfig) -> Container:
    os.environ[SECRET] = "do not tell"
    return containers(limits)


@pytest.fixture(scope="module")
def bubblewrap() -> Container:
    return containers(LIMITS)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    started = psutil.Process().children(recursive=True)
    names = ("bwrap", "apptainer", "starter", "appinit", "bash", "sleep", "timeout", "python3")
    assert [name for child in started if (name := said(child.name, "")) in names] == []


def test_files_come_back_as_the_command_left_them(case: Container) -> None:
    ran = case.run(FILES, "cat a.txt folder/b.txt && echo new > c.txt && rm -r folder && ln -s c.txt d && chmod +x a.txt; exit 7")
    assert (ran.output, ran.status, ran.failure) == ("mine\ntoo\n", 7, "")
    again = case.run(ran.files, "ls; cat d; test -x a.txt && pwd")
    assert (again.output, again.status) == ("a.txt\nc.txt\nd\nnew\n/tmp/repository\n", 0)


def test_what_takes_the_place_of_files_cannot_be_swallowed(case: Container) -> None:
    """By the head of a large file behind the files, which a command can write through the descriptor of what packs them, where that is its user's."""
    over, head = pack({"a.txt": "mine\n"}), tarfile.TarInfo("large")
    head.size = len(over)
    plain = case.run(FILES, "echo another > a.txt").files
    judged = case.run(plain.ljust(512 * 2000, b"\0") + head.tobuf(), "cat a.txt", over)
    assert (judged.status, judged.output) == (-1, ""), "an archive that ends too early is none"
    assert case.run(plain, "cat a.txt", over).output == "mine\n"


def test_no_exit_status_loses_files(case: Container) -> None:
    ran = case.run(FILES, f"echo new > a.txt; exit {container.NOT_RUN}")
    assert ran.status == 1 and case.run(ran.files, "cat a.txt").output == "new\n"


def test_only_the_end_of_a_long_output_comes_back(case: Container) -> None:
    ran = case.run(FILES, "head -c 1000000 /dev/zero | tr '\\0' x; echo end")
    assert len(ran.output) == container.SHOWN_BYTES and ran.output.endswith("xxend\n")


def test_no_network(case: Container) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        ran = case.run(FILES, f"exec 2>&1; : <> /dev/tcp/127.0.0.1/{server.getsockname()[1]}; grep -c : /proc/net/dev")
        assert ran.output.endswith("\n1\n") and "refused" in ran.output, "there is lo alone, and nobody on it"
        with pytest.raises(BlockingIOError):
            server.accept()


def test_nothing_of_others_can_be_read_or_written(case: Container, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("of others")
    ran = case.run(FILES, f"cat {canary}; cat /etc/passwd; ls /home /work; cat /proc/*/environ | tr '\\0' '\\n' | grep {SECRET}; "
                          f"for f in /usr/x /x /dev/x /proc/sys/x {tmp_path}/x; do touch $f; done; ls -A /root /proc/1/root/home")
    assert "of others" not in ran.output and "do not tell" not in ran.output
    assert ran.output.count("touch: ") == 5 and list(tmp_path.iterdir()) == [canary] and canary.read_text() == "of others"


@pytest.mark.parametrize("attempt", ["unshare --user true", "unshare --user --mount mount -t tmpfs none /tmp", "mount -t tmpfs none /tmp",
                                     "python3 -c 'import os; os.memfd_create(\"hidden\")'"])
def test_no_memory_without_a_bound(case: Container, attempt: str) -> None:
    assert case.run(FILES, attempt).status not in (0, 127)


@pytest.mark.parametrize("counted_apart", [True, False])
def test_a_fork_bomb_ends(monkeypatch: pytest.MonkeyPatch, limits: ContainerConfig, counted_apart: bool) -> None:
    """`False`: Linux before 5.14, whose count is of all that the user has."""
    monkeypatch.setattr(container, "COUNTED_APART", counted_apart)
    monkeypatch.setattr(container, "SPARE", 50)
    ran = containers(replace(limits, wall_s=2)).run(FILES, "bomb() { bomb | bomb & }; bomb; sleep 1000")
    assert (ran.failure == "more than 32 processes at once" and ran.files == FILES) or "fork" in ran.output


def test_root_makes_containers_as_another(case: Container) -> None:
    """Who is root is bound by no limit of processes."""
    assert case.run(FILES, "id --user").output == f"{os.geteuid() or container.UNPRIVILEGED}\n"


def test_the_file_system_is_bounded(case: Container) -> None:
    ran = case.run(FILES, "for i in 1 2 3; do head -c 5000000 /dev/zero > $i; done; rm 2 3; df --output=size /tmp")
    assert "No space left" in ran.output and ran.output.split()[-1] == str(8 << 10) and len(ran.files) < 8 << 20
    assert case.run(FILES, "touch /dev/shm/x").status == 1 and case.run(FILES, "head -c 20000000 /dev/zero > /run/x").status != 0
    assert case.run(FILES, "for i in $(seq 40); do truncate -s 8M $i; done").status == 0, "holes take no room"


def test_the_number_of_files_is_bounded(case: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_FILES", 500)
    assert case.run(FILES, "mkdir d; cd d; seq 600 | xargs touch; sleep 1000").failure == "more than 500 files"


def test_memory_is_bounded(case: Container) -> None:
    alone = case.run(FILES, "python3 -c 'x = b\"x\" * (300 << 20)'")
    assert alone.status == 1 and "MemoryError" in alone.output
    together = case.run(FILES, "for i in 1 2 3; do python3 -c 'import time; x = b\"x\" * (120 << 20); time.sleep(1000)' & done; wait")
    assert together.failure == "more than 256 MiB of memory" and together.status == -1


def test_time_is_bounded_and_what_was_done_stays(limits: ContainerConfig) -> None:
    ran = containers(replace(limits, wall_s=1)).run(FILES, "echo said; echo new > c.txt; sleep 1000")
    assert (ran.output, ran.status, ran.failure) == ("said\n", -1, "no end in 1 s")
    assert containers(limits).run(ran.files, "cat c.txt").output == "new\n"


def test_what_runs_in_the_background_ends_with_its_command(case: Container) -> None:
    ran = case.run(FILES, "(setsid sleep 98765 &); nohup sleep 98765 & disown; echo started")
    assert (ran.output.splitlines()[-1], ran.status) == ("started", 0)
    assert case.run(ran.files, "pgrep sleep").status == 1


@pytest.mark.parametrize("sabotage", [
    "kill -KILL -1; kill -KILL $PPID $outer; sleep 1000", "cd /; rm -rf /tmp/repository",
    "printf 'no number at all    ' > /proc/$outer/fd/1; kill -STOP 1 $outer; kill -KILL $outer; sleep 1000"])
def test_a_command_that_destroys_its_container_changes_nothing(case: Container, sabotage: str) -> None:
    ran = case.run(FILES, f"read -r _ _ _ outer _ < /proc/$PPID/stat; {sabotage}")  # what packs the files
    assert ran.status == -1 and ran.failure and ran.files == FILES


@pytest.mark.parametrize("command", ["echo " + "x" * 200_000, "echo \0"])
def test_what_is_no_command_is_told(case: Container, command: str) -> None:
    assert (ran := case.run(FILES, command)).status == -1 and "cannot be run" in ran.failure and ran.files == FILES


def test_files_without_room_are_told(case: Container) -> None:
    ran = case.run(pack({"large": "x" * (9 << 20)}), "true")
    assert ran.status == -1 and "too early" in ran.failure


def test_without_anything_that_makes_containers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"^workflow.container.backend=auto: no container .*bwrap is not installed; .*needs bubblewrap 0.8"):
        container_choice.choose(replace(LIMITS, backend=ContainerBackend.auto))


@pytest.mark.parametrize(("script", "why"), [
    ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "status 1: bwrap: No permissions to create new namespace"),
    ('while [ "$1" != -- ]; do shift; done; shift; exec "$@"', "it has no process namespace of its own"),
    ('while [ "$1" != -- ]; do shift; done; shift; exec unshare --user --map-root-user --pid --fork --mount-proc "$@"',
     "files of others can be seen; the network can be reached")])
def test_what_does_not_confine_is_refused(bubblewrap: Container, monkeypatch: pytest.MonkeyPatch, script: str, why: str) -> None:
    """A kernel without user namespaces, and a program that only says that it confines."""
    with tempfile.TemporaryDirectory() as folder:
        put_program(monkeypatch, Path(folder), script)
        with pytest.raises(SandboxError, match=why):
            container_choice.choose(replace(LIMITS, backend=ContainerBackend.bubblewrap))
    shutil.rmtree(container.HOME, ignore_errors=True)  # what confines nothing wrote them here
    Path("/tmp/.output").unlink(missing_ok=True)


def test_what_cannot_be_started_is_refused(bubblewrap: Container, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_program(monkeypatch, tmp_path, "not reached").write_text("#!/no/such/program")
    with pytest.raises(SandboxError, match="bubblewrap: .*/bwrap cannot be started: .*workflow=shell_agent needs"):
        container_choice.choose(replace(LIMITS, backend=ContainerBackend.bubblewrap))


def put_program(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """What is taken for bubblewrap, where any user can see it."""
    folder.chmod(0o755)
    program = folder / "bwrap"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return program
