"""A Hugging Face folder of the model: written, read again and compared, its version."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.config import Dtype
from workers.messages.parts import Version
from workers.model.architecture import Architecture, ModelError
from workers.model.tensors import check_tensors
from workers.trainer.megatron.model.model import DTYPES
from workers.weights.manifest import MANIFEST, Manifest, WeightsError
from workers.weights.safetensors_writer import write_hf_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json")


def write_model(folder: Path, tensors: Iterator[tuple[str, Tensor]], model: Path, dtype: Dtype) -> dict[str, str]:
    """Make `folder`: `tensors` in `dtype`, and what else belongs to the model in the folder `model`; on failure nothing is left of it.

    Returns the digest of every tensor, BLAKE3 in hex, by name. Raises WeightsError, OSError.
    """
    digests: dict[str, str] = {}

    def hashed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            kept = tensor.detach().to("cpu", DTYPES[dtype]).contiguous()
            digests[name] = digest(kept)
            yield name, kept

    folder.mkdir(mode=0o700)
    with removed_on_failure(folder):
        write_hf_folder(folder, hashed(), model, dtype)
        for name in TOKENIZER_FILES:
            if (model / name).is_file():
                shutil.copy(model / name, folder / name)
    return digests


def verify(folder: Path, architecture: Architecture, dtype: torch.dtype, digests: dict[str, str]) -> None:
    """Raise `WeightsError` unless `folder` holds exactly the tensors of `architecture`, those that training moves in `dtype`, each with its digest
    (BLAKE3, hex)."""
    try:
        expected, left = architecture.tensor_shapes().keys(), dict(digests)
        frozen = architecture.frozen_shapes()
        for path in check_tensors(folder, architecture):
            with safe_open(path, framework="pt") as file:
                for name in set(file.keys()) - set(frozen):
                    tensor = file.get_tensor(name)
                    if tensor.dtype is not dtype or digest(tensor) != left.pop(name, ""):
                        raise WeightsError(f"{folder}: tensor {name} is not what was written. Check the file system")
    except (ModelError, SafetensorError) as error:
        raise WeightsError(f"{folder}: not what was written ({error}). Check the file system") from error
    wrong = sorted(left.keys() | (digests.keys() ^ expected))
    if wrong:
        raise WeightsError(f"{folder}: tensors {', '.join(wrong[:5])} are missing, or are none of this architecture")


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Inside the block `folder` is made: where that fails nothing is left of it."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def aside_of(folder: Path) -> Path:
    """Where `folder` is made."""
    return folder.with_name(f".{folder.name}.tmp")


def version_of(folder: Path) -> Version | None:
    """What an export holds; None where there is none, or it cannot be read."""
    try:
        return Manifest.decode((folder / MANIFEST).read_bytes()).version
    except (OSError, WeightsError):
        return None


def digest(tensor: Tensor) -> str:
    """BLAKE3 of its bytes, in hex."""
    return blake3(tensor.flatten().view(torch.uint8).numpy().data).hexdigest()
