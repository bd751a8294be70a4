"""Which tensors are broadcast together."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from workers.config import Dtype
from workers.weights.buckets import SIZES, bucket_bytes, into_buckets

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=20)


@given(SHAPES, st.integers(1, 400), st.sampled_from(list(SIZES)))
def test_every_tensor_once_in_order_and_no_bucket_larger_than_it_must_be(shapes: list[tuple[int, ...]], limit: int, dtype: Dtype) -> None:
    by_name = {str(number): shape for number, shape in enumerate(shapes)}
    buckets = into_buckets(by_name, by_name, dtype, limit)
    assert [name for names in buckets for name in names] == list(by_name)
    size_of = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}[dtype]
    for names, following in zip(buckets, [*buckets[1:], None], strict=True):
        size = bucket_bytes(names, by_name, dtype)
        assert size == sum(math.prod(by_name[name]) * size_of for name in names)
        assert size <= limit or len(names) == 1
        assert following is None or size + bucket_bytes(following[:1], by_name, dtype) > limit
