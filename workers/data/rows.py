"""Rows of files as dictionaries: JSON lines, a JSON array, Parquet, Arrow. Files are read as a stream, a batch of rows at a time.

Whatever cannot be read is refused with file and line (JSON lines) or row (the others, counted from 1).
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from workers.config import ConfigError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")
MAX_ROW_MIB = 64
_BATCH = 64
_BOM = b"\xef\xbb\xbf"
_COPY = "Copy the file again (in a git clone: git lfs pull)"


@dataclass(frozen=True)
class Row:
    """One row: its columns, `place` for error messages, and `name`, unique within its file."""

    place: str
    name: str
    columns: dict[str, Any]


def suffix(path: Path) -> str:
    """The ending of a data file's name, one of `SUFFIXES`, or ''."""
    return next((ending for ending in SUFFIXES if path.name.endswith(ending)), "")


def read_rows(path: Path, key: str) -> Iterator[Row]:
    """The rows of `path`, read by its ending; JSON lines if it has another. `key` names the config key in errors. Raises `ConfigError`."""
    read = {".parquet": _parquet, ".arrow": _arrow}.get(suffix(path), _json)
    try:
        yield from read(path)
    except (OSError, EOFError, zlib.error) as error:  # the consumer's own errors do not pass here
        raise ConfigError(f"{key}={str(path)!r}: not readable ({getattr(error, 'strerror', None) or error}). Give a file of rows") from error


def _json(path: Path) -> Iterator[Row]:
    with _opened(path) as file:
        start = file.peek(4).removeprefix(_BOM).lstrip()[:1]  # type: ignore[attr-defined]
        if suffix(path) == ".json" and start in (b"[", b""):
            yield from _array(path, file.read())
            return
        for number, line in enumerate(iter(lambda: file.readline((MAX_ROW_MIB << 20) + 1), b""), start=1):
            place = f"{path}:{number}"
            if len(line) > MAX_ROW_MIB << 20:
                raise ConfigError(f"{place}: the line has more than {MAX_ROW_MIB} MiB; it must be one row. End each row with a newline")
            line = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if line:
                yield Row(place, f"line/{number}", _object(line, place))


def _opened(path: Path) -> BinaryIO:
    return io.BufferedReader(gzip.open(path)) if path.name.endswith(".gz") else path.open("rb")  # type: ignore[arg-type]


def _array(path: Path, content: bytes) -> Iterator[Row]:
    """One JSON array of objects, as some data sets are published."""
    try:
        rows = msgspec.json.decode(content.removeprefix(_BOM), type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}. A .json file must be an array of objects, or have one object a line") from error
    for number, row in enumerate(rows, start=1):
        place = f"{path}: row {number}"
        yield Row(place, f"row/{number}", _object(row, place))


def _object(text: bytes | msgspec.Raw, place: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any], strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}. A row must be a JSON object like " '{"prompt": "1 + 1 =", "answer": 2}') from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # where such files are read only
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _batches(path, file.iter_batches(batch_size=_BATCH))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: not a readable Parquet file ({error}). {_COPY}") from error


def _arrow(path: Path) -> Iterator[Row]:
    """Arrow's stream format, as `datasets` writes it, or its file format."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.OSFile(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_file:
                with pyarrow.ipc.open_file(file) as reader:
                    yield from _batches(path, (reader.get_batch(number) for number in range(reader.num_record_batches)))
            else:
                with pyarrow.ipc.open_stream(file) as stream:
                    yield from _batches(path, stream)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: not a readable Arrow file ({error}). {_COPY}") from error


def _batches(path: Path, batches: Any) -> Iterator[Row]:
    number = 0
    for whole in batches:
        for start in range(0, whole.num_rows, _BATCH):
            batch = whole.slice(start, _BATCH)
            for columns in _columns(path, batch, number):
                number += 1
                yield Row(f"{path}: row {number}", f"row/{number}", columns)


def _columns(path: Path, batch: Any, before: int) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            raise ConfigError(f"{path}: row {before + 1}: {error}. Text must be UTF-8") from error
    return [row for offset in range(batch.num_rows) for row in _columns(path, batch.slice(offset, 1), before + offset)]
