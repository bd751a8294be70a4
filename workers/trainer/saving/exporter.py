"""Writes the model as Hugging Face folders: every n steps into exports/STEP, and at the end into final_model; with `trainer.lora` the adapters
alone, too, into final_adapter.

    all ranks   weights, tensor by tensor --rank 0--> .STEP.tmp/ (digest of each tensor)
    a thread    --> on disk, read again: every tensor of the architecture, each as it was --> manifest.json --> exports/STEP/

Training stands still for the first line only (`export_s`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from workers.config import Config
from workers.messages.parts import Version
from workers.model.architecture import Architecture
from workers.run.checkpoints import check_epoch
from workers.run.files import sync
from workers.run.folder import RunFolder
from workers.run.outage import patiently
from workers.trainer.background import LEAVE_S, Background
from workers.trainer.megatron.model.model import DTYPES
from workers.trainer.ranks import IDLE_S, Ranks
from workers.trainer.saving.export_folder import aside_of, removed_on_failure, verify, version_of, write_model
from workers.weights.manifest import WeightsError, make_manifest
from workers.weights.peft_folder import write_peft_folder

Weights = Callable[[], Iterator[tuple[str, Tensor]]]


class Exporter:
    """Rank 0's. `weights` gives the present weights under their Hugging Face names, `adapters` those of `trainer.lora`, to be gone through to
    the end."""

    def __init__(self, run: RunFolder, config: Config, ranks: Ranks, architecture: Architecture, weights: Weights, adapters: Weights) -> None:
        self._run, self._ranks, self._architecture, self._weights, self._adapters = run, ranks, architecture, weights, adapters
        self._lora = config.trainer.lora
        self._every, self._keep, self._final = config.trainer.export_every_steps, config.trainer.export_keep, config.trainer.export_final
        self._model, self._dtype = Path(config.model.path), config.trainer.dtype
        self._verifying = Background("export")
        self._step, self._stood_s = 0, 0.0

    def due(self, step: int) -> bool:
        """Whether the model after `step` is to be exported."""
        return bool(self._every) and step % self._every == 0

    def after_step(self, version: Version) -> None:
        """Export if that is due. What cannot be written is no reason to stop: it is said. Raises `Fenced` where another incarnation has begun."""
        started, due = time.monotonic(), self.due(version.step)
        self._look(wait=due)
        if due:
            try:
                self._begin(version)
            except (WeightsError, OSError) as error:
                self._say(error)
        self._stood_s += time.monotonic() - started

    def finish(self, version: Version) -> None:
        """The run is complete: wait for the export under way; with `trainer.export_final` write the trained model too, and its adapters by
        themselves, and return when it is verified. Raises WeightsError, OSError, `Fenced`."""
        self._look(wait=True)
        if self._final:
            self._patiently(lambda: self._export_now(version))
            if self._lora.rank:
                self._patiently(lambda: self._publish_adapters(version))

    def lacks(self, version: Version) -> bool:
        """Whether the export of `version`, whose state an incarnation before has saved, is due and not there: it left before that was verified."""
        return self.due(version.step) and version_of(self._run.exports / str(version.step)) != version

    def abandon(self) -> None:
        """This process leaves: what is still being verified is written again by the next one, if it begins there, and is said."""
        if not self._verifying.abandon(LEAVE_S):
            print(f"the export of step {self._step} was not read back before this process left: only one that goes on from step {self._step} makes "
                  "it again", flush=True)

    def _patiently(self, work: Callable[[], None]) -> None:
        """`work` once the disk takes it, for which the other ranks are kept waiting. Raises WeightsError, OSError, `Fenced`."""
        patiently(self._run, work, hurry=self._ranks.keep_waiting)

    def take_metrics(self) -> dict[str, float]:
        """Seconds that training stood still for exports since this was last asked."""
        metrics = {"export_s": self._stood_s}
        self._stood_s = 0.0
        return metrics

    def _export_now(self, version: Version) -> None:
        """The trained model, read back beside this thread: a large one takes longer than the other ranks wait without a word."""
        digests, self._step = self._write(self._run.final_model), version.step
        self._verifying.start(lambda: self._publish(self._run.final_model, version, digests))
        self._await_verified()

    def _await_verified(self) -> None:
        while not self._verifying.end(IDLE_S):
            self._ranks.keep_waiting()

    def _look(self, wait: bool) -> None:
        """Learn how the export before has ended, if it has; `wait` for its end."""
        try:
            if wait:
                self._await_verified()
            else:
                self._verifying.end(0)
        except (WeightsError, OSError) as error:
            self._say(error)

    def _begin(self, version: Version) -> None:
        folder = self._run.exports / str(version.step)
        self._run.exports.mkdir(mode=0o700, exist_ok=True)
        for leftover in self._run.exports.glob(".*.tmp"):  # of incarnations that were killed while they exported
            shutil.rmtree(leftover, ignore_errors=True)
        digests, self._step = self._write(folder), version.step
        self._verifying.start(lambda: self._publish(folder, version, digests))

    def _write(self, folder: Path) -> dict[str, str]:
        """Write `folder` aside; returns the digest of every tensor, BLAKE3 in hex, by name."""
        aside, tensors = aside_of(folder), self._weights()
        try:
            shutil.rmtree(aside, ignore_errors=True)
            return write_model(aside, tensors, self._model, self._dtype)
        finally:
            for _ in tensors:  # the other ranks give all of them
                pass

    def _publish(self, folder: Path, version: Version, digests: dict[str, str]) -> None:
        aside = aside_of(folder)
        with removed_on_failure(aside):
            verify(aside, self._architecture, DTYPES[self._dtype], digests)
            make_manifest(aside, version)
            self._name(aside, folder, version)
        if folder.parent == self._run.exports:
            self._retain(version)

    def _retain(self, newest: Version) -> None:
        """Remove what an incarnation before has exported of later steps, which are trained anew, and the oldest of the rest."""
        steps = {int(path.name): path for path in self._run.exports.iterdir() if path.name.isdecimal()}
        lost = {step for step, path in steps.items() if step > newest.step and (found := version_of(path)) is not None and found < newest}
        for step in (*lost, *sorted(steps.keys() - lost)[: -self._keep]):
            shutil.rmtree(steps[step], ignore_errors=True)

    def _publish_adapters(self, version: Version) -> None:
        folder, tensors = self._run.final_adapter, self._adapters()
        aside = aside_of(folder)
        try:
            with removed_on_failure(aside):
                shutil.rmtree(aside, ignore_errors=True)
                write_peft_folder(aside, tensors, self._lora, self._model)
                self._name(aside, folder, version)
        finally:
            for _ in tensors:  # the other ranks give all of them
                pass

    def _name(self, aside: Path, folder: Path, version: Version) -> None:
        """Bring what lies in `aside` to disk, and have it be `folder`. Raises OSError, `Fenced`."""
        for path in (*aside.iterdir(), aside):
            sync(path)
        check_epoch(self._run, version, "export of")
        shutil.rmtree(folder, ignore_errors=True)  # of a lineage that is lost
        aside.rename(folder)
        sync(folder.parent)

    def _say(self, error: Exception) -> None:
        print(f"the model could not be exported, training goes on: {error}", flush=True)
