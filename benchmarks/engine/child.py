"""Starts an engine as a child process for callers that have no event loop: benchmarks and tests."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from benchmarks.children import ROOT
from workers.rollout.engines.servers.embedded.__main__ import API_KEY_VARIABLE


def command(model_path: Path, *, ready_fd: int, parent_pid: int, dtype: str = "float32", num_slots: int = 64, context_length: int = 256,
            prefill_chunk: int = 512, num_threads: int = 1, weight_version: str = "default", port: int = 0,
            seed: int | None = None, server: str = "embedded", more: Sequence[str] = ()) -> list[str]:
    """The engine's command line; `more` are options that only `server` knows."""
    seeds = [] if seed is None else ["--seed", str(seed)]
    return [sys.executable, "-m", f"workers.rollout.engines.servers.{server}", "--model-path", str(model_path), "--dtype", dtype,
            "--num-slots", str(num_slots), "--context-length", str(context_length), "--prefill-chunk", str(prefill_chunk),
            "--num-threads", str(num_threads), "--weight-version", weight_version, "--port", str(port),
            "--ready-fd", str(ready_fd), "--parent-pid", str(parent_pid), *seeds, *more]


@dataclass
class EngineChild:
    """A running engine; a context manager that ends it. `base_url` and `api_key` are what a client needs."""

    process: subprocess.Popen[bytes]
    base_url: str
    api_key: str
    errors: IO[bytes]

    @classmethod
    def start(cls, model_path: Path, **options: object) -> EngineChild:
        """Start an engine and wait until it answers. `options` are those of `command`. Raises RuntimeError with the
        engine's error output if it ends instead. Call from a thread that outlives the engine: the kernel ties them."""
        reader, writer = os.pipe()
        api_key = secrets.token_hex(16)
        environment = os.environ | {API_KEY_VARIABLE: api_key, "OMP_NUM_THREADS": str(options.get("num_threads", 1))}
        errors = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the process
        arguments = command(model_path, ready_fd=writer, parent_pid=os.getpid(), **options)  # type: ignore[arg-type]
        process = subprocess.Popen(arguments, pass_fds=[writer], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stderr=errors)
        os.close(writer)
        with os.fdopen(reader) as ready:
            line = ready.readline()
        if not line:
            process.wait()
            errors.seek(0)
            raise RuntimeError(f"the engine ended with status {process.returncode}: {errors.read().decode(errors='replace')}")
        return cls(process, f"http://127.0.0.1:{json.loads(line)['port']}", api_key, errors)

    def stop(self) -> None:
        """End the engine and wait for it."""
        self.process.terminate()
        self.process.wait()
        self.errors.close()

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
