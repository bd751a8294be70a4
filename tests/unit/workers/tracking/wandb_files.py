"""What W&B has written without its server: a log in LevelDB's format of protocol buffers (wandb/core/pkg/leveldb)."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, START, HEADER = 32768, 7, 7
FULL, LAST = 1, 4
WRITTEN_S = 60


def histories(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each run in RUN/tracking has been told, by its id, line by line and in its order."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        records, deadline = [Record()], time.monotonic() + WRITTEN_S
        while not records or records[-1].WhichOneof("record_type") != "exit":
            assert time.monotonic() < deadline, f"{path}: W&B's own process has not written all of it in {WRITTEN_S} s"
            time.sleep(0.02)
            records = list(map(Record.FromString, _records(path.read_bytes())))
        for record in records:
            if record.WhichOneof("record_type") == "history":
                line = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
                found.setdefault(path.stem.removeprefix("run-"), []).append(line)
    return found


def _records(log: bytes) -> Iterator[bytes]:
    assert log[:4] in (b":W&B", b""), log[:START]
    place, parts = START, b""
    while place + HEADER <= len(log):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, place)
        if place + HEADER + length > len(log):
            return  # it is being written
        parts += log[place + HEADER:place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""
