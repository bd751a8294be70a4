"""Adapters as a folder that PEFT loads: adapter_config.json and adapter_model.safetensors, in the layout of its release 0.21.

    PeftModel.from_pretrained(base, FOLDER)    base: the Hugging Face model that training began with

Every matrix has its lora_A [rank, in] and lora_B [out, rank] below 'base_model.model.', and adds lora_alpha / r times B A to W.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from workers.config import LoraConfig

PREFIX = "base_model.model."


def peft_config(lora: LoraConfig, base: Path) -> dict[str, object]:
    """What adapter_config.json says; `base`: the folder of the starting model."""
    return {
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
    }


def write_peft_folder(folder: Path, tensors: Iterator[tuple[str, Tensor]], lora: LoraConfig, base: Path) -> None:
    """Make `folder` of all adapters, `tensors` by their names below the model, in their own dtype. Raises OSError."""
    folder.mkdir(mode=0o700)
    found = {PREFIX + name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(peft_config(lora, base))))
