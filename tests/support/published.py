"""Published versions without a trainer: folders with manifests, as workers read them from shared storage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from workers.config import Dtype
from workers.messages.parts import Announcement, Version
from workers.weights.manifest import make_manifest
from workers.weights.safetensors_writer import write_hf_folder


class Publisher:
    """Publishes into `folder`, which it makes, for the architecture in `model_folder`."""

    def __init__(self, folder: Path, model_folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._model_folder, self._dtype = folder, model_folder, Dtype(str(dtype).removeprefix("torch."))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: Version) -> Announcement:
        """Write `tensors` (Hugging Face names) as `version`."""
        part, final = self._folder / f".{version}.part", self._folder / str(version)
        part.mkdir(mode=0o700)
        write_hf_folder(part, tensors, self._model_folder, self._dtype)
        digest = make_manifest(part, version)
        os.rename(part, final)
        return Announcement(version, str(final), digest)
