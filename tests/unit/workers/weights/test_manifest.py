"""Manifests: chunks tile every file, equal content has equal digests, and what contradicts itself is refused. (What `verify` catches in a
published version: tests/unit/workers/weights/test_publisher.py.)"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.messages.parts import Version
from workers.run.digests import digest_of
from workers.weights.manifest import MANIFEST, FileEntry, Manifest, WeightsError, describe_files, make_manifest, verify, write_manifest

VERSION = Version(3, 14)
DIGEST = "0" * 64


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(contents=st.lists(st.binary(max_size=50), min_size=1, max_size=4), chunk_bytes=st.integers(1, 20), threads=st.integers(1, 3))
def test_chunks_tile_every_file(tmp_path: Path, contents: list[bytes], chunk_bytes: int, threads: int) -> None:
    names = [f"file-{number}" for number in range(len(contents))]
    for name, content in zip(names, contents, strict=True):
        (tmp_path / name).write_bytes(content)
    manifest = Manifest(VERSION, chunk_bytes, describe_files(tmp_path, names, chunk_bytes, 0, threads))
    chunks = manifest.chunks()
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    for name, content in zip(names, contents, strict=True):
        own = [chunk for chunk in chunks if chunk.name == name]
        assert b"".join(content[chunk.offset: chunk.offset + chunk.size] for chunk in own) == content
        assert all(blake3(content[chunk.offset: chunk.offset + chunk.size]).hexdigest() == chunk.digest for chunk in own)
        assert all(chunk.offset == chunk.index * chunk_bytes and 0 < chunk.size <= chunk_bytes for chunk in own)
    assert manifest.size == sum(map(len, contents))
    assert Manifest.decode(manifest.encode()) == manifest


def test_the_parts_of_several_sources_make_one_manifest(tmp_path: Path) -> None:
    entries: list[FileEntry] = []
    for source in (0, 1):
        (tmp_path / f"rank-{source}").write_bytes(b"%d" % source * 10)
        entries += describe_files(tmp_path, [f"rank-{source}"], 4, source)
    digest = write_manifest(tmp_path, Manifest(VERSION, 4, entries))
    assert [chunk.source for chunk in verify(tmp_path, VERSION, digest).chunks()] == [0, 0, 0, 1, 1, 1]


def test_the_first_wrong_chunk_is_named(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(100))
    digest = make_manifest(tmp_path, VERSION, chunk_bytes=10)
    verify(tmp_path, VERSION, digest, threads=3)
    (tmp_path / "shard").write_bytes(bytes(35) + b"x" + bytes(64))
    with pytest.raises(WeightsError, match=r"shard: not the announced content \(chunks 3 of 10\)"):
        verify(tmp_path, VERSION, digest)
    (tmp_path / "shard").write_bytes(bytes(99))
    with pytest.raises(WeightsError, match=r"shard: not the announced content \(99 bytes instead of 100\)"):
        verify(tmp_path, VERSION, digest)


def test_an_error_of_the_file_server_is_one_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shard").write_bytes(bytes(100))
    digest = make_manifest(tmp_path, VERSION, chunk_bytes=10)

    def away(*_: int) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "pread", away)
    with pytest.raises(WeightsError, match="version .* cannot be read .*Stale file handle"):
        verify(tmp_path, VERSION, digest)


@pytest.mark.parametrize("name", ["../shard", "/etc/passwd", "a/b", "", ".hidden", "..", "name\n", "näme", "a" * 201, MANIFEST])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    content = msgspec.json.encode({"version": VERSION, "chunk_bytes": 4, "files": [{"name": name, "size": 4, "source": 0, "chunks": [DIGEST]}]})
    with pytest.raises(WeightsError, match="malformed manifest"):
        Manifest.decode(content)


@pytest.mark.parametrize(("files", "chunk_bytes"), [
    ([FileEntry("a", 4, 0, [DIGEST]), FileEntry("a", 4, 0, [DIGEST])], 4),
    ([FileEntry("a", 5, 0, [DIGEST])], 4),
    ([FileEntry("a", 4, 0, [DIGEST, DIGEST])], 4),
    ([FileEntry("a", 0, 0, [DIGEST])], 4),
    ([FileEntry("a", -4, 0, [])], 4),
    ([FileEntry("a", 4, -1, [DIGEST])], 4),
    ([FileEntry("a", 4, 0, ["0" * 63])], 4),
    ([FileEntry("a", 4, 0, [DIGEST + "\n"])], 4),
    ([], 0),
])
def test_a_manifest_that_contradicts_itself_is_refused(files: list[FileEntry], chunk_bytes: int) -> None:
    with pytest.raises(WeightsError, match="malformed manifest"):
        Manifest.decode(Manifest(VERSION, chunk_bytes, files).encode())


@given(content=st.binary(max_size=60))
def test_no_content_is_more_than_an_error(content: bytes) -> None:
    with pytest.raises(WeightsError, match="malformed manifest"):
        Manifest.decode(content)


def test_a_digest_is_of_content_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").write_bytes(b"weights")
    digest = make_manifest(tmp_path / "one", VERSION)
    assert make_manifest(tmp_path / "two", VERSION) == digest == digest_of((tmp_path / "one" / MANIFEST).read_bytes())
