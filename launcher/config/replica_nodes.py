"""Replicas of more devices than a node has: each is one server over whole nodes, which its array element gets together. Pure."""

from __future__ import annotations

from launcher.config.schema import FullConfig
from workers.config import Transport, require


def replica_nodes(config: FullConfig) -> int:
    """The nodes of one rollout worker's replica. Raises `ConfigError` where it cannot be spread over so many."""
    nodes = config.replica_nodes
    if nodes == 1:
        return 1
    size, fits, parallel = config.allocation.replica_size, config.devices_per_node("inference"), config.engine.parallel
    large = f"is more than the {fits} devices of an inference node"
    require(size % fits == 0, "allocation.replica_size", size, f"{large}, so that it must be whole nodes",
            f"Use a multiple of {fits}, or {fits} or less: nodes that give different numbers of devices make no server")
    require(parallel.unit == size, "allocation.replica_size", size,
            f"{large}, which is for one server of as many, and servers have {parallel.unit} (engine.parallel.tp * pp)",
            f"Use allocation.replica_size={max(fits, parallel.unit)}: more replicas do the same"
            if fits % parallel.unit == 0 or parallel.unit % fits == 0 else f"Let engine.parallel.tp * pp be {size}, or divide {fits}")
    over = f"with a replica over {nodes} nodes"
    require(parallel.pp % nodes == 0 or nodes % parallel.pp == 0, "engine.parallel.pp", parallel.pp,
            f"must be a multiple of {nodes}, or divide it, {over}", "Each node holds whole stages, or each stage has whole nodes")
    require(parallel.dp_attention == 1, "engine.parallel.dp_attention", parallel.dp_attention, f"must be 1 {over}",
            "SGLang's processes would then send each other pickles over ports that are open to the network")
    if config.evaluates:
        return nodes
    require(config.weights.transport is Transport.disk or config.weights.dir == "auto", "weights.dir", config.weights.dir, f"must be auto {over}",
            "All its nodes load a version by the same path, each from its own memory; or use weights=disk")
    return nodes
