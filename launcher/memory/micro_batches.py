"""Micro-batches that nobody asked for are as large as there is memory for. Pure."""

from __future__ import annotations

from launcher.config.schema import FullConfig
from launcher.memory.capacity import Capacities
from launcher.memory.fit import needs
from launcher.memory.parameters import count_weights
from workers.model.architecture import Architecture


def lower(config: FullConfig, architecture: Architecture, capacities: Capacities) -> bool:
    """Make micro-batches that nobody asked for smaller, down to a longest sample, until what they decide fits; returns whether that was needed."""
    asked, least = config.trainer.microbatch_tokens, config.engine.context_length
    weights = count_weights(architecture)
    while config.trainer.microbatch_tokens > least and any(
            "trainer.microbatch_tokens" in need.keys and not need.fits for need in needs(config, architecture, weights, capacities)):
        config.trainer.microbatch_tokens = max(least, config.trainer.microbatch_tokens // 2)
    return config.trainer.microbatch_tokens < asked
