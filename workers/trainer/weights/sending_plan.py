"""What each training rank sends to the engines, bucket by bucket (weights.transport=nccl); every rank comes to the same plan. Pure, no torch.

    hf_conversion/holders.py   which ranks hold which shard
    weights/shard_plan.py      who sends it, in which bucket         --> `buckets` for the engines, `sending` for the ranks

The embedded engine puts slices together: what a rank sends is its own share, and nothing moves between training ranks. SGLang takes whole
tensors only (docs/second_thoughts.md): they are put together on the rank that sends them, over tensor parallelism alone.
"""

from __future__ import annotations

import math

from workers.config import Config, Server
from workers.messages.broadcasts import Bucket
from workers.model.architecture import Architecture
from workers.trainer.megatron.hf_conversion.holders import Shard, shards
from workers.weights.layout import NAMES
from workers.weights.shard_plan import BUCKET_BYTES, assign, into_buckets


class SendingPlan:
    """Of a model that `num_ranks` train. `senders`: the rank of each lane; `buckets`: in the order in which engines take them; `sending`: of each
    bucket the shards and the rank that sends them; `sent`: bytes that leave each lane once; `limit`: bytes of a bucket."""

    def __init__(self, config: Config, architecture: Architecture, num_ranks: int, limit: int = BUCKET_BYTES) -> None:
        whole, item = config.engine.server is Server.sglang, NAMES[config.engine.dtype][1]
        found = list(shards(architecture, config.trainer.parallel, num_ranks, whole))
        sizes = [item * sum(math.prod(piece.shape) for piece in shard.pieces) for shard in found]
        sources = assign(sizes, [shard.holders for shard in found])
        order = into_buckets(sizes, sources, limit)
        self.senders = sorted(set(sources))
        self.sending: list[list[tuple[Shard, int]]] = [[(found[one], sources[one]) for one in bucket] for bucket in order]
        self.buckets = [Bucket(self.senders.index(sources[bucket[0]]), [piece for one in bucket for piece in found[one].pieces]) for bucket in order]
        self.sent = [sum(size for size, source in zip(sizes, sources, strict=True) if source == sender) for sender in self.senders]
