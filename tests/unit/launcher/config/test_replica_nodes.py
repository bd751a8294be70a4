"""Which replicas can be spread over nodes, and how the others are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.replica_nodes import replica_nodes
from launcher.config.schema import FullConfig
from workers.config import ClusterKind, ConfigError, EngineParallelConfig, Server, Transport


def spread(size: int, fits: int, **parallel: int) -> FullConfig:
    full = FullConfig()
    full.cluster.kind, full.cluster.inference.devices_per_node = ClusterKind.slurm, fits
    full.allocation.replica_size, full.engine.server = size, Server.sglang
    full.engine.parallel = EngineParallelConfig(**parallel)
    full.weights.transport = Transport.zmq
    return full


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 6))
def test_every_node_of_an_accepted_server_holds_as_many_devices_in_whole_stages(nodes: int, fits: int, pp: int) -> None:
    size = nodes * fits
    if size % pp:
        return
    full = spread(size, fits, tp=size // pp, pp=pp)
    if nodes > 1 and pp % nodes and nodes % pp:
        with pytest.raises(ConfigError, match=f"engine.parallel.pp={pp}: must be a multiple of {nodes}, or divide it"):
            replica_nodes(full)
        return
    assert replica_nodes(full) == nodes
    if nodes > 1:  # as SGLang lays it out
        nodes_a_stage, stages_a_node = max(nodes // pp, 1), max(pp // nodes, 1)
        assert (size // pp) % nodes_a_stage == 0 and (size // pp) // nodes_a_stage * stages_a_node == fits


@pytest.mark.parametrize(("size", "fits", "parallel", "changes", "words"), [
    (12, 8, {"tp": 12}, {}, "allocation.replica_size=12: .*whole nodes. Use a multiple of 8, or 8 or less: nodes that give different"),
    (16, 8, {"tp": 8}, {}, r"allocation.replica_size=16: .*servers have 8 \(engine.parallel.tp \* pp\). Use allocation.replica_size=8:"),
    (32, 8, {"tp": 16}, {}, "Use allocation.replica_size=16:"),
    (16, 8, {"tp": 16, "dp_attention": 2}, {}, "engine.parallel.dp_attention=2: must be 1 with a replica over 2 nodes"),
    (16, 8, {"tp": 16}, {"dir": "/fast"}, "weights.dir='/fast': must be auto"),
])
def test_what_cannot_be_spread_is_refused(size: int, fits: int, parallel: dict[str, int], changes: dict[str, Any], words: str) -> None:
    full = spread(size, fits, **parallel)
    full.weights = dataclasses.replace(full.weights, **changes)
    with pytest.raises(ConfigError, match=words):
        replica_nodes(full)


def test_only_slurm_gives_several_nodes_and_weights_are_broadcast_to_them_as_to_one() -> None:
    full = spread(16, 8, tp=16)
    full.cluster.kind = ClusterKind.local
    assert replica_nodes(full) == 1
    for parallel, transport in (({"tp": 16}, Transport.nccl), ({"tp": 8, "pp": 2}, Transport.zmq)):
        full = spread(16, 8, **parallel)
        full.weights.transport, full.allocation.num_devices = Transport.auto, 32
        full.settle()
        assert (replica_nodes(full), full.weights.transport) == (2, transport)
