"""Which models can be split over ranks in which way: checked before anything is submitted, without torch.

Megatron-core splits matrices by whole attention heads (those of queries and of keys and values), MLPs by their inner size, the vocabulary
after padding it, layers in equal stages, and experts in equal numbers.
"""

from __future__ import annotations

from workers.config import ConfigError, ParallelConfig, require
from workers.weights.architecture import Architecture


def expert_tensor_parallel(parallel: ParallelConfig) -> int:
    """Over how many ranks one expert is split: like everything else, or not at all where whole experts are dealt out (ep > 1)."""
    return parallel.tp if parallel.ep == 1 else 1


def check_parallel(architecture: Architecture, parallel: ParallelConfig) -> None:
    """Check that a model of `architecture` can be spread as `parallel` says. Raises `ConfigError`."""
    mixture = architecture.mixture
    split = {"num_attention_heads": architecture.num_heads, "num_key_value_heads": architecture.num_kv_heads}
    if mixture is None:
        split["intermediate_size"] = architecture.intermediate_size
    elif expert_tensor_parallel(parallel) > 1:
        split["moe_intermediate_size"] = mixture.intermediate_size
    _check_divides("tp", parallel.tp, split)
    _check_divides("pp", parallel.pp, {"num_hidden_layers": architecture.num_layers})
    if mixture is None:
        require(parallel.ep == 1, "trainer.parallel.ep", parallel.ep, f"a {architecture.family} model has no experts to share", "Use 1")
        return
    _check_divides("ep", parallel.ep, {"num_experts": mixture.num_experts})
    require(parallel.tp == 1 or parallel.sequence, "trainer.parallel.sequence", parallel.sequence,
            f"must be true for a mixture of experts with trainer.parallel.tp={parallel.tp}: each of these ranks routes tokens of its own", "Use true")


def _check_divides(key: str, ranks: int, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size % ranks:
            fitting = [number for number in range(1, 2 * ranks) if all(other % number == 0 for other in sizes.values())]
            raise ConfigError(f"trainer.parallel.{key}={ranks}: must divide the model's {name}={size}. Use one of {fitting}")
