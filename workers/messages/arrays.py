"""Array fields of messages: numpy arrays whose class fixes the dtype, so that a decoder can check what arrives."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np


class TypedArray(np.ndarray):
    """A one-dimensional array of one fixed little-endian dtype."""

    wire_dtype: ClassVar[str] = ""

    @classmethod
    def of(cls, values: object) -> Self:
        """`values` as this type; raises ValueError where they are not one-dimensional or would not fit."""
        array = np.asarray(values)
        if array.ndim != 1:
            raise ValueError(f"shape {array.shape}: an array field has one dimension. Flatten it and send the lengths")
        if array.size and not np.can_cast(array.dtype, cls.wire_dtype, casting="same_kind"):
            raise ValueError(f"dtype {array.dtype}: cannot be sent as {cls.wire_dtype}. Convert it first")
        return np.ascontiguousarray(array, dtype=cls.wire_dtype).view(cls)


class Int32(TypedArray):
    """Token ids, lengths, versions."""

    wire_dtype = "<i4"


class Float32(TypedArray):
    """Log-probs and rewards."""

    wire_dtype = "<f4"


class Uint8(TypedArray):
    """Bytes: numbers of experts, of one byte or two each (workers/config/generation.py: RoutingShape)."""

    wire_dtype = "|u1"


class Bool(TypedArray):
    """Masks."""

    wire_dtype = "|b1"
