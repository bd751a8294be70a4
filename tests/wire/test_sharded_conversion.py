"""Models of every family, loaded by several ranks that share them and exported again, in real processes over gloo: the same to the bit."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.unit.model_folders import FAMILIES, write_random_model

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All families, tied and not, in two files each; 53 tokens are no multiple of any number of ranks."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        for tied in (True, False):
            write_random_model(folder / f"{family}{'-tied' if tied else ''}", family, files=2, tie_word_embeddings=tied, vocab_size=53)
    return folder


@pytest.mark.parametrize(("world", "dense", "mixtures"), [(2, 3, 5), (4, 2, 6)])
def test_every_layout_loads_and_exports_every_model(folder: Path, tmp_path: Path, world: int, dense: int, mixtures: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "tests.wire.conversion_rank", str(folder)]
    deadline, processes = time.monotonic() + DEADLINE_S, []
    try:
        for rank in range(world):
            with (tmp_path / str(rank)).open("wb") as log:
                processes.append(subprocess.Popen([*command, str(rank), str(world), str(port)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                                  stdin=subprocess.DEVNULL))
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(tmp_path / str(rank)).read_text() for rank in range(world)]
    assert [process.returncode for process in processes] == [0] * world, "\n".join(logs)
    converted = [line for line in logs[0].splitlines() if " ep=" in line]
    assert len(converted) == 2 * (4 * dense + mixtures), logs[0]
