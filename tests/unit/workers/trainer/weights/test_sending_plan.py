"""The plan for models and layouts as they are trained: nobody sends much more than the others, and buckets stay small."""

from __future__ import annotations

import math

import pytest

from workers.config import Config, Dtype, ParallelConfig, Server
from workers.model.architecture import Architecture
from workers.model.experts import MixtureOfExperts
from workers.trainer.weights.sending_plan import SendingPlan
from workers.weights.shard_plan import BUCKET_BYTES, MAX_SENDERS

COMMON = {"max_positions": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "eos_token_ids": (), "qk_norm": True}
QWEN3_8B = Architecture(family="qwen3", vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32,
                        num_kv_heads=8, head_dim=128, tied=False, **COMMON)
QWEN3_4B = Architecture(family="qwen3", vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32,
                        num_kv_heads=8, head_dim=128, tied=True, **COMMON)
QWEN3_30B_A3B = Architecture(family="qwen3_moe", vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32,
                             num_kv_heads=4, head_dim=128, tied=False, mixture=MixtureOfExperts(128, 8, 768, True), **COMMON)
BALANCE = 1.2


@pytest.mark.parametrize("server", [Server.sglang, Server.embedded])
@pytest.mark.parametrize(("architecture", "parallel", "num_ranks"), [
    (QWEN3_8B, ParallelConfig(tp=2, pp=2), 8), (QWEN3_8B, ParallelConfig(tp=4), 4), (QWEN3_8B, ParallelConfig(tp=2, cp=2), 32),
    (QWEN3_8B, ParallelConfig(), 8), (QWEN3_4B, ParallelConfig(tp=2), 4), (QWEN3_4B, ParallelConfig(), 2),
    (QWEN3_30B_A3B, ParallelConfig(ep=8), 8), (QWEN3_30B_A3B, ParallelConfig(tp=2, ep=4), 8),
    (QWEN3_30B_A3B, ParallelConfig(tp=4, pp=2, ep=8), 64)])
def test_no_rank_sends_much_more_than_the_mean(architecture: Architecture, parallel: ParallelConfig, num_ranks: int, server: Server) -> None:
    config = Config()
    config.trainer.parallel, config.engine.server, config.engine.dtype = parallel, server, Dtype.bfloat16
    plan = SendingPlan(config, architecture, num_ranks)
    model = 2 * sum(math.prod(shape) for shape in architecture.tensor_shapes().values())
    assert sum(plan.sent) == model, "every byte once"
    assert max(plan.sent) <= BALANCE * model / len(plan.senders)
    needed = parallel.pp * (parallel.ep if server is Server.sglang else max(parallel.ep, parallel.tp))
    assert min(num_ranks, MAX_SENDERS) <= len(plan.senders) <= max(MAX_SENDERS, needed)
    sizes = [[2 * math.prod(piece.shape) for piece in bucket.pieces] for bucket in plan.buckets]
    assert max(sum(size) for size, sending in zip(sizes, plan.sending, strict=True) if len(sending) > 1) <= BUCKET_BYTES
    assert {bucket.lane for bucket in plan.buckets} == set(range(len(plan.senders)))
