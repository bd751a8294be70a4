"""Adapters that have come to this node alone (weights.adapter_only) become the model that engines load.

    adapters, verified --a thread of one of the node's workers: merged with the starting model (weights/peft_folder.py)--> the node's second store

This store is like that of what is fetched: shared by the workers of the node, where another one takes over, from the beginning, when one dies over
a version. Kept are the one that was merged last, which engines may still load, and the one that is being merged.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workers.config import Config, Transport
from workers.messages.parts import Version
from workers.run.folder import RunFolder
from workers.weights.store import Cancelled, open_store

if TYPE_CHECKING:
    from torch import Tensor

SILENT_TIMEOUTS = 2
"""weights.timeout_s in which another worker of the node may not get on with what it merges."""
THREADS = 4
"""At most, and one of four cores: the others generate."""


class Merging:
    """What this worker does of it. `held`: the version that was merged last. Raises `WeightsError`."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._config, self._model = config, Path(config.model.path)
        self._store = open_store(run.merged("auto" if config.weights.transport is Transport.disk else config.weights.dir))
        self.held: Version | None = None

    async def merge(self, version: Version, adapters: Path) -> Path:
        """The folder of the model with the adapters of `version` in `adapters`, complete; it stays until after the next one. Raises `WeightsError`;
        when cancelled, ends soon."""
        cancelled = threading.Event()
        job = asyncio.ensure_future(asyncio.to_thread(self._merge, version, adapters, cancelled))
        try:
            folder = await asyncio.shield(job)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.gather(job, return_exceptions=True)
            raise
        self.held = version
        return folder

    def _merge(self, version: Version, adapters: Path, cancelled: threading.Event) -> Path:
        self._store.remove_older({version} if self.held is None else {version, self.held})
        while self._store.lock(version, SILENT_TIMEOUTS * self._config.weights.timeout_s, cancelled):
            try:
                self._write(version, adapters, cancelled)
            finally:
                self._store.unlock(version)
        return self._store.held(version)

    def _write(self, version: Version, adapters: Path, cancelled: threading.Event) -> None:
        import torch  # a worker does without it otherwise

        from workers.weights.peft_folder import iter_merged
        from workers.weights.safetensors_writer import write_hf_folder

        torch.set_num_threads(max(1, min(THREADS, len(os.sched_getaffinity(0)) // 4)))
        trainer = self._config.trainer
        with self._store.make(version) as (folder, grows):

            def tensors() -> Iterator[tuple[str, Tensor]]:
                for named in iter_merged(adapters, trainer.lora, self._model, getattr(torch, trainer.dtype.value)):
                    if cancelled.is_set():
                        raise Cancelled(f"version {version} is not wanted any more")
                    grows()
                    yield named

            write_hf_folder(folder, tensors(), self._model, self._config.engine.dtype)

    def close(self) -> None:
        """Leave the store."""
        self._store.leave()
