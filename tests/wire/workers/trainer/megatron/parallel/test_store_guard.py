"""The store of a gang takes connections from the gang's nodes alone. Every address of 127/8 is this machine's: each stands for a node."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from workers.trainer.megatron.parallel import store_guard

ADDRESS, RANK, STRANGER = "127.0.0.1", "127.0.0.2", "127.0.0.3"
PATIENCE_S = 30.0
ROOT = Path(__file__).resolve().parents[6]


def connect(port: int, source: str, timeout_s: float = PATIENCE_S) -> bytes:
    with socket.create_connection((ADDRESS, port), timeout_s, source_address=(source, 0)) as connection:
        return connection.recv(1)


def test_only_ranks_that_have_signed_reach_the_store(tmp_path: Path) -> None:
    roster = tmp_path / "roster"
    roster.mkdir()
    store_guard.sign(roster, 1, (ADDRESS, 9))
    assert (roster / "1").read_text() == ADDRESS, "that is where a connection to it comes from"
    (roster / "2").write_text(RANK)
    listener = store_guard.reserve(ADDRESS)
    port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        connect(port, RANK)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((ADDRESS, port))
    store_guard.listen(listener, store_guard.signed(roster, 3, PATIENCE_S), 16)

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"!")

    with listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TimeoutError):
            connect(port, STRANGER, 0.2)
        assert connect(port, RANK) == connect(port, ADDRESS) == b"!"
        thread.join()
        with pytest.raises(OSError, match=r".*"):
            listener.setsockopt(socket.SOL_SOCKET, 27, 0)  # SO_DETACH_FILTER


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    (tmp_path / "2").write_text(RANK)
    with pytest.raises(TimeoutError, match="ranks 1, 3 have not come"):
        store_guard.signed(tmp_path, 4, 0.0)


ALONE = """
import os, socket
from workers.trainer.megatron.parallel import process_group, store_guard
with socket.create_server(("127.0.0.1", 0)) as other:  # of somebody else in this process
    process_group.initialize()
    for descriptor in store_guard.listening().values():
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            print(listener.getsockname()[1], listener.getsockname() == other.getsockname(), flush=True)
    print("all", flush=True)
    input()
    process_group.close()
"""


def test_nobody_speaks_to_the_gloo_of_a_single_rank() -> None:
    """It keeps every connection that it has taken, and aborts the process when there are no descriptors left."""
    with subprocess.Popen([sys.executable, "-c", ALONE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alone:
        assert alone.stdout is not None and alone.stdin is not None
        listeners = [line.split() for line in iter(alone.stdout.readline, "all\n")]
        assert len(listeners) > 2 and [others for _, others in listeners].count("True") == 1
        for port, others in listeners:
            if others == "True":
                socket.create_connection((ADDRESS, int(port)), PATIENCE_S).close()
            else:
                with pytest.raises(TimeoutError):
                    socket.create_connection((ADDRESS, int(port)), 0.2)
        alone.stdin.write("\n")
    assert alone.returncode == 0
