"""Starts engines for the tests. SGLang runs in an environment of its own, whose interpreter HEADWAY_SGLANG_PYTHON names (`make test-sglang`)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine.child import EngineChild
from tests.conformance.endpoint import Endpoint
from tests.conformance.models import CONTEXT, MIXTURES, write_pair
from workers.rollout.engines.servers.process import SGLANG_START, TELL_ROUTING

SGLANG = os.environ.get("HEADWAY_SGLANG_PYTHON", "")
sglang_here = pytest.mark.skipif(not SGLANG, reason="SGLang has an environment of its own: make test-sglang")
NUM_SLOTS = 8
START_S, END_S = 240.0, 30.0
DEVICE = os.environ.get("HEADWAY_SGLANG_DEVICE", "cpu")
"""With cuda the server is what it is on a cluster, CUDA graphs among it (make gpu)."""
CPU = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def start_embedded(folder: Path, **options: object) -> EngineChild:
    """An embedded engine with 8 slots."""
    defaults = {"num_slots": NUM_SLOTS, "context_length": CONTEXT, "prefill_chunk": 32, "weight_version": "first"}
    return EngineChild.start(folder, **(defaults | options))


@contextlib.contextmanager
def embedded(work: Path, family: str) -> Iterator[Endpoint]:
    """An embedded engine that serves a model of `family`."""
    first, second = write_pair(work, family)
    with start_embedded(first, more=[TELL_ROUTING]) as child:
        yield Endpoint("embedded", child.base_url, child.api_key, first, second, child.process.pid)


@contextlib.contextmanager
def sglang(work: Path, family: str) -> Iterator[Endpoint]:
    """An SGLang server, on the CPU unless DEVICE says otherwise, that serves a model of `family`, started as a worker starts it; it takes about
    20 s, and 1.5 GB."""
    first, second = write_pair(work, family)
    flags = ["--model-path", str(first), "--device", DEVICE, "--dtype", "float32", "--weight-version", "first", "--max-total-tokens", "32768",
             "--max-running-requests", str(NUM_SLOTS), "--mem-fraction-static", "0.8", "--sleep-on-idle", "--skip-server-warmup",
             *([TELL_ROUTING] if family in MIXTURES else [])]
    key, log = secrets.token_hex(16), work / "sglang.log"
    reader, writer = os.pipe()
    with log.open("wb") as output, os.fdopen(reader) as ready:
        process = subprocess.Popen([SGLANG, str(SGLANG_START), "--ready-fd", str(writer), "--", *flags], pass_fds=[writer], process_group=0,
                                   env=os.environ | (CPU if DEVICE == "cpu" else {}), stdin=subprocess.PIPE, stdout=output, stderr=output)
        os.close(writer)
        assert process.stdin is not None
        process.stdin.write(f"{key}\n".encode())
        process.stdin.flush()
        line = ready.readline()
    try:
        url = f"http://127.0.0.1:{json.loads(line)['port']}" if line else ""
        _wait(process, url, log)
        yield Endpoint("sglang", url, key, first, second, process.pid)
    finally:
        process.stdin.close()  # so it is told to end, and to leave nothing of it behind
        process.wait(END_S)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError, ValueError), urllib.request.urlopen(f"{url}/health", timeout=30):
            return
        time.sleep(0.2)
    raise RuntimeError(f"SGLang does not answer. Its log ends:\n{log.read_text(errors='replace')[-3000:]}")
