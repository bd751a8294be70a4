"""The sandbox's pure parts: config, what a machine means for it, what is said in a session, how an end is judged; and what its server imports."""

from __future__ import annotations

import ast
import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.config import Config, ConfigError, SandboxBackend, SandboxConfig, SandboxPolicy
from workers.sandbox import outcome
from workers.sandbox.confinement import probe
from workers.sandbox.confinement.probe import Machine
from workers.sandbox.forkserver.protocol import Dialogue, OutOfTurn
from workers.sandbox.outcome import Limits
from workers.sandbox.sandbox import Sandbox, SandboxError

SANDBOX = Path(__file__).resolve().parents[2] / "workers" / "sandbox"
FULL = Machine("x86_64", "6.8.0", landlock=6, seccomp=True, notifications=True, bubblewrap="/usr/bin/bwrap")
LIMITS = Limits(1.0, 5.0, 1, 1, 1, 1)


@pytest.mark.parametrize(("key", "value"), [
    ("wall_s", 0.0), ("cpu_s", -1.0), ("wall_s", float("nan")), ("wall_s", 1e9), ("memory_mb", 1), ("output_kb", 0), ("file_mb", 0),
    ("num_files", -1), ("python", "python3")])
def test_what_cannot_work_is_refused(key: str, value: object) -> None:
    config = Config().sandbox
    setattr(config, key, value)
    with pytest.raises(ConfigError, match=f"sandbox.{key}="):
        config.check()


@given(landlock=st.integers(0, 8), seccomp=st.booleans(), bubblewrap=st.sampled_from(["", "/usr/bin/bwrap"]),
       name=st.sampled_from(["x86_64", "aarch64", "riscv64"]), backend=st.sampled_from(SandboxBackend),
       policy=st.sampled_from(SandboxPolicy))
def test_what_is_missing(landlock: int, seccomp: bool, bubblewrap: str, name: str, backend: SandboxBackend, policy: SandboxPolicy) -> None:
    """Filters are never done without; files are given up only by sandbox.policy=weaken, and then it is said."""
    verdict = probe.judge(SandboxConfig(backend=backend, policy=policy), Machine(name, "6.8", landlock, seccomp, True, bubblewrap))
    files = {"auto": bool(landlock or bubblewrap), "landlock": bool(landlock), "bubblewrap": bool(bubblewrap)}[backend.value]
    filtered = seccomp and name != "riscv64"
    assert bool(verdict.missing) == (not filtered or (not files and policy is SandboxPolicy.refuse))
    assert bool(verdict.weaker) == (filtered and not files and policy is SandboxPolicy.weaken)


@pytest.mark.parametrize("backend", SandboxBackend)
def test_a_machine_without_anything_is_told_what_to_do(backend: SandboxBackend) -> None:
    missing, = probe.judge(SandboxConfig(backend=backend), Machine("x86_64", "4.18.0", 0, True, False, "")).missing
    assert ("Linux 4.18.0" in missing) == (backend is not SandboxBackend.bubblewrap)
    for remedy in ("Landlock", "bubblewrap", "sandbox.policy=weaken"):
        assert remedy in missing


def test_the_sandbox_refuses_where_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe", lambda _: Machine("x86_64", "4.18.0", 0, True, False, ""))
    with pytest.raises(SandboxError, match="no Landlock"):
        Sandbox(SandboxConfig())


@pytest.mark.parametrize("notifications", [True, False])
def test_a_weakened_sandbox_says_so_and_writes_nothing(notifications: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
                                                       tmp_path: Path) -> None:
    """As on a kernel without Landlock: this one's is not used."""
    real = probe.probe(SandboxBackend.landlock)
    monkeypatch.setattr(probe, "probe", lambda _: Machine(real.name, "4.18.0", 0, True, notifications, ""))
    for mode, expected in (("r", "mine"), ("w", "PermissionError"), ("a", "PermissionError"), ("r+", "PermissionError")):
        (tmp_path / "file").write_text("mine")
        with Sandbox(SandboxConfig(policy=SandboxPolicy.weaken, wall_s=120.0)) as sandbox:
            done = sandbox.run(f"try:\n    print(open({str(tmp_path / 'file')!r}, {mode!r}).read())\n"
                               "except OSError as error: print(type(error).__name__)")
        assert done.stdout.decode() == f"{expected}\n"
    assert (tmp_path / "file").read_text() == "mine"
    assert "the sandbox is weaker than it should be" in caplog.text and "can read every file" in caplog.text


def test_this_machine_is_looked_at() -> None:
    machine = probe.probe(SandboxBackend.bubblewrap)
    assert machine.name and machine.release and machine.landlock >= 0
    assert not probe.probe(SandboxBackend.landlock).bubblewrap and bool(probe.probe(SandboxBackend.auto).bubblewrap) == (
        bool(machine.bubblewrap) and not machine.landlock), "asked only where it matters"


@pytest.mark.parametrize("bwrap", ["#!/no/such/interpreter\n", "#!/bin/sh\nexec sleep 600\n"])
def test_a_bubblewrap_that_cannot_run_is_none(bwrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text(bwrap)
    (tmp_path / "bwrap").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(probe, "_BUBBLEWRAP_S", 0.1)
    assert probe.probe(SandboxBackend.bubblewrap).bubblewrap == ""


frames = st.lists(st.binary(max_size=20), max_size=8)


@given(requests=frames, data=st.data())
def test_a_dialogue_however_it_is_cut(requests: list[bytes], data: st.DataObject) -> None:
    """Replies arrive whole, in order, whatever the pieces in which their bytes come."""
    dialogue = Dialogue(requests, None)
    for number, request in enumerate(requests):
        assert not dialogue.is_over
        assert dialogue.next_request() == len(request).to_bytes(4, "big") + request
        reply = len(request).to_bytes(4, "big") + request
        cuts = sorted(data.draw(st.lists(st.integers(0, len(reply) - 1), max_size=4)))
        pieces = [reply[start:end] for start, end in itertools.pairwise([0, *cuts, len(reply)])]
        assert [dialogue.received(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert dialogue.replies == requests[:number + 1]
    assert dialogue.is_over


@given(reply=st.binary(max_size=20), extra=st.binary(min_size=1, max_size=20))
def test_what_nobody_asked_for(reply: bytes, extra: bytes) -> None:
    dialogue = Dialogue([b"1", b"2"], None)
    with pytest.raises(OutOfTurn):
        Dialogue([b"1"], None).received(extra)
    dialogue.next_request()
    with pytest.raises(OutOfTurn):
        dialogue.received(len(reply).to_bytes(4, "big") + reply + extra)


@given(num_requests=st.integers(1, 8), refused=st.integers(0, 8))
def test_a_refused_reply_is_the_last(num_requests: int, refused: int) -> None:
    dialogue = Dialogue([b""] * num_requests, lambda number, reply: number != refused)
    while not dialogue.is_over:
        dialogue.next_request()
        assert dialogue.received(bytes(4))
    assert len(dialogue.replies) == min(num_requests, refused + 1)


@pytest.mark.parametrize(("status", "cpu_s", "stderr", "expected"), [
    (0, 0.0, b"MemoryError", "ok"), (1, 0.0, b"", "error"), (1, 0.0, b"Traceback\nMemoryError\n", "memory"), (1, 0.0, b"MemoryError\nx", "error"),
    (-signal.SIGXCPU, 0.0, b"", "timeout"), (-signal.SIGKILL, 5.0, b"", "timeout"), (-signal.SIGKILL, 4.9, b"", "killed"),
    (-signal.SIGSEGV, 9.0, b"", "killed"), (-signal.SIGSYS, 0.0, b"", "killed")])
def test_how_an_end_is_judged(status: int, cpu_s: float, stderr: bytes, expected: str) -> None:
    assert outcome.judge(status, cpu_s, LIMITS, stderr) == expected


def test_the_server_imports_the_standard_library_alone() -> None:
    """It must start in interpreters that have nothing else, and stay small."""
    todo, seen = ["forkserver.server"], set()
    while todo:
        module = todo.pop()
        seen.add(module)
        for node in ast.walk(ast.parse((SANDBOX / f"{module.replace('.', '/')}.py").read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for name in [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]:
                if name.startswith("workers.sandbox"):
                    inside = name.removeprefix("workers.sandbox").lstrip(".")
                    folder = f"{inside}." if inside else ""
                    modules = [inside] if inside and not (SANDBOX / inside.replace(".", "/")).is_dir() else [
                        f"{folder}{alias.name}" for alias in node.names]
                    todo += [one for one in modules if one not in seen]
                else:
                    assert name.partition(".")[0] in sys.stdlib_module_names, f"{module} imports {name}"
    confinement = {f"confinement.{name}" for name in ("confine", "landlock", "seccomp", "syscall_policy", "counting", "libc", "syscalls")}
    assert confinement | {"forkserver.server", "forkserver.program", "sandbox_folders"} == seen
