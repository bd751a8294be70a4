"""Weights from storage that shows things late, or wrong."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from workers.messages.parts import Announcement, Version
from workers.rollout.weights import shared_storage
from workers.rollout.weights.shared_storage import from_shared_storage
from workers.weights.manifest import MANIFEST, WeightsError, make_manifest

V1 = Version(1, 1)


@pytest.fixture
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Announcement:
    monkeypatch.setattr(shared_storage, "LONGEST_PAUSE_S", 0.05)
    folder = tmp_path / "weights" / "1.1"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"part{number}.safetensors").write_bytes(bytes([number]) * 10_000)
    return Announcement(V1, str(folder), make_manifest(folder, V1, chunk_bytes=1024))


async def fetch(announced: Announcement, limit_s: float = 60.0) -> Path:
    return await from_shared_storage(announced, limit_s, lambda: True)


async def test_a_version_is_used_where_it_lies(announced: Announcement) -> None:
    assert await fetch(announced) == Path(announced.folder)


@pytest.mark.parametrize("late", ["folder", "file", "content", MANIFEST])
async def test_what_is_seen_late_is_waited_for(announced: Announcement, tmp_path: Path, late: str) -> None:
    folder, aside = Path(announced.folder), tmp_path / "aside"
    shutil.copytree(folder, aside)
    hidden = {"folder": folder, "file": folder / "part1.safetensors", "content": folder / "part2.safetensors", MANIFEST: folder / MANIFEST}[late]
    if late == "content":
        hidden.write_bytes(b"")
    else:
        hidden.rename(tmp_path / "hidden")
    fetching = asyncio.create_task(fetch(announced))
    await asyncio.sleep(0)
    assert shared_storage._missing(folder, announced) and not fetching.done()
    if late == "content":
        hidden.write_bytes((aside / hidden.name).read_bytes())
    else:
        (tmp_path / "hidden").rename(hidden)
    assert await fetching == folder


async def test_what_never_comes_is_named_with_the_remedy(announced: Announcement) -> None:
    (Path(announced.folder) / "part1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"part1\.safetensors.*weights\.timeout_s.*weights\.dir"):
        await fetch(announced, 0.1)


async def test_wrong_content_is_an_error_after_a_second_look(announced: Announcement, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(announced.folder) / "part1.safetensors"
    path.write_bytes(b"\7" + path.read_bytes()[1:])
    with pytest.raises(WeightsError, match=r"part1\.safetensors: not the announced content"):
        await fetch(announced)
    assert "once more" in capfd.readouterr().out


async def test_what_is_not_wanted_any_more_is_not_waited_for(announced: Announcement) -> None:
    shutil.rmtree(announced.folder)
    with pytest.raises(WeightsError):
        await from_shared_storage(announced, 60.0, lambda: False)
