"""The inference server as a child process of the rollout worker: started, waited for, watched, ended.

    worker --spawn--> python -m workers.rollout.servers.<name> ...   (loopback only, API key in its environment)
           <--pipe--- {"port": N} once it answers
The child dies with its parent. Its output goes to a log whose end stands in the error if it fails. The signals by which SLURM
tells a job to end reach every process of it on some clusters (ProctrackType): the child has them blocked, so that the worker
can still collect what is being generated; `stop` kills it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from pathlib import Path

from workers.config import EngineConfig, Server
from workers.messages.types import Version
from workers.processes import describe_exit
from workers.rollout.engine_client import EngineClient, EngineError
from workers.rollout.servers.embedded.__main__ import API_KEY_VARIABLE

FOR_THE_WORKER = (signal.SIGTERM, signal.SIGUSR2)
LOG_LINES = 15


class ServerProcess:
    """One running server. Use `start`, then `client`; `exited` says how it died; `stop` ends it."""

    def __init__(self, config: EngineConfig, model_folder: Path, log: Path) -> None:
        self._config, self._model_folder, self._log = config, model_folder, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, version: Version) -> EngineClient:
        """Start the server with the weights of the model folder, named `version`; returns a client once it answers.

        Raises `EngineError` with the end of its log if it dies, or does not answer in `engine.start_timeout_s`.
        """
        api_key = secrets.token_hex(32)
        read_end, write_end = os.pipe()
        threads = str(self._config.num_threads)
        environment = {**os.environ, API_KEY_VARIABLE: api_key, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_WORKER)  # which the child inherits
        try:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(version, write_end), env=environment, pass_fds=[write_end],
                    stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(write_end)
        port = await self._port(read_end)
        return EngineClient(f"http://127.0.0.1:{port}", api_key, self._config.request_timeout_s)

    def _command(self, version: Version, ready_fd: int) -> list[str]:
        config = self._config
        synthetic = ["--tokens-per-s", str(config.synthetic_tokens_per_s), "--mean-tokens", str(config.synthetic_mean_tokens)]
        return [
            sys.executable, "-m", f"workers.rollout.servers.{config.server.value}", "--model-path", str(self._model_folder),
            "--dtype", config.dtype.value, "--num-slots", str(config.num_slots), "--context-length", str(config.context_length),
            "--prefill-chunk", str(config.prefill_chunk), "--num-threads", str(config.num_threads), "--weight-version", str(version),
            "--port", "0", "--ready-fd", str(ready_fd), "--parent-pid", str(os.getpid()),
            *(synthetic if config.server is Server.synthetic else [])]

    async def _port(self, read_end: int) -> int:
        reader = asyncio.StreamReader()
        with os.fdopen(read_end, "rb") as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
            try:
                async with asyncio.timeout(self._config.start_timeout_s):
                    line = await reader.readline()
            except TimeoutError as error:
                await self.stop()
                raise EngineError(f"the {self._config.server.value} engine has not answered in {self._config.start_timeout_s:g} s "
                                  f"(engine.start_timeout_s){self._log_end()}") from error
            finally:
                transport.close()
        if not line:
            raise EngineError(await self.exited())
        return int(json.loads(line)["port"])

    async def exited(self) -> str:
        """Wait until the process is gone; says how, with the end of its log."""
        assert self._process is not None
        how = describe_exit(await self._process.wait())
        return f"the {self._config.server.value} engine (process {self._process.pid}) {how}{self._log_end()}"

    async def exited_within(self, timeout_s: float) -> str | None:
        """How the process ended, if it does so within `timeout_s` seconds; else None."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.exited()
        except TimeoutError:
            return None

    async def stop(self) -> None:
        """End the process: it has nothing to save, so it is killed."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _log_end(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return f"; its log ({self._log}) is empty" if not lines else f"; its log ({self._log}) ends:\n  " + "\n  ".join(lines)
