"""The experts that a server chose, as it tells them and as they travel.

    meta_info.routed_experts: base64 of int32 [tokens but the last, all layers, experts per token]      SGLang's format
        --layers with experts, small integers--> bytes [tokens but the last, layers with experts, experts per token]

They are those that belong to the keys and values that the server held when the request ended: where it computed a token's again (after retract or
abort, under new weights, or on another server), the choice of that time. So the last answer has them for all tokens before it.
"""

from __future__ import annotations

import base64
import binascii

import numpy as np

from workers.config import RoutingShape
from workers.messages.groups import distinct


class RoutingError(ValueError):
    """What a server tells does not fit the model."""


def packed(told: object, shape: RoutingShape, num_tokens: int) -> bytes:
    """`told` of a request's `num_tokens` tokens, packed. Raises `RoutingError`."""
    all_layers = shape.num_dense + shape.num_layers
    try:
        numbers = np.frombuffer(base64.b64decode(told if isinstance(told, str) else "", validate=True), "<i4")
        experts = numbers.reshape(num_tokens - 1, all_layers, shape.experts_per_token)[:, shape.num_dense:]
        if experts.size and not (0 <= experts.min() <= experts.max() < shape.num_experts and distinct(experts)):
            raise ValueError("there are no such experts, or one twice in a layer")
    except (binascii.Error, ValueError) as error:
        raise RoutingError(
            f"engine: routed_experts that do not fit: {error}; must be of {num_tokens - 1} tokens and {all_layers} layers, "
            f"{shape.experts_per_token} of {shape.num_experts} experts each. Serve the model as its config.json says, or set "
            "algorithm.router_replay=off") from error
    return experts.astype(shape.dtype).tobytes()
