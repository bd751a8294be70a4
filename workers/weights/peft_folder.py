"""Adapters (trainer.lora) as a folder that PEFT loads, and the model that they make of the one that training began with.

    adapter_config.json, adapter_model.safetensors    in the layout of PEFT's release 0.21: PeftModel.from_pretrained(base, FOLDER)
    such a folder, and the starting model's --W + lora_alpha / r times B A, tensor by tensor--> a Hugging Face folder

Every matrix has its lora_A [rank, in] and lora_B [out, rank] below 'base_model.model.'. Training ranks merge by the same function: on CPUs the
same bits come of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.config import LoraConfig
from workers.model.adapter_shapes import A, B, pair_shapes
from workers.model.architecture import read_architecture
from workers.model.tensors import check_tensors
from workers.weights.manifest import WeightsError

PREFIX = "base_model.model."
ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"


def peft_config(lora: LoraConfig, base: Path) -> bytes:
    """The content of adapter_config.json; `base`: the folder of the starting model."""
    return msgspec.json.format(msgspec.json.encode({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(target.value for target in lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }))


def named(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Adapters, by their names below the model, as PEFT's files name them."""
    return ((PREFIX + name, tensor) for name, tensor in tensors)


def write_peft_folder(folder: Path, tensors: Iterable[tuple[str, Tensor]], lora: LoraConfig, base: Path) -> None:
    """Make `folder` of all adapters, `tensors` by their names below the model, in their own dtype. Raises OSError."""
    folder.mkdir(mode=0o700)
    found = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named(tensors)}
    save_file(found, folder / ADAPTERS, metadata={"format": "pt"})
    (folder / ADAPTER_CONFIG).write_bytes(peft_config(lora, base))


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`weight` [out, in] + scale B A, of `a` [rank, in] and `b` [out, rank]: computed in float32, in the dtype of `weight`."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


def iter_merged(folder: Path, lora: LoraConfig, base: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of the whole model, one at a time, as training ranks that compute in `dtype` merge the adapters in `folder`
    with the model in `base`. Raises `WeightsError`, `ModelError`."""
    architecture, opened = read_architecture(base), dict[str, Any]()
    try:
        pairs = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / ADAPTERS).items()}
        for path in check_tensors(base, architecture, frozen=False):
            file = safe_open(path, framework="pt")
            opened.update(dict.fromkeys(file.keys(), file))
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{folder}: adapters, or their starting model in {base}, cannot be read ({error})") from error
    if {name: tuple(pair.shape) for name, pair in pairs.items()} != pair_shapes(architecture, lora):
        raise WeightsError(f"{folder}: not the adapters of trainer.lora.rank={lora.rank} and its targets, of the model in {base}")
    for name in architecture.tensor_shapes():
        weight, module = opened[name].get_tensor(name).to(dtype), name.removesuffix(".weight")
        in_pair = f"{module}.{A}" in pairs
        yield name, merged(weight, pairs[f"{module}.{A}"], pairs[f"{module}.{B}"], lora.alpha / lora.rank) if in_pair else weight
