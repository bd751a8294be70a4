"""Which models can be split over ranks in which way: checked before anything is submitted, without torch.

Megatron-core splits matrices by whole attention heads (those of queries and of keys and values), MLPs by their inner size, the vocabulary
after padding it, layers in equal stages, and experts in equal numbers.
"""

from __future__ import annotations

from workers.config import ConfigError, EngineParallelConfig, ParallelConfig, TrainerConfig, require
from workers.model.adapter_shapes import check_adapters
from workers.model.architecture import Architecture


def expert_tensor_parallel(parallel: ParallelConfig) -> int:
    """Over how many ranks one expert is split: like everything else, or not at all where whole experts are dealt out (ep > 1)."""
    return parallel.tp if parallel.ep == 1 else 1


def check_training(architecture: Architecture, trainer: TrainerConfig) -> None:
    """Check that a model of `architecture` can be trained so: its layout, and the adapters. Raises `ConfigError`."""
    check_parallel(architecture, trainer.parallel)
    require(trainer.parallel.vpp == 1 or not trainer.lora.rank, "trainer.parallel.vpp", trainer.parallel.vpp,
            f"must be 1 with trainer.lora.rank={trainer.lora.rank}: adapters know of one piece of the model on each device", "Use 1")
    check_adapters(architecture, trainer.lora)


def check_parallel(architecture: Architecture, parallel: ParallelConfig) -> None:
    """Check that a model of `architecture` can be spread as `parallel` says. Raises `ConfigError`."""
    mixture = architecture.mixture
    split = {"num_attention_heads": architecture.num_heads, "num_key_value_heads": architecture.num_kv_heads}
    if mixture is None or mixture.num_dense:
        split["intermediate_size"] = architecture.intermediate_size
    if mixture is not None and expert_tensor_parallel(parallel) > 1:
        split["moe_intermediate_size"] = mixture.intermediate_size
    if mixture is not None and mixture.shared_size:
        split["n_shared_experts * moe_intermediate_size"] = mixture.shared_size
    if latent := architecture.latent:
        split |= {"q_lora_rank": latent.query_rank, "kv_lora_rank + qk_rope_head_dim": latent.kv_rank + latent.rope_dim}
    _check_divides("trainer.parallel.tp", parallel.tp, split)
    _check_divides("trainer.parallel.pp", parallel.pp, {"num_hidden_layers": architecture.num_layers})
    of_a_stage = architecture.num_layers // parallel.pp
    _check_divides("trainer.parallel.vpp", parallel.vpp, {f"num_hidden_layers / {parallel.pp}": of_a_stage})
    if mixture is None:
        require(parallel.ep == 1, "trainer.parallel.ep", parallel.ep, f"a {architecture.family} model has no experts to share", "Use 1")
        return
    _check_divides("trainer.parallel.ep", parallel.ep, {"num_experts": mixture.num_experts})
    require(parallel.tp == 1 or parallel.sequence, "trainer.parallel.sequence", parallel.sequence,
            f"must be true for a mixture of experts with trainer.parallel.tp={parallel.tp}: each of these ranks routes tokens of its own", "Use true")


def check_engine(architecture: Architecture, parallel: EngineParallelConfig) -> None:
    """Check that SGLang can serve a model of `architecture` spread as `parallel` says. Raises `ConfigError`.

    It splits queries by whole heads over the ranks that share a request's attention, copies keys and values where there are more ranks than
    heads of them, and takes stages of different size.
    """
    ranks = parallel.tp // parallel.dp_attention
    _check_divides("engine.parallel.tp / engine.parallel.dp_attention", ranks, {"num_attention_heads": architecture.num_heads})
    heads = architecture.num_kv_heads
    require(heads % ranks == 0 or ranks % heads == 0, "engine.parallel.tp", parallel.tp,
            f"must divide the model's num_key_value_heads={heads}, or be a multiple of them", "Use a power of two, for most models")
    require(parallel.pp <= architecture.num_layers, "engine.parallel.pp", parallel.pp, f"must be at most num_hidden_layers={architecture.num_layers}",
            "Each rank holds a layer at least")
    if architecture.mixture is None:
        require(parallel.ep == 1, "engine.parallel.ep", parallel.ep, f"a {architecture.family} model has no experts to share", "Use 1")
    else:
        _check_divides("engine.parallel.ep", parallel.ep, {"num_experts": architecture.mixture.num_experts})


def _check_divides(key: str, ranks: int, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size % ranks:
            fitting = [number for number in range(1, 2 * ranks) if all(other % number == 0 for other in sizes.values())]
            raise ConfigError(f"{key}={ranks}: must divide the model's {name}={size}. Use one of {fitting}")
