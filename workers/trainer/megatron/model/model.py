"""A Megatron-core GPT model that turns a packed micro-batch into log-probs of its response tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from workers.config import Dtype, TrainerConfig
from workers.model.architecture import Architecture
from workers.model.parallel_limits import check_parallel
from workers.trainer.megatron.hf_conversion import load_hf
from workers.trainer.megatron.model import moe
from workers.trainer.megatron.model.attention_plan import PackedLayoutParams
from workers.trainer.megatron.model.layers import layer_specs, transformer_config
from workers.trainer.megatron.model.lm_head import VocabularyShard, token_logprobs
from workers.trainer.megatron.parallel import cpu_backend

DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16, Dtype.float16: torch.float16}


class PackedGPTModel(GPTModel):
    """GPTModel whose output is float32 [2, n]: log-probs (with gradient) and entropies (if `entropy_gradient`) of this rank's n response tokens.

    Logits are made for the positions that predict a response token only, see lm_head.py. Earlier pipeline stages put out hidden states.
    """

    temperature: float = 1.0
    entropy_gradient: bool = False
    vocabulary: VocabularyShard | None = None

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """`input_ids`, `position_ids` int64 [1, t]; `packed_seq_params` is a PackedLayoutParams."""
        embedded = self._embedded(input_ids) if self.pre_process else None
        if embedded is not None and torch.is_grad_enabled() and self.config.recompute_granularity and not embedded.requires_grad:
            embedded.requires_grad_()  # of a frozen embedding: what is made again only has gradients where its input has
        return super().forward(input_ids, position_ids, attention_mask, decoder_input=embedded, **kwargs)

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """[t, 1, hidden]; with sequence parallelism, this rank's share of the t. Megatron's module around it only adds dropout."""
        embedding = self.embedding.word_embeddings
        if self.vocabulary is None:
            # A sparse gradient: the dense one would be a fresh [vocabulary, hidden] tensor for a few hundred rows.
            return functional.embedding(input_ids, embedding.weight, sparse=True).transpose(0, 1)
        return embedding(input_ids) if self.config.sequence_parallel else embedding(input_ids).transpose(0, 1)

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedLayoutParams, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        part = packed_seq_params.part
        assert part is not None
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        # Both make every rank's share of the hidden states' gradient one sum.
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        elif self.vocabulary is not None:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
        device = hidden_states.device
        hidden = hidden_states[:, 0].index_select(0, cpu_backend.upload(part.predict_at, device))
        pair = token_logprobs(hidden, weight, part.predict_index, part.targets, self.temperature, self.vocabulary,
                              entropy_gradient=self.entropy_gradient)
        return torch.stack(pair)


def build_model(architecture: Architecture, folder: Path, dtype: torch.dtype, temperature: float, trainer: TrainerConfig,
                kind: type[PackedGPTModel] = PackedGPTModel) -> Any:
    """This rank's part of a model of `kind`, with the weights in `folder`, in `dtype`: a `kind`, or where pipeline stages are interleaved a
    ModuleList of its pieces. Call within `cpu_backend.redirected()`, groups initialised."""
    check_parallel(architecture, trainer.parallel)
    pieces = [_piece(architecture, dtype, temperature, trainer, kind, number) for number in range(trainer.parallel.vpp)]
    model = pieces[0] if len(pieces) == 1 else torch.nn.ModuleList(pieces)
    load_hf(model, folder, architecture)
    moe.load_biases(model, folder, architecture)
    return model.to(cpu_backend.device())


def _piece(architecture: Architecture, dtype: torch.dtype, temperature: float, trainer: TrainerConfig, kind: type[PackedGPTModel],
           number: int) -> PackedGPTModel:
    """A piece of this rank's part, counted from 0, without its weights."""
    config = transformer_config(architecture, dtype, trainer)
    tp = trainer.parallel.tp
    padded = architecture.padded_vocab_size(tp)
    model = kind(
        config,
        layer_specs(config, architecture, number, norms_apart=trainer.lora.rank > 0),
        vocab_size=padded,
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage() and number == 0,
        post_process=parallel_state.is_pipeline_last_stage() and number == trainer.parallel.vpp - 1,
        vp_stage=number if trainer.parallel.vpp > 1 else None,
        position_embedding_type="none",  # PackedAttention rotates, at the positions of the layout
        share_embeddings_and_output_weights=architecture.tied,
    )
    model.temperature = temperature
    _mark_shards(model)
    if tp > 1:
        first = parallel_state.get_tensor_model_parallel_rank() * (padded // tp)
        model.vocabulary = VocabularyShard(parallel_state.get_tensor_model_parallel_group(), first, architecture.vocab_size)
    return model


def _mark_shards(model: torch.nn.Module) -> None:
    """Say of each weight along which dimension it is split; gradient norms are summed by it. Megatron-core 0.16 does so only of weights that it
    initialises, 0.19 of all."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            weight = getattr(module, "weight", None)
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, 1 if isinstance(module, RowParallelLinear) else 0, 1)
