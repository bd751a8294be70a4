"""A version of the weights from storage that all nodes share: used where it lies, once all of it is seen and verified.

Shared file systems cache: a folder, its names and the files' sizes may be seen late. So what is missing is looked for again, by listing
the folders anew, until it is there or the deadline has passed. Verifying reads every byte, which also brings the files into the node's page
cache, where the engines find them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from workers.messages.parts import Announcement
from workers.run.digests import digest_of
from workers.weights.manifest import MANIFEST, Manifest, WeightsError, verify

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
THREADS = 4


async def from_shared_storage(announcement: Announcement, limit_s: float, wanted: Callable[[], bool]) -> Path:
    """The announced folder, verified. Raises `WeightsError` after `limit_s` seconds, where its content is wrong, or once it is not `wanted`."""
    folder, deadline, pause = Path(announcement.folder), time.monotonic() + limit_s, FIRST_PAUSE_S
    while (missing := await asyncio.to_thread(_missing, folder, announcement)) and wanted():
        if time.monotonic() > deadline:
            raise WeightsError(f"{folder}: version {announcement.version} is not seen on this node: {missing}, for {limit_s:g} s "
                               "(weights.timeout_s). The folder must be on storage that all nodes share: look at weights.dir")
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    try:
        await asyncio.to_thread(verify, folder, announcement.version, announcement.digest, threads)
    except WeightsError as error:
        if not wanted():
            raise
        print(f"{error}. Reading it once more", flush=True)
        await asyncio.sleep(LONGEST_PAUSE_S)
        await asyncio.to_thread(verify, folder, announcement.version, announcement.digest, threads)
    return folder


def _missing(folder: Path, announcement: Announcement) -> str:
    """What is not seen of the version, in words; '' if all of it is there."""
    try:
        os.listdir(folder.parent)  # makes the client of a shared file system look anew
        names = set(os.listdir(folder))
        if MANIFEST not in names:
            return f"there is no {MANIFEST}"
        content = (folder / MANIFEST).read_bytes()
        if digest_of(content) != announcement.digest:
            return f"{MANIFEST} is not the announced one"
        for entry in Manifest.decode(content).files:
            if entry.name not in names or (folder / entry.name).stat().st_size != entry.size:
                return f"{entry.name} is not there with all its {entry.size} bytes"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""
