"""A Megatron-core GPT model that says what reward it expects, wherever it predicts a response token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from workers.config import TrainerConfig
from workers.model.architecture import Architecture
from workers.trainer.megatron.hf_conversion import pieces_of
from workers.trainer.megatron.lora.low_rank import attach
from workers.trainer.megatron.model.attention_plan import PackedLayoutParams
from workers.trainer.megatron.model.model import PackedGPTModel, build_model
from workers.trainer.megatron.parallel import cpu_backend


class ValueModel(PackedGPTModel):
    """Its output is float32 [1, n], with gradient: values of the states in which this rank's n response tokens were chosen.

    A linear head stands in place of the output layer; tensor-parallel ranks hold all of it, and compute the same with it.
    """

    value_head: torch.nn.Linear

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer

    def add_value_head(self) -> None:
        """Have every value be zero; called once the weights of the starting model, which has no such head, are there."""
        if self.post_process:
            self.value_head = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype, device=cpu_backend.device())
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Any]:
        """Where each parameter belongs in the whole model, for checkpoints. GPTModel's own looks for the output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedLayoutParams, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        part = packed_seq_params.part
        assert part is not None
        if self.config.sequence_parallel:
            # Each rank has the whole gradient of what it gathers, so there is nothing to add up.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        at, index = (cpu_backend.upload(ids, hidden_states.device) for ids in (part.predict_at, part.predict_index))
        hidden = hidden_states[:, 0].index_select(0, at).float()
        values = torch.nn.functional.linear(hidden, self.value_head.weight.float(), self.value_head.bias.float())
        return values[:, 0].index_select(0, index)[None]


def build_value_model(architecture: Architecture, folder: Path, dtype: torch.dtype, trainer: TrainerConfig, seed: int = 0) -> Any:
    """This rank's part, as `build_model` gives it, of a value model that begins as the model in `folder`; with `trainer.lora` its head is trained,
    and adapters that begin by `seed`. Call within `cpu_backend.redirected()`, groups initialised."""
    model = build_model(architecture, folder, dtype, 1.0, trainer, ValueModel)
    attach(model, architecture, trainer.lora, seed)
    for piece in pieces_of(model):
        piece.add_value_head()
    return model
