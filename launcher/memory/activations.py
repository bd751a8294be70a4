"""What the forward pass of a training rank keeps for its backward pass, from the config and the model's shapes. Pure.

The layers are Megatron-core's local ones as this trainer builds them (workers/trainer/megatron/model/layers.py), counted tensor by tensor as in
"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, Section 4), for grouped queries, gated MLPs and
attention that keeps no scores. Transformer Engine's layers keep less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workers.config import Config, Dtype, Recompute
from workers.model.architecture import Architecture
from workers.model.parallel_limits import expert_tensor_parallel

MIB, GIB = 2**20, 2**30
BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}
LOGITS_BYTES = {False: 128 * MIB, True: GIB // 2}
"""The float32 logits of a chunk, on CPUs and on GPUs: MAX_LOGITS_BYTES and MAX_LOGITS_BYTES_ACCELERATOR of trainer/megatron/model/lm_head.py."""
MAX_BRANCH_TOKENS = 2048
"""As in workers/trainer/batch/sequence_layout.py: responses that are longer get a copy of the prompt of their own."""


@dataclass(frozen=True)
class Layout:
    """How training is spread, on GPUs or on CPUs; `tokens` of a micro-batch, of which each context-parallel rank has its part."""

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    sequence: bool
    gpu: bool
    tokens: int


def layout(config: Config, num_train_devices: int, gpu: bool) -> Layout:
    """The layout of a plan in which training has `num_train_devices`."""
    parallel, trainer = config.trainer.parallel, config.trainer
    copies = max(1, num_train_devices // parallel.unit)
    # A minibatch may be smaller than a micro-batch is allowed to be.
    groups = math.ceil(trainer.batch_groups / trainer.num_minibatches / copies)
    tokens = min(trainer.microbatch_tokens, groups * config.group_size * config.engine.context_length)
    return Layout(parallel.tp, parallel.pp, parallel.vpp, parallel.cp, parallel.ep, expert_tensor_parallel(parallel), copies,
                  parallel.sequence and parallel.tp > 1, gpu, tokens)


def kept_bytes(config: Config, architecture: Architecture, spread: Layout, layers: Sequence[int], in_flight: float, last: bool = True) -> float:
    """Of a pipeline stage, the `last` or not, with these layers: of `in_flight` micro-batches, as the 1F1B schedule keeps them (arXiv 2104.04473,
    Section 2.2), of which interleaved stages keep parts."""
    with_experts = sum(architecture.has_experts(layer) for layer in layers)
    numbers = {True: with_experts, False: len(layers) - with_experts}
    kept = sum(number * layer_bytes(config, architecture, spread, experts)[0] for experts, number in numbers.items() if number)
    end = architecture.hidden_size * (_norm(config, spread) + BYTES[config.trainer.dtype]) if last else 0  # the last norm, and its rows
    return spread.tokens / spread.cp * (in_flight * (kept + _mask(config, spread)) + end)


def transient_bytes(config: Config, architecture: Architecture, spread: Layout, last: bool) -> float:
    """What is there only while it is worked on: the logits, where the stage is the `last`, or a layer: what is made again for it, or the
    gradients of what it kept. Where a mixture is made again, its experts' outputs and two gradients in the order of the experts come to it; and the
    gradients of its experts' matrices, before they are added to the float32 ones."""
    kinds = {architecture.has_experts(layer) for layer in (0, architecture.num_layers - 1)}
    layer = spread.tokens / spread.cp * max(layer_bytes(config, architecture, spread, experts)[1] for experts in kinds)
    again = config.trainer.recompute is Recompute.full or (config.trainer.recompute is Recompute.selective and spread.gpu)
    if architecture.mixture is not None and again:
        sent = architecture.mixture.experts_per_token * architecture.hidden_size / (spread.tp // spread.etp)
        layer += 3 * BYTES[config.trainer.dtype] * sent * spread.tokens / spread.cp
    layer += _grouped_bytes(config, architecture, spread)
    return max(layer, logits_bytes(config, architecture, spread)) if last else layer


def _grouped_bytes(config: Config, architecture: Architecture, spread: Layout) -> float:
    """Of the larger product of a rank's experts in its backward pass (workers/trainer/megatron/model/grouped_experts.py): their gradients as they are
    made and in float32; with adapters, which leave the experts alone, their matrices side by side."""
    if architecture.mixture is None:
        return 0.0
    matrices = architecture.mixture.num_experts / spread.ep * 2 * architecture.mixture.intermediate_size * architecture.hidden_size / spread.etp
    size = BYTES[config.trainer.dtype]
    return matrices * (size if config.trainer.lora.rank or size == 4 else size + 4)


def layer_bytes(config: Config, architecture: Architecture, spread: Layout, experts: bool) -> tuple[float, float]:
    """Bytes for each of a rank's tokens that one layer, with `experts` or without, keeps for its backward pass with this config's `recompute`, and
    without any."""
    size, hidden, latent = BYTES[config.trainer.dtype], architecture.hidden_size, architecture.latent
    query, keys = architecture.num_heads * architecture.head_dim / spread.tp, 2 * architecture.num_kv_heads * architecture.head_dim / spread.tp
    between = spread.tp if spread.sequence else 1
    norms = 2 * _norm(config, spread) * hidden / between
    if architecture.qk_norm:
        norms += (_norm(config, spread) - size) * (query + keys / 2)  # what they put out is rotated, and not kept
    # Attention on CPUs is computed in float32.
    inside = (size if spread.gpu else 4) * (2 * query + keys * _key_copies(config) * _keys_of_others(config, spread))
    around = 0.0 if spread.gpu and not _shared(config)[0] else size * query  # its outputs, in another order than it makes them
    inputs = query + keys
    if latent is not None:
        norms += _norm(config, spread) * (latent.query_rank + latent.kv_rank) / between
        around = size * architecture.num_heads * latent.value_dim / spread.tp  # its outputs without what makes values as long as keys
        inputs = query + keys / 2 + architecture.num_heads * (latent.nope_dim + latent.value_dim) / spread.tp
    mlp = _mlp(architecture, spread, experts) * size
    full = norms + inside + around + mlp
    kept = {
        Recompute.none: full,
        Recompute.selective: full - mlp if spread.gpu else norms + size * inputs + around + mlp,  # on CPUs attention's inputs, not its inside
        Recompute.full: size * hidden / between,
    }[config.trainer.recompute]
    return kept, full


def _norm(config: Config, spread: Layout) -> int:
    """Bytes that a norm keeps of each number: input and output on GPUs; on CPUs float32 copies of input and normalised input besides the output."""
    size = BYTES[config.trainer.dtype]
    return 2 * size if spread.gpu else 8 + size


def _mlp(architecture: Architecture, spread: Layout, experts: bool) -> float:
    """Numbers that the MLP keeps of each token: gate and up, and their product; on CPUs also up once more and gate's SiLU (TransformerConfig
    without bias_activation_fusion). In a mixture also what goes into the router and into each of a token's experts; on CPUs gate's SiLU and the
    product before it is weighted. Experts are taken to be equally busy."""
    mixture = architecture.mixture if experts else None
    if mixture is None:
        return (3 if spread.gpu else 5) * architecture.intermediate_size / spread.tp
    hidden = architecture.hidden_size / (spread.tp // spread.etp)  # ranks that hold whole experts have tokens of their own
    kept = (3 if spread.gpu else 5) * mixture.intermediate_size / spread.tp
    shared = (3 if spread.gpu else 5) * mixture.shared_size / spread.tp
    return mixture.experts_per_token * (kept + hidden) + architecture.hidden_size / spread.tp + shared


def _shared(config: Config) -> tuple[int, int, int]:
    """Samples, prompt and response lengths of a group whose samples share its prompt, each as long as it may be; no samples: nothing is shared."""
    response = config.workflow.max_new_tokens
    prompt = config.engine.context_length - response
    shares = config.trainer.share_prompts and response <= MAX_BRANCH_TOKENS and config.group_size > 1
    return (config.group_size if shares else 0), prompt, response


def _key_copies(config: Config) -> float:
    """Keys and values that attention gathers, over those of the tokens: each response has its own copy of the prompt's."""
    samples, prompt, response = _shared(config)
    return 1 + samples * prompt / (prompt + samples * response)


def _keys_of_others(config: Config, spread: Layout) -> float:
    """Keys and values that a context-parallel rank attends to, over those of its own tokens: it has two slices of the micro-batch, one from each
    end, and each attends to what stands before it: to the slices up to it, or to the beginning of its sequence."""
    return 1.0 if spread.cp == 1 else min(spread.cp + 0.5, 1 + 2 * config.engine.context_length * spread.cp / spread.tokens)


def _mask(config: Config, spread: Layout) -> float:
    """Bytes a token of the masks of responses that share a prompt. They serve all layers; GPUs need none."""
    samples, prompt, response = _shared(config)
    return 0.0 if spread.gpu else 4 * samples * response * (prompt + response) / (prompt + samples * response)


def logits_bytes(config: Config, architecture: Architecture, spread: Layout) -> float:
    """A chunk's logits and a slice of their exponentials, in bfloat16 also the rounded ones; or, there, these and the gradient of the output weight
    before it is added."""
    size, rows = BYTES[config.trainer.dtype], architecture.vocab_size / spread.tp
    chunk = min(LOGITS_BYTES[spread.gpu], 4 * rows * spread.tokens / spread.cp)
    if config.trainer.lora.rank and size == 2:
        return chunk * 1.5  # the weight is frozen
    return chunk * 1.125 if size == 4 else max(chunk * 1.5, chunk / 2 + rows * architecture.hidden_size * size)
