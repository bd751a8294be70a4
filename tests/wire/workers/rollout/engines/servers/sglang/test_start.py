"""How an SGLang server is started and ended, with a stand-in for SGLang itself: the same modules and arguments, a child process, shared memory
and a log full of secrets, but no model. tests/sglang/ does the same with SGLang."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import lives
from workers.config import EngineConfig, EngineParallelConfig, Server
from workers.messages.parts import Version
from workers.rollout.engines.client import BadRequest, EngineClient, EngineError
from workers.rollout.engines.servers import process
from workers.rollout.engines.servers.process import ServerProcess, Span

LAUNCH_SERVER = '''
import http.server, json, logging, mmap, os, signal, socket, subprocess, sys, tempfile

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        allowed = self.headers["Authorization"] == "Bearer " + self.server.key
        body = json.dumps(self.server.facts).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass

def run_server(arguments):
    logging.basicConfig(level=logging.INFO, force=True)
    logging.info(f"server_args={vars(arguments)}")
    if os.environ.get("STAND_IN") == "fails":
        raise RuntimeError("CUDA out of memory")
    if os.environ.get("STAND_IN") == "kills its children":
        import psutil
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    with open(os.environ["STAND_IN_SHARED"], "w+b") as shared:
        shared.write(b"x" * 4096)
        shared.flush()
        used = mmap.mmap(shared.fileno(), 4096)
    collector = socket.socket(socket.AF_UNIX)
    collector.bind(f"{os.environ['STAND_IN_SOCKETS']}{os.getpid()}")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])  # which does not know whose it is
    server = http.server.ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    server.key = arguments.api_key
    server.facts = {"arguments": arguments.argv, "environment": dict(os.environ), "child": child.pid, "temporary": tempfile.mkdtemp()}
    server.serve_forever()
'''
SERVER_ARGS = '''
import argparse

class ServerArgs:
    tp_size: int

def prepare_server_args(argv):
    place = argv.index("--host")
    return argparse.Namespace(argv=argv, host=argv[place + 1], port=int(argv[argv.index("--port") + 1]), api_key=None)
'''


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An interpreter that has the stand-in and nothing of ours: a script around this one, as for a container."""
    packages = tmp_path / "packages"
    (packages / "sglang" / "srt").mkdir(parents=True)
    (packages / "sglang-0.5.23.dist-info").mkdir()
    (packages / "sglang-0.5.23.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    for name, content in {"__init__": "", "launch_server": LAUNCH_SERVER, "srt/__init__": "", "srt/server_args": SERVER_ARGS,
                          "srt/plugins": "def load_plugins(): pass\n"}.items():
        (packages / "sglang" / f"{name}.py").write_text(content)
    script = tmp_path / "python"
    own = f'PYTHONPATH={shlex.quote(str(packages))} exec {shlex.quote(sys.executable)} "$@"'
    script.write_text(f'#!/bin/sh\ntest -z "$PYTHONPATH" || exit 9\n{own}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "/of/this/interpreter")
    monkeypatch.setenv("STAND_IN_SHARED", f"/dev/shm/sglang_stand_in_{os.getpid()}")
    monkeypatch.setenv("STAND_IN_SOCKETS", f"/tmp/sglang_load_collector_{os.getpid()}_{tmp_path.name}_")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield script
    for path in sockets_of(tmp_path):  # where it was the one who attends to the server that was killed
        path.unlink()


def sockets_of(tmp_path: Path) -> list[Path]:
    return list(Path("/tmp").glob(f"sglang_load_collector_{os.getpid()}_{tmp_path.name}_*"))


def sglang(interpreter: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(**{"server": Server.sglang, "python": str(interpreter), "start_timeout_s": 60.0, **changes})


@asynccontextmanager
async def started(config: EngineConfig, log: Path, **options: Any) -> AsyncIterator[tuple[ServerProcess, EngineClient, dict[str, Any]]]:
    server = ServerProcess(config, Path("/models/x"), log, **options)
    client = await server.start(Version(0, 0))
    try:
        yield server, client, await client._call("GET", "/facts", None)
    finally:
        await client.close()
        await server.stop()


def is_gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        return not lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left_over(tmp_path: Path) -> list[str]:
    """What stays of servers in their temporary folders, in shared memory and in /tmp."""
    return [str(path) for path in (*tmp_path.glob("headway-sglang-*"), *Path("/dev/shm").glob(f"sglang_stand_in_{os.getpid()}"),
                                   *sockets_of(tmp_path))]


def main_of(server: ServerProcess) -> psutil.Process:
    """SGLang's main process: the only child of the one that attends to it."""
    assert server._process is not None
    (main,) = psutil.Process(server._process.pid).children()
    return main


async def test_what_it_is_started_with(interpreter: Path, tmp_path: Path) -> None:
    config = sglang(interpreter, parallel=EngineParallelConfig(tp=2, dp_attention=2), extra_args=["--disable-cuda-graph"], num_threads=3)
    async with started(config, tmp_path / "log", devices="4,5") as (server, client, facts):
        arguments, environment = facts["arguments"], facts["environment"]
        assert arguments[:2] == ["--model-path", "/models/x"] and "--disable-cuda-graph" in arguments
        assert arguments[-4:-1] == ["--host", "127.0.0.1", "--port"] and "--api-key" not in arguments
        place = arguments.index("--enable-dp-attention")
        assert arguments[place + 1: place + 3] == ["--dp-size", "2"], "this version knows the older name only"
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("4,5", "3")
        folder = Path(environment["TMPDIR"])
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700 and Path(facts["temporary"]).parent == folder
        assert environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{folder}/ranks"
        main = main_of(server)
        attendant = main.parent()
        assert attendant is not None and os.getpgid(main.pid) == main.pid == os.getpgid(facts["child"])
        assert os.getpgid(attendant.pid) == attendant.pid != os.getpgid(0)
        key = client._session.headers["Authorization"].removeprefix("Bearer ")
        for secret_free in ("\0".join(main.cmdline()), str(main.environ()), str(environment), (tmp_path / "log").read_text()):
            assert key not in secret_free
        assert "'api_key': '(hidden)'" in (tmp_path / "log").read_text()
        stranger = EngineClient(client._url, "wrong", 10.0)
        with pytest.raises(BadRequest, match="401"):
            await stranger._call("GET", "/health", None)
        await stranger.close()
        for number in (signal.SIGTERM, signal.SIGUSR2):
            main.send_signal(number)
            attendant.send_signal(number)
        assert await client.answers("/health", 10.0), "what ends a job does not end its engine"


async def test_a_server_over_several_nodes_meets_at_an_address_and_not_by_a_file(interpreter: Path, tmp_path: Path) -> None:
    span = Span(2, 1, "127.0.0.1", 4321, "127.0.0.1")
    async with started(sglang(interpreter), tmp_path / "log", span=span) as (_, _, facts):
        arguments, environment = facts["arguments"], facts["environment"]
        place = arguments.index("--nnodes")
        assert arguments[place: place + 6] == ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "127.0.0.1:4321"]
        assert {environment[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")} == {"lo"}
        assert environment["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] == "0" and "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" not in environment


@pytest.mark.parametrize("hung", [False, True])
async def test_all_of_it_ends_with_it(interpreter: Path, tmp_path: Path, hung: bool) -> None:
    async with started(sglang(interpreter), tmp_path / "log") as (server, _, facts):
        assert len(left_over(tmp_path)) == 3
        main = main_of(server)
        if hung:
            main.suspend()
        await server.stop()
        assert is_gone(main.pid) and is_gone(facts["child"]) and not left_over(tmp_path)


async def test_a_server_that_is_killed_is_told_so_and_leaves_nothing(interpreter: Path, tmp_path: Path) -> None:
    async with started(sglang(interpreter), tmp_path / "log") as (server, client, facts):
        seen = Path(f"/dev/shm/sglang_stand_in_{os.getpid()}")
        main_of(server).kill()
        assert "was killed by SIGKILL" in await asyncio.wait_for(server.exited(), 30)
        assert not await client.answers("/health", 5.0) and is_gone(facts["child"])
        assert not list(tmp_path.glob("headway-sglang-*"))
        seen.unlink(missing_ok=True)  # known only if it was there when it was looked for last


async def test_it_ends_even_if_what_attends_to_it_is_killed(interpreter: Path, tmp_path: Path) -> None:
    async with started(sglang(interpreter), tmp_path / "log") as (server, _, facts):
        main = main_of(server)
        assert server._process is not None
        server._process.kill()
        await server._process.wait()
        wait_until(lambda: is_gone(main.pid))
        psutil.Process(facts["child"]).kill()  # SGLang's own die with their parent
        Path(f"/dev/shm/sglang_stand_in_{os.getpid()}").unlink()


async def test_two_servers_have_ports_of_their_own(interpreter: Path, tmp_path: Path) -> None:
    async with started(sglang(interpreter), tmp_path / "1") as (_, one, _), started(sglang(interpreter), tmp_path / "2") as (_, other, _):
        assert one._url != other._url


WORKER = """
import asyncio, sys
from pathlib import Path
import psutil
from workers.config import EngineConfig, Server
from workers.messages.parts import Version
from workers.rollout.engines.servers.process import ServerProcess

async def work():
    server = ServerProcess(EngineConfig(server=Server.sglang, python=sys.argv[1]), Path("/models/x"), Path(sys.argv[2]))
    client = await server.start(Version(0, 0))
    print(psutil.Process(server._process.pid).children()[0].pid, (await client._call("GET", "/facts", None))["child"], flush=True)
    await asyncio.Event().wait()

asyncio.run(work())
"""


def test_nothing_is_left_of_it_when_its_worker_is_killed(interpreter: Path, tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[7])
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(interpreter), str(tmp_path / "log")], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": root})
    assert worker.stdout is not None
    main, child = map(int, worker.stdout.readline().split())
    assert len(left_over(tmp_path)) == 3
    worker.kill()
    worker.wait()
    wait_until(lambda: is_gone(main) and is_gone(child) and not left_over(tmp_path))


@pytest.mark.parametrize(("behaviour", "words"), [("fails", "CUDA out of memory"), ("kills its children", "was killed by SIGKILL")])
async def test_a_server_that_fails_at_its_start_says_why_and_leaves_nothing(
        interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, words: str) -> None:
    monkeypatch.setenv("STAND_IN", behaviour)
    with pytest.raises(EngineError, match=words) as caught:
        await ServerProcess(sglang(interpreter), Path("/models/x"), tmp_path / "log").start(Version(0, 0))
    assert "the sglang engine (process " in str(caught.value) and f"its log ({tmp_path / 'log'}) ends" in str(caught.value)
    wait_until(lambda: not left_over(tmp_path))


async def test_a_server_that_never_answers_is_ended_with_all_its_processes(interpreter: Path, tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TOLD_S", 1.0)
    monkeypatch.setattr(process, "GROUP_ENDS_S", 0.5)
    script = tmp_path / "silent"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child\nexec sleep 1000\n")
    script.chmod(0o755)
    with pytest.raises(EngineError, match=r"the sglang engine has not answered in 2 s \(engine\.start_timeout_s\)"):
        await ServerProcess(sglang(script, start_timeout_s=2.0), Path("/models/x"), tmp_path / "log").start(Version(0, 0))
    assert is_gone(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize(("python", "words"), [
    ("/no/such/python", r"engine\.python=/no/such/python: cannot be run \(No such file or directory\)"),
    (sys.executable, "exited with status 2.*engine.server=sglang: .*has no SGLang. Install SGLang 0.5.21")])
async def test_an_interpreter_without_sglang_is_told(tmp_path: Path, python: str, words: str) -> None:
    config = EngineConfig(server=Server.sglang, python=python, start_timeout_s=60.0)
    with pytest.raises(EngineError, match=f"(?s){words}"):
        await ServerProcess(config, Path("/models/x"), tmp_path / "log").start(Version(0, 0))
    assert asyncio.get_running_loop().is_running()
