"""What makes up the trainer's state: whose it is, where each tensor of it belongs in the whole, and how it is put back."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from workers.config import LoraConfig
from workers.model.architecture import Architecture
from workers.model.tensors import check_tensors, fingerprint
from workers.trainer.megatron.checkpoint.optimizer_shards import num_updates, restored, sharded_state
from workers.trainer.megatron.hf_conversion import pieces_of
from workers.trainer.megatron.trained_model import TrainedModel

# A layer's tensors are named by its number in the whole model, whichever pipeline stage holds it.
_NAMED_BY_LAYER = {"non_homogeneous_layers": True}


@dataclass(frozen=True)
class TrainingState:
    """The models in training, each with its optimizer and schedule, and the `architecture` to recognise them by."""

    policy: TrainedModel
    critic: TrainedModel | None
    architecture: Architecture
    lora: LoraConfig
    folder: Path
    """Of the starting model. With adapters the state is without its weights, and belongs to it."""

    def __post_init__(self) -> None:
        if any(self.folder.glob("*.safetensors")):  # a fake step has none
            self._adapted  # noqa: B018 -- of what was loaded, and not of what may lie there later

    @functools.cached_property
    def _adapted(self) -> dict[str, Any]:
        if not self.lora.rank:
            return {}
        return {"trainer.lora.rank": self.lora.rank, "trainer.lora.alpha": self.lora.alpha,
                "trainer.lora.targets": sorted(target.value for target in self.lora.targets),
                "starting model": fingerprint(check_tensors(self.folder, self.architecture), self.architecture)}

    def identity(self) -> dict[str, Any]:
        """What a saved state must agree with, in the types of JSON."""
        own = {name: value for name, value in asdict(self.architecture).items() if name != "eos_token_ids"}
        own |= {"dtype": str(pieces_of(self.policy.model)[0].config.params_dtype).removeprefix("torch."), "critic": self.critic is not None}
        own |= self._adapted
        return msgspec.json.decode(msgspec.json.encode(own))

    def tensors(self, loading: bool) -> dict[str, Any]:
        """This rank's tensors in Megatron's sharded form; they share memory with the models' and the optimizers', so that what is
        loaded into them is in its place."""
        found = {}
        for name, trained in self._models().items():
            prefix = "" if name == "policy" else f"{name}."
            model: dict[str, Any] = {}
            for number, piece in enumerate(pieces_of(trained.model)):
                entries, _ = extract_sharded_tensors_and_factories(piece.sharded_state_dict(prefix, metadata=dict(_NAMED_BY_LAYER)))
                model |= {f"{number}.{key}": entry for key, entry in entries.items() if entry.data.requires_grad or not self.lora.rank}
            found[name] = {"model": model, "optimizer": sharded_state(trained.optimizer, model, loading)}
        return found

    def common(self) -> dict[str, Any]:
        """What is the same on all ranks: positions, and the states of torch's generators, for which rank 0's stand."""
        positions = {name: {"num_steps": trained.scheduler.num_steps, "num_updates": num_updates(trained.optimizer)}
                     for name, trained in self._models().items()}
        states = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
        return {"positions": positions, "generators": states}

    def restore(self, common: dict[str, Any]) -> None:
        """Put back what `common` gave; learning rate and weight decay become those of the config at that step."""
        for name, trained in self._models().items():
            restored(trained.optimizer, common["positions"][name]["num_updates"])
            trained.scheduler.num_steps = common["positions"][name]["num_steps"]
            trained.scheduler.step(0)
        torch.set_rng_state(common["generators"]["cpu"])
        if torch.cuda.is_available() and "cuda" in common["generators"]:
            torch.cuda.set_rng_state(common["generators"]["cuda"])

    def _models(self) -> dict[str, TrainedModel]:
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {})
