"""The inference server as a child process of the rollout worker: started, waited for, watched, ended.

    worker --spawn--> python -m workers.rollout.engines.servers.<name> ...     (loopback only, API key in its environment)
                  or  ENGINE.PYTHON .../servers/sglang/start.py ...    (the same, API key by stdin)
           <--pipe--- {"port": N}
           --HTTP---> the same probe as later on, until it answers
It leads a process group of its own, and all of it ends with its leader, which ends with its parent. Its output goes to a log whose end stands
in the error if it fails. The signals by which SLURM tells a job to end reach every process of it on some clusters (ProctrackType): the
child has them blocked, so that the worker can still collect what is being generated; `stop` kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.config import EngineConfig, Server
from workers.messages.parts import Version
from workers.rollout.engines.client import EngineClient, EngineError
from workers.rollout.engines.servers.embedded.__main__ import API_KEY_VARIABLE
from workers.rollout.engines.servers.sglang import options
from workers.run.gpus import environment_of
from workers.run.processes import describe_exit
from workers.transport.addresses import interface_of

FOR_THE_WORKER = (signal.SIGTERM, signal.SIGUSR2)
LOG_LINES = 15
LOG_BYTES = 1 << 20
GROUP_ENDS_S = 5.0
"""So long the other processes of a server may take to follow their leader, before they are killed."""
READY_S = 30.0
PROBES = {Server.embedded: "/model_info", Server.synthetic: "/model_info", Server.sglang: "/health_generate"}
"""What the part of a server answers that computes, not only the one that listens."""
TOLD_S = 30.0
"""So long what attends to an SGLang server may take to remove all that is left of it."""
POLL_S = 0.05
TELL_ROUTING = "--enable-return-routed-experts"
"""Has a server of either kind keep which experts it chose for each token."""
SGLANG_START = Path(__file__).parent / "sglang" / "start.py"


@dataclass(frozen=True)
class Span:
    """A node's part in a server over several: `rank` of `num_nodes`. All meet at `address`:`port`, of the first; `own`: this node's address."""

    num_nodes: int
    rank: int
    address: str
    port: int
    own: str

    @property
    def flags(self) -> list[str]:
        """What servers are told of it."""
        return ["--nnodes", str(self.num_nodes), "--node-rank", str(self.rank), "--dist-init-addr", f"{self.address}:{self.port}"]


class ServerProcess:
    """One running server. Use `start`, then its client; `exited` says how it died; `stop` ends it. `devices`: its CUDA_VISIBLE_DEVICES
    (None: as it is). `span`: where it is one node's part of a server; only the first one's answers, the others' are begun by `launch`.
    `tells_routing`: it may be asked which experts it chose."""

    def __init__(self, config: EngineConfig, model_folder: Path, log: Path, devices: str | None = None, span: Span | None = None,
                 tells_routing: bool = False) -> None:
        self.span = span
        self._config, self._model_folder, self._log, self._devices = config, model_folder, log, devices
        self._told = [TELL_ROUTING] if tells_routing else []
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._stopped = False

    async def start(self, version: Version) -> EngineClient:
        """Start the server with the weights of the model folder, named `version`; returns a client once it answers.

        Raises `EngineError` with the end of its log if it dies, or does not answer in `engine.start_timeout_s`.
        """
        api_key, client = secrets.token_hex(32), None
        try:
            ready = await self._spawn(version, api_key)
            async with asyncio.timeout(self._config.start_timeout_s):
                port = await self._port(ready)
                client = EngineClient(f"http://127.0.0.1:{port}", api_key, self._config.request_timeout_s)
                await self._answers(client)
                return client
        except BaseException as error:
            if client is not None:
                await client.close()
            await self.stop()
            if isinstance(error, TimeoutError):
                raise EngineError(f"{self._name} has not answered in {self._config.start_timeout_s:g} s (engine.start_timeout_s)"
                                  f"{self._log_end()}") from error
            raise

    async def launch(self, version: Version) -> None:
        """Start it, and wait for no answer. Raises `EngineError` where it ends before it has a port."""
        await self._port(await self._spawn(version, secrets.token_hex(32)))

    @property
    def _name(self) -> str:
        return f"the {self._config.server.value} engine"

    async def _spawn(self, version: Version, api_key: str) -> int:
        """Start the process; returns the file descriptor from which its port will be read."""
        read_end, write_end = os.pipe()
        by_stdin = self._config.server is Server.sglang
        try:
            with self._log.open("ab") as log, _signals_blocked():  # which the child inherits
                self._log_start = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(version, write_end), env=self._environment(api_key), pass_fds=[write_end], process_group=0,
                    stdin=asyncio.subprocess.PIPE if by_stdin else asyncio.subprocess.DEVNULL, stdout=log, stderr=log)
        except BaseException as error:
            os.close(read_end)
            if isinstance(error, OSError):
                raise EngineError(f"engine.python={self._config.python}: cannot be run ({error.strerror}). Give the interpreter of an "
                                  "environment that has SGLang") from error
            raise
        finally:
            os.close(write_end)
        if by_stdin:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{api_key}\n".encode())  # and stays open: its end tells the server ours
        return read_end

    def _command(self, version: Version, ready_fd: int) -> list[str]:
        config, span = self._config, self.span.flags if self.span else []
        if config.server is Server.sglang:
            return [config.python or sys.executable, str(SGLANG_START), "--ready-fd", str(ready_fd), "--",
                    *options.flags(config, self._model_folder, version), *span, *self._told]
        synthetic = ["--tokens-per-s", str(config.synthetic_tokens_per_s), "--mean-tokens", str(config.synthetic_mean_tokens)]
        return [
            sys.executable, "-m", f"workers.rollout.engines.servers.{config.server.value}", "--model-path", str(self._model_folder),
            "--dtype", config.dtype.value, "--num-slots", str(config.num_slots), "--context-length", str(config.context_length),
            "--prefill-chunk", str(config.prefill_chunk), "--num-threads", str(config.num_threads), "--weight-version", str(version),
            "--port", "0", "--ready-fd", str(ready_fd), "--parent-pid", str(os.getpid()),
            *(synthetic if config.server is Server.synthetic else self._told), *span]

    def _environment(self, api_key: str) -> dict[str, str]:
        threads = str(self._config.num_threads)
        changes = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if self._devices is not None:
            changes["CUDA_VISIBLE_DEVICES"] = self._devices
        if self.span is not None:
            changes |= {name: os.environ.get(name, interface_of(self.span.own)) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        if self._config.server is not Server.sglang:
            return {**os.environ, **changes, API_KEY_VARIABLE: api_key}
        return environment_of(self._config.python) | changes

    async def _port(self, read_end: int) -> int:
        reader = asyncio.StreamReader()
        with os.fdopen(read_end, "rb") as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
            try:
                line = await reader.readline()
            finally:
                transport.close()
        if not line:
            raise EngineError(await self.exited())
        return int(json.loads(line)["port"])

    async def _answers(self, client: EngineClient) -> None:
        """Wait until the server is ready to serve. Raises `EngineError` if it dies before."""
        exited = asyncio.create_task(self.exited())
        try:
            while not await client.answers(PROBES[self._config.server], READY_S):
                if exited.done():
                    raise EngineError(exited.result())
                await asyncio.wait([exited], timeout=POLL_S)
        finally:
            exited.cancel()

    async def exited(self) -> str:
        """Wait until the process is gone; says how, with the end of its log."""
        assert self._process is not None
        how = describe_exit(await self._process.wait())
        return f"{self._name} (process {self._process.pid}) {how}{self._log_end()}"

    async def exited_within(self, timeout_s: float) -> str | None:
        """How the process ended, if it does so within `timeout_s` seconds; else None."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.exited()
        except TimeoutError:
            return None

    async def stop(self) -> None:
        """End the process and all that it has started: there is nothing to save, so it is killed. Once more is nothing."""
        if (process := self._process) is None or self._stopped:
            return
        if process.stdin is not None:  # it is told to end, and leaves nothing
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TOLD_S):
                    await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        await _end_group(process.pid)
        self._stopped = True

    def _log_end(self) -> str:
        with self._log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        return f"; its log ({self._log}) is empty" if not lines else f"; its log ({self._log}) ends:\n  " + "\n  ".join(lines)


_starting: list[set[int]] = []


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block `FOR_THE_WORKER`. Servers of one worker are started at the same time: the last one to leave this lets them through again."""
    _starting.append(_starting[0] if _starting else set(signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_WORKER)))
    try:
        yield
    finally:
        mask = _starting.pop()
        if not _starting:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


async def _end_group(group: int) -> None:
    """Wait until no process of the group is left; kill what does not go by itself."""
    deadline, killed = time.monotonic() + GROUP_ENDS_S, False
    with contextlib.suppress(ProcessLookupError):
        while not killed or time.monotonic() < deadline:
            os.killpg(group, 0)
            if not killed and time.monotonic() > deadline:
                os.killpg(group, signal.SIGKILL)
                deadline, killed = time.monotonic() + GROUP_ENDS_S, True
            await asyncio.sleep(POLL_S)
