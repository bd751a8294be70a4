"""Results of long benchmarks, one line of JSON each, so that an interrupted command goes on where it was."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """A file of JSON lines that grows by one record at a time; several threads may add."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.records: list[Record] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def add(self, record: Record) -> None:
        """Append, at once."""
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            self.records.append(record)


def open_folder(out: Path, settings: Record) -> None:
    """Make `out`, or see that it was begun with the same settings. Ends the program where it was not."""
    path = out / "settings.json"
    out.mkdir(parents=True, exist_ok=True)
    if path.exists() and json.loads(path.read_text()) != settings:
        raise SystemExit(f"--out {out}: its runs have other settings ({path.read_text()}) than these ({json.dumps(settings)}). Give another folder")
    path.write_text(json.dumps(settings))
