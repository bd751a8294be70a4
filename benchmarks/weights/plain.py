"""The limit for benchmarks.weights: plain TCP streams, and nothing but what cannot be left out.

    python -m benchmarks.weights.plain serve FOLDER PARENT       files --sendfile--> connection
    python -m benchmarks.weights.plain receive PARENT            connection --> buffer --digest--> pwrite: file, its memory reserved first
                                                                 connections --> buffers, and nothing else: what iperf3 measures

A connection says which part of how many it takes, and brings that of each file, back to back; sizes are known. Every chunk is hashed (BLAKE3) while
it is in the cache and written into its place: by the receiving thread itself, or by a second one beside it (`threads`). Reading into the mapped
file instead saves a copy but takes a page fault for every 4 KiB, and came out slower.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3

from benchmarks.children import answer_orders

BUFFERS = 2


def serve(folder: Path) -> None:
    """Send the files of `folder`, in the order of their names, to whoever connects."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    sent = 0

    def send(connection: socket.socket) -> None:
        nonlocal sent
        with connection:
            part, parts = connection.recv(2, socket.MSG_WAITALL)
            for path in sorted(folder.iterdir()):
                start, end = part_of(path.stat().st_size, part, parts)
                with path.open("rb") as file:
                    sent += connection.sendfile(file, start, end - start) if end > start else 0

    def accept() -> None:
        while True:
            threading.Thread(target=send, args=[listener.accept()[0]], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    answer_orders(lambda order: {"bytes_sent": sent}, port=listener.getsockname()[1])


def part_of(size: int, part: int, parts: int) -> tuple[int, int]:
    """Where that part of so many bytes begins, and ends."""
    return size * part // parts, size * (part + 1) // parts


def connect(port: int, part: int = 0, parts: int = 1) -> socket.socket:
    """A connection that brings that part."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(bytes([part, parts]))
    return connection


def take(order: dict[str, Any]) -> dict[str, Any]:
    """Receive files of `sizes` from `port` over so many `streams` at once, each by a thread, and forget them."""
    started, streams = time.perf_counter(), order["streams"]

    def one(part: int) -> None:
        buffer, left = memoryview(bytearray(order["chunk_bytes"])), sum(end - start for start, end in (
            part_of(size, part, streams) for size in order["sizes"].values()))
        with connect(order["port"], part, streams) as connection:
            while left:
                left -= len(_filled(connection, buffer[: min(left, len(buffer))]))

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(one, range(streams)))
    return {"seconds": time.perf_counter() - started}


def receive(order: dict[str, Any]) -> dict[str, Any]:
    """Fetch files of `sizes` (name: bytes) from `port` into the new folder `folder`; the digest is over the chunks' digests."""
    started, folder, chunk_bytes = time.perf_counter(), Path(order["folder"]), order["chunk_bytes"]
    folder.mkdir()
    digests: list[bytes] = []
    buffers = [memoryview(bytearray(chunk_bytes)) for _ in range(order["threads"] if order["threads"] == 1 else BUFFERS)]

    def place(descriptor: int, offset: int, content: memoryview) -> None:
        digests.append(blake3(content).digest())
        assert os.pwrite(descriptor, content, offset) == len(content)

    with connect(order["port"]) as connection:
        for name, size in sorted(order["sizes"].items()):
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if size:
                    os.posix_fallocate(descriptor, 0, size)
                if order["threads"] == 1:
                    for offset in range(0, size, chunk_bytes):
                        place(descriptor, offset, _filled(connection, buffers[0][: min(chunk_bytes, size - offset)]))
                else:
                    _with_a_second_thread(connection, size, buffers, lambda *each: place(descriptor, *each))  # noqa: B023 -- within this turn
            finally:
                os.close(descriptor)
    return {"seconds": time.perf_counter() - started, "digest": blake3(b"".join(digests)).hexdigest()}


def _filled(connection: socket.socket, buffer: memoryview) -> memoryview:
    done = 0
    while done < len(buffer):
        got = connection.recv_into(buffer[done:], 0, socket.MSG_WAITALL)
        assert got, "the sender has closed"
        done += got
    return buffer


def _with_a_second_thread(connection: socket.socket, size: int, buffers: list[memoryview], place: Any) -> None:
    free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[int, memoryview, memoryview] | None] = queue.SimpleQueue()
    for buffer in buffers:
        free.put(buffer)

    def work() -> None:
        while (item := full.get()) is not None:
            offset, content, buffer = item
            place(offset, content)
            free.put(buffer)

    worker = threading.Thread(target=work)
    worker.start()
    for offset in range(0, size, len(buffers[0])):
        buffer = free.get()
        full.put((offset, _filled(connection, buffer[: min(len(buffer), size - offset)]), buffer))
    full.put(None)
    worker.join()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]))
    else:
        answer_orders(lambda order: take(order) if "streams" in order else receive(order))
