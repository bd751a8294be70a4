"""What programs can do in the sandbox, what their owner learns of them, and how all of it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.config import SandboxBackend, SandboxConfig
from workers.sandbox import sandbox as api
from workers.sandbox.confinement import probe
from workers.sandbox.forkserver.client import ServerProcess
from workers.sandbox.sandbox import Limits, Sandbox, SandboxError

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(wall_s=120.0, cpu_s=60.0, memory_mb=512, output_bytes=1 << 20, file_mb=4, num_files=64)
FAR_S = 120.0
DOUBLE = "while (request := __receive__()) is not None: __reply__(b'%d' % (2 * int(request)))"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(SandboxConfig(wall_s=FAR_S, cpu_s=60.0)) as sandbox:
        yield sandbox


@pytest.mark.parametrize(("source", "stdin", "status", "exit_code", "stdout"), [
    ("print(int(input()) * 2)", b"21", "ok", 0, b"42\n"),
    ("import sys\nprint(len(sys.stdin.buffer.read()))", b"x" * 3_000_000, "ok", 0, b"3000000\n"),
    ("print('never reads')", b"x" * 3_000_000, "ok", 0, b"never reads\n"),
    ("", b"", "ok", 0, b""),
    ("import sys\nsys.exit(3)", b"", "error", 3, b""),
    ("import sys\nsys.exit('message')", b"", "error", 1, b""),
    ("import os\nos._exit(7)", b"", "error", 7, b""),
    ("print('before')\n1 / 0", b"", "error", 1, b"before\n"),
    ("not a program", b"", "error", 1, b""),
    ("a\0b", b"", "error", 1, b""),
    ("'\ud800'", b"", "error", 1, b""),
    ("print('äöü €', '\U0001f600')", b"", "ok", 0, "äöü € \U0001f600\n".encode()),
    ("print(open('/dev/stdin').read())", b"through /dev", "ok", 0, b"through /dev\n"),
    ("import atexit\natexit.register(print, 'last')\nprint('first')", b"", "ok", 0, b"first\nlast\n"),
    ("import threading\nthreading.Thread(target=print, args=('thread',)).start()", b"", "ok", 0, b"thread\n"),
    ("import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\ndef f(n): return n and 1 + f(n - 1)\n"
     "threading.Thread(target=lambda: print(f(100000))).start()", b"", "ok", 0, b"100000\n"),
    ("import asyncio\nasync def f(): return await asyncio.to_thread(lambda: 5)\nprint(asyncio.run(f()))", b"", "ok", 0, b"5\n"),
    ("with open('a', 'w') as file: file.write('mine')\nimport os\nos.mkdir('d')\nos.rename('a', 'd/b')\nprint(open('d/b').read())\n"
     "os.remove('d/b')\nos.rmdir('d')\nprint(os.listdir())", b"", "ok", 0, b"mine\n[]\n"),
    ("import tempfile\nwith tempfile.TemporaryFile() as file: print(file.write(b'123'))", b"", "ok", 0, b"3\n"),
    ("import dataclasses, pickle, sys\n@dataclasses.dataclass\nclass A:\n    x: int\n"
     "print(pickle.loads(pickle.dumps(A(1))), __name__, sys.argv)", b"", "ok", 0, b"A(x=1) __main__ ['program']\n"),
    ("import workers", b"", "error", 1, b""),
    ("import numpy\nprint(numpy.ones(3).sum())", b"", "ok", 0, b"3.0\n"),
    ("import signal\ndef ring(*_): print('alarm'); raise SystemExit\nsignal.signal(signal.SIGALRM, ring)\n"
     "signal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass", b"", "ok", 0, b"alarm\n"),
])
def test_programs(sandbox: Sandbox, source: str, stdin: bytes, status: str, exit_code: int, stdout: bytes) -> None:
    outcome = sandbox.run(source, stdin)
    assert (outcome.status, outcome.exit_code, outcome.stdout, outcome.replies) == (status, exit_code, stdout, []), outcome.stderr
    assert bool(outcome.stderr) == (status == "error" and exit_code == 1)


def test_a_traceback_shows_the_program_alone(sandbox: Sandbox) -> None:
    outcome = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert outcome.stderr.decode().splitlines()[:3] == ["Traceback (most recent call last):", '  File "<program>", line 3, in <module>', "    f()"]
    assert str(ROOT) not in outcome.stderr.decode()


def test_programs_share_nothing(sandbox: Sandbox) -> None:
    first = sandbox.run("import builtins, json, os\nbuiltins.left = json.left = 1\nopen('left', 'w').close()\nos.environ['LEFT'] = '1'\n"
                        "print(os.getcwd())")
    second = sandbox.run("import builtins, json, os\n"
                         "print(os.getcwd(), hasattr(builtins, 'left'), hasattr(json, 'left'), os.listdir(), 'LEFT' in os.environ)")
    folder, *rest = second.stdout.decode().split()
    assert first.status == second.status == "ok"
    assert rest == ["False", "False", "[]", "False"] and folder != first.stdout.decode().strip()
    assert not Path(folder).exists()


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 1001, 200_000])
def test_output_is_cut_off_at_its_limit(sandbox: Sandbox, num_bytes: int) -> None:
    outcome = sandbox.run(f"import os\nleft = {num_bytes}\nwhile left: left -= os.write(1, b'x' * left)", limits=Limits(120.0, 60.0, 512, 1000, 1, 1))
    assert outcome.stdout == b"x" * min(num_bytes, 1000)
    assert outcome.status == ("ok" if num_bytes <= 1000 else "output")


def test_a_session(sandbox: Sandbox) -> None:
    outcome = sandbox.session(DOUBLE, (b"%d" % number for number in range(100)))
    assert (outcome.status, outcome.exit_code) == ("ok", None)
    assert outcome.replies == [b"%d" % (2 * number) for number in range(100)]
    assert sandbox.session(DOUBLE, []).status == "ok"


def test_a_session_stops_early(sandbox: Sandbox) -> None:
    asked = []

    def accept(number: int, reply: bytes) -> bool:
        asked.append((number, reply))
        return number < 2

    outcome = sandbox.session(DOUBLE, [b"1", b"2", b"3", b"4"], accept)
    assert (outcome.status, outcome.replies) == ("ok", [b"2", b"4", b"6"])
    assert asked == [(0, b"2"), (1, b"4"), (2, b"6")]


def test_large_requests_and_replies(sandbox: Sandbox) -> None:
    source = "while (request := __receive__()) is not None: __reply__(request)"
    outcome = sandbox.session(source, [b"", b"x" * 300_000, b"y"])
    assert (outcome.status, outcome.replies) == ("ok", [b"", b"x" * 300_000, b"y"])
    assert sandbox.session(source, [b"x" * 600_000, b"x" * 600_000]).status == "output", "replies count as output"


def test_an_error_in_the_owners_own_function_is_the_owners(sandbox: Sandbox) -> None:
    def accept(number: int, reply: bytes) -> bool:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        sandbox.session(DOUBLE, [b"1"], accept)
    assert sandbox.run("print(1)").status == "ok"


@pytest.mark.parametrize(("source", "status", "num_replies"), [
    ("", "error", 0),
    ("__reply__(b'1')", "error", 1),
    ("__receive__(); __reply__(b'1')", "error", 1),
    ("import os; os._exit(0)", "error", 0),
    ("1 / 0", "error", 0),
    ("import os; os.kill(os.getpid(), 9)", "killed", 0),
    ("__receive__(); __reply__(b'1'); __receive__(); raise MemoryError", "memory", 1),
    ("import os\nos.write(4, b'\\0\\0\\0\\1x\\0\\0\\0\\1y')\n__receive__()", "error", 0),
    ("import os\nos.write(4, b'x' * 1000)\nimport time; time.sleep(3600)", "timeout", 0),
    ("import os\nos.close(3); os.close(4)\nimport time; time.sleep(3600)", "timeout", 0),
    ("import os\nos.dup2(1, 4)\n__reply__(b'1')\nimport time; time.sleep(3600)", "timeout", 0),
    ("import os\nos.write(4, b'\\xff\\xff\\xff\\xff')\nwhile True: os.write(4, b'x' * 100000)", "output", 0),
    ("__receive__(); __reply__(b'1'); import time; time.sleep(3600)", "timeout", 1),
], ids=range(13))
def test_a_session_that_goes_wrong(sandbox: Sandbox, source: str, status: str, num_replies: int) -> None:
    """Whatever is on the line, it is what the program said: nothing comes from elsewhere, and nobody waits for ever."""
    limits = Limits(1.0, 60.0, 512, 1 << 20, 1, 1) if status == "timeout" else LIMITS
    outcome = sandbox.session(source, [b"1", b"2", b"3"], limits=limits)
    assert outcome.status == status, outcome
    # On a very slow machine the time may be up before the reply.
    assert len(outcome.replies) <= num_replies if status == "timeout" else len(outcome.replies) == num_replies, outcome


def test_each_request_has_its_time(sandbox: Sandbox) -> None:
    source = "import time\nwhile (request := __receive__()) is not None:\n    time.sleep(float(request))\n    __reply__(b'done')"
    outcome = sandbox.session(source, [b"0", b"3600", b"0"], request_s=2.0)
    assert outcome.status == "timeout" and len(outcome.replies) <= 1, "the first may not make it on a very slow machine"


def test_a_killed_server_is_replaced() -> None:
    with Sandbox(SandboxConfig(wall_s=FAR_S)) as sandbox:
        first = sandbox.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert sandbox.run("print(1)").stdout == b"1\n"
        assert sandbox.pid not in (None, first)


def test_a_server_killed_at_work_takes_the_program_with_it() -> None:
    """The program is run again; where that server ends too, it is nobody's fault but the machine's."""
    with Sandbox(SandboxConfig(wall_s=FAR_S)) as sandbox:
        programs = []

        def accept(number: int, reply: bytes) -> bool:
            server = psutil.Process(sandbox.pid)
            programs.extend(server.children())
            server.kill()
            return True

        with pytest.raises(SandboxError, match="failed 2 times.*SIGKILL"):
            sandbox.session("__receive__(); __reply__(b'here'); import time; time.sleep(3600)", [b"1", b"2"], accept)
        assert len(programs) == api.NUM_ATTEMPTS
        assert psutil.wait_procs(programs, timeout=60)[1] == []
        assert sandbox.run("print(1)").stdout == b"1\n"


def test_a_server_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(SandboxConfig(wall_s=FAR_S)) as sandbox:
        stopped = psutil.Process(sandbox.pid)
        stopped.suspend()
        real = sandbox._server
        assert real is not None
        monkeypatch.setattr(real, "wait", lambda deadline: ServerProcess.wait(real, 0.0))  # its time is over at once
        assert sandbox.run("print(1)").stdout == b"1\n"
        assert sandbox.pid != stopped.pid and not stopped.is_running()


OWNER = """
import sys
from workers.config import SandboxConfig
from workers.sandbox.sandbox import Sandbox

sandbox = Sandbox(SandboxConfig(wall_s=3600.0))
def accept(number, reply):
    print(sandbox.pid, sandbox._folder.path, flush=True)
    return True
sandbox.session("__receive__(); __reply__(b'here'); import time; time.sleep(3600)", [b"1", b"2"], accept)
"""


def test_nothing_outlives_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid, base = owner.stdout.readline().decode().split()
    server = psutil.Process(int(pid))
    processes = [server, *server.children(recursive=True)]
    assert len(processes) == 2 and Path(base).exists()
    owner.kill()
    owner.communicate(timeout=60)
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert not Path(base).exists()


def test_what_is_left_of_those_that_were_killed_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Owner and server at once: nobody is left to clean up. Sandboxes that live keep what is theirs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"headway-sandbox-{socket.gethostname()}-file").touch()
    with Sandbox(SandboxConfig(wall_s=FAR_S)) as living:
        owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
        assert owner.stdout is not None
        pid, base = owner.stdout.readline().decode().split()
        server = psutil.Process(int(pid))
        for process in (server, owner):
            process.suspend() if isinstance(process, psutil.Process) else process.send_signal(signal.SIGSTOP)
        server.kill()
        owner.kill()
        owner.communicate(timeout=60)
        assert Path(base).exists()
        with Sandbox(SandboxConfig(wall_s=FAR_S)):
            assert not Path(base).exists()
            assert living.run("open('x', 'w').close()").status == "ok"
    assert [path.name for path in tmp_path.iterdir()] == [f"headway-sandbox-{socket.gethostname()}-file"]


def test_threads_take_turns(sandbox: Sandbox) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda number=number: found.append(sandbox.run(f"print({number})").stdout)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAR_S)
    assert sorted(found) == [b"%d\n" % number for number in range(8)]


def test_a_closed_sandbox_says_so() -> None:
    sandbox = Sandbox(SandboxConfig())
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("")


def test_another_interpreter_that_is_none() -> None:
    with pytest.raises(SandboxError, match="sandbox.python.*does not run"):
        Sandbox(SandboxConfig(python="/bin/true"))


def test_more_memory_than_this_process_may_have() -> None:
    code = ("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\nfrom workers.config import SandboxConfig\n"
            "from workers.sandbox.sandbox import Sandbox\nSandbox(SandboxConfig(memory_mb=2048))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=FAR_S)
    assert "sandbox.memory_mb=2048: this process itself may take only 1024 MiB" in done.stderr


def test_without_a_process_it_is_tried_again_and_then_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real, errors = api.ServerProcess, [BlockingIOError(11, "Resource temporarily unavailable")]

    def start(*given: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*given)

    with Sandbox(SandboxConfig(wall_s=FAR_S)) as sandbox:
        sandbox._end_server()
        monkeypatch.setattr(api, "ServerProcess", start)
        assert sandbox.run("print(1)").stdout == b"1\n" and not errors
        sandbox._end_server()
        errors += [OSError(12, "Cannot allocate memory")] * api.NUM_ATTEMPTS
        with pytest.raises(SandboxError, match="failed 2 times .*Cannot allocate memory.*out of memory or processes"):
            sandbox.run("print(1)")


def test_bubblewrap_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a kernel without Landlock."""
    machine = probe.probe(SandboxBackend.bubblewrap)
    if not machine.bubblewrap:
        pytest.skip("no bubblewrap that works here")
    monkeypatch.setattr(probe, "probe", lambda _: dataclasses.replace(machine, landlock=0))
    (tmp_path / "secret").write_text("secret")
    source = f"""
import os
for path in ("/etc/passwd", "/proc/1/environ", {str(tmp_path / "secret")!r}, {str(ROOT / "README.md")!r}):
    try:
        print(open(path).read())
    except FileNotFoundError:
        print("refused")
print(os.listdir(".."))
open("../left", "w").close()
"""
    with Sandbox(SandboxConfig(wall_s=FAR_S)) as sandbox:
        server = psutil.Process(sandbox.pid)
        processes = [server, *server.children(recursive=True)]
        for _ in range(2):
            outcome = sandbox.run(source)
            assert outcome.stdout.decode().splitlines()[:4] == ["refused"] * 4, outcome
            assert len(outcome.stdout.decode().splitlines()[4].split(",")) == 1, "nothing is left of the first"
        assert sandbox.session(DOUBLE, [b"1"]).replies == [b"2"]
        assert sandbox.run("while True: pass", limits=Limits(1.0, 1.0, 512, 1000, 1, 1)).status == "timeout"
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def test_replies_are_bytes_and_nothing_else(sandbox: Sandbox) -> None:
    """What looks like a message of the server's is a reply like any other."""
    fake = json.dumps({"kind": "ended", "status": 0, "cpu_s": 0.0}).encode()
    outcome = sandbox.session(f"__receive__(); __reply__({fake!r}); __receive__(); 1 / 0", [b"1", b"2"])
    assert (outcome.status, outcome.replies) == ("error", [fake])
