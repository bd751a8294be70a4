"""Which tensors of a model are broadcast together, in one flat run of bytes (SGLang's load_format=flattened_bucket). No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from workers.config import Dtype

BUCKET_BYTES = 256 << 20
SIZES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}


def into_buckets(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], dtype: Dtype, limit: int = BUCKET_BYTES) -> list[list[str]]:
    """`names`, in this order, in buckets of at most `limit` bytes; a larger tensor has one of its own."""
    buckets: list[list[str]] = []
    size = 0
    for name in names:
        length = math.prod(shapes[name]) * SIZES[dtype]
        if not buckets or size + length > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += length
    return buckets


def bucket_bytes(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], dtype: Dtype) -> int:
    """The length of a bucket of these tensors."""
    return sum(math.prod(shapes[name]) for name in names) * SIZES[dtype]
