"""Which ranks hold what: every number of the model in exactly one shard, and on exactly the ranks that Megatron-core's order says."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from megatron.core.parallel_state import RankGenerator

from tests.unit.workers.trainer.megatron.hf_conversion.test_hf_conversion import splits
from workers.config import ConfigError, ParallelConfig
from workers.model.architecture import Architecture
from workers.model.parallel_limits import check_parallel, expert_tensor_parallel
from workers.trainer.megatron.hf_conversion.holders import shards
from workers.trainer.megatron.hf_conversion.names import Split, expert_rank_of, stage_of


@st.composite
def laid_out(draw: Any) -> tuple[Architecture, ParallelConfig, int]:
    """A model, a layout that it allows, and the number of ranks."""
    architecture, tp = draw(splits())
    layouts = []
    for pp, cp, ep in itertools.product((1, 2, 3), (1, 2), (1, 2, 3)):
        parallel = ParallelConfig(tp=tp, pp=pp, cp=cp, ep=ep)
        try:
            check_parallel(architecture, parallel)
        except ConfigError:
            continue
        layouts.append(parallel)
    parallel = draw(st.sampled_from(layouts))
    experts = expert_tensor_parallel(parallel) * parallel.ep
    copies = draw(st.sampled_from([dp for dp in range(1, 7) if parallel.tp * parallel.cp * dp % experts == 0] or [experts]))
    return architecture, parallel, parallel.unit * copies


@settings(max_examples=150)
@given(laid_out(), st.booleans())
def test_every_number_is_in_one_shard(case: tuple[Architecture, ParallelConfig, int], whole: bool) -> None:
    architecture, parallel, num_ranks = case
    counts = {name: np.zeros(shape, int) for name, shape in architecture.tensor_shapes().items()}
    for shard in shards(architecture, parallel, num_ranks, whole):
        assert len(shard.pieces) == len(shard.tensors.names) and (shard.share is None or not whole)
        for piece in shard.pieces:
            counts[piece.name][tuple(slice(start, start + size) for start, size in zip(piece.starts, piece.shape, strict=True))] += 1
            assert np.prod(piece.shape) > 0, "padding is not sent"
            assert piece.shape == list(counts[piece.name].shape) or not whole
    assert all((count == 1).all() for count in counts.values())


@settings(max_examples=150)
@given(laid_out(), st.booleans())
def test_holders_are_those_of_megatron_cores_order(case: tuple[Architecture, ParallelConfig, int], whole: bool) -> None:
    architecture, parallel, num_ranks = case
    split = expert_tensor_parallel(parallel)
    dense = RankGenerator(parallel.tp, 1, num_ranks // parallel.unit, parallel.pp, parallel.cp, "tp-cp-ep-dp-pp")
    experts = RankGenerator(split, parallel.ep, num_ranks // (split * parallel.ep * parallel.pp), parallel.pp, 1, "tp-cp-ep-dp-pp")
    for shard in shards(architecture, parallel, num_ranks, whole):
        order = dense if shard.tensors.expert is None else experts
        stages = [set(ranks) for ranks in zip(*order.get_ranks("pp"), strict=True)]
        expected = stages[stage_of(shard.tensors, architecture.num_layers, parallel.pp)]
        if shard.tensors.expert is not None:
            expected &= {ranks[expert_rank_of(shard.tensors, architecture, parallel.ep)] for ranks in order.get_ranks("ep")}
        if shard.share is not None:
            expected &= {ranks[shard.share] for ranks in order.get_ranks("tp")}
        assert set(shard.holders) == expected and len(shard.holders) == len(expected)
        assert shard.share is not None or whole or shard.tensors.split is Split.none or order.tp == 1
