"""Differences between versions: exact for every content and width, small after a training step, and never trusted."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.messages.parts import Version
from workers.weights.delta import Deltas, decode, encode, make_deltas
from workers.weights.manifest import WeightsError

BASE = Version(1, 6)
KIB = 1 << 10
REAL_STEPS = {1e-6: 0.08, 2e-5: 0.25}
"""Learning rate: what part of the bytes a step of Adam may take at most (about the learning rate a parameter)."""


def bf16(weights: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as uint16."""
    bits = weights.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def view(content: bytes | np.ndarray) -> memoryview:
    return memoryview(content.tobytes() if isinstance(content, np.ndarray) else content)


@settings(deadline=None)
@given(pair=st.integers(0, 300).flatmap(lambda size: st.tuples(st.binary(min_size=size, max_size=size), st.binary(min_size=size, max_size=size))),
       width=st.sampled_from([1, 2, 4, 8]), repeat=st.integers(1, 20))
def test_what_comes_out_is_what_went_in(pair: tuple[bytes, bytes], width: int, repeat: int) -> None:
    new, base = pair[0] * repeat, pair[1] * repeat
    encoded = encode(view(new), view(base), width)
    assert encoded is None or (len(encoded) < len(new) and decode(encoded, view(base)).tobytes() == new)


def test_a_difference_that_is_not_smaller_is_none() -> None:
    rng = np.random.default_rng(1)
    assert encode(view(rng.bytes(4 * KIB)), view(rng.bytes(4 * KIB)), 2) is None
    same = view(rng.bytes(4 * KIB))
    encoded = encode(same, same, 2)
    assert encoded is not None and len(encoded) < 50


@pytest.mark.parametrize("learning_rate", list(REAL_STEPS))
def test_a_training_step_in_bf16_is_small(learning_rate: float) -> None:
    rng = np.random.default_rng(2)
    weights = rng.standard_normal(256 * KIB).astype(np.float32) * 0.02
    step = learning_rate * np.sign(rng.standard_normal(256 * KIB)).astype(np.float32)
    new, base = view(bf16(weights + step)), view(bf16(weights))
    encoded = encode(new, base, 2)
    assert encoded is not None and len(encoded) / len(new) < REAL_STEPS[learning_rate]
    assert decode(encoded, base) == new


@settings(deadline=None)
@given(encoded=st.binary(max_size=60), size=st.integers(0, 40))
def test_no_content_is_more_than_an_error(encoded: bytes, size: int) -> None:
    with pytest.raises(ValueError):
        decode(encoded, memoryview(bytes(size)))


@settings(deadline=None)
@given(place=st.integers(0, 10**6), value=st.integers(1, 255))
def test_a_changed_byte_is_an_error_or_another_content(place: int, value: int) -> None:
    rng = np.random.default_rng(3)
    base = rng.bytes(KIB)
    encoded = bytearray(encode(view(bytes(byte ^ (byte > 200) for byte in base)), view(base), 2) or b"")
    encoded[place % len(encoded)] ^= value
    with contextlib.suppress(ValueError):
        assert len(decode(bytes(encoded), view(base))) == KIB


def test_what_pretends_to_be_huge_is_not_unpacked() -> None:
    bomb = b"\2" + zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(ValueError, match="not the difference of 100 bytes"):
        decode(bomb, memoryview(bytes(100)))
    stream = zstandard.ZstdCompressor().compressobj()  # does not say beforehand how much it is
    with pytest.raises(ValueError, match="not the difference of 100 bytes"):
        decode(b"\2" + stream.compress(bytes(1 << 26)) + stream.flush(), memoryview(bytes(100)))


# -- files -----------------------------------------------------------------------------------------------------------------

@settings(deadline=None, max_examples=50)
@given(records=st.lists(st.tuples(st.sampled_from(["a", "model-00000.safetensors"]), st.integers(0, 3), st.binary(max_size=30)), max_size=6),
       cut=st.integers(0, 200))
def test_a_delta_file_that_was_cut_short_has_what_is_whole(tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, int, bytes]],
                                                           cut: int) -> None:
    path = tmp_path_factory.mktemp("deltas") / "delta"
    written = Deltas.create(path, BASE)
    sizes = [path.stat().st_size]
    for record in records:
        written.append(*record)
        sizes.append(path.stat().st_size)
    length = max(sizes[0], sizes[-1] - cut)
    with path.open("r+b") as file:
        file.truncate(length)
    whole = {(name, offset): encoded for (name, offset, encoded), end in zip(records, sizes[1:], strict=True) if end <= length}
    found = Deltas.open(path)
    assert found.base == BASE
    for name, offset, _ in records:
        assert found.find(name, offset) == whole.get((name, offset))
    assert found.find("b", 0) is None
    for name, offset, encoded in records:
        assert written.find(name, offset) is not None or encoded == b""


@pytest.mark.parametrize("content", [b"", b"headway delta 1\n", b"something else" * 10])
def test_what_is_no_delta_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "delta").write_bytes(content)
    with pytest.raises(WeightsError, match="not a delta file"):
        Deltas.open(tmp_path / "delta")
    with pytest.raises(WeightsError, match="cannot be read"):
        Deltas.open(tmp_path / "nothing")


@pytest.mark.parametrize("threads", [1, 3])
def test_deltas_of_whole_files(tmp_path: Path, threads: int) -> None:
    rng = np.random.default_rng(4)
    base, new, chunk_bytes = tmp_path / "1.6", tmp_path / "1.7", 4 * KIB
    base.mkdir()
    new.mkdir()
    weights = rng.standard_normal(9 * KIB).astype(np.float32)
    (base / "shard").write_bytes(bf16(weights).tobytes())
    (new / "shard").write_bytes(bf16(weights + 1e-4).tobytes())  # 4.5 chunks
    (new / "only-new").write_bytes(rng.bytes(5 * KIB))
    size = make_deltas(new, base, BASE, ["shard", "only-new"], tmp_path / "delta", chunk_bytes=chunk_bytes, width=2, threads=threads)
    deltas = Deltas.open(tmp_path / "delta")
    before, after = (base / "shard").read_bytes(), (new / "shard").read_bytes()
    total = 5 * KIB
    for offset in range(0, 18 * KIB, chunk_bytes):
        encoded = deltas.find("shard", offset)
        assert encoded is not None
        assert decode(encoded, memoryview(before[offset: offset + chunk_bytes])).tobytes() == after[offset: offset + chunk_bytes]
        total += len(encoded)
    assert deltas.find("only-new", 0) is None and size == (23 * KIB, total)
    assert (tmp_path / "delta").stat().st_mode & 0o777 == 0o600
