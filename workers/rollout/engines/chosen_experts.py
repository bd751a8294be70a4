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


class RoutingError(ValueError):
    """What a server tells does not fit the model."""


def packed(told: object, shape: RoutingShape, num_tokens: int) -> bytes:
    """`told` of a request's `num_tokens` tokens, packed. Raises `RoutingError`."""
    all_layers = shape.num_dense + shape.num_layers
    wanted = f"{num_tokens - 1} tokens, {all_layers} layers and {shape.experts_per_token} of {shape.num_experts} experts"
    try:
        numbers = np.frombuffer(base64.b64decode(told if isinstance(told, str) else "", validate=True), "<i4")
        experts = numbers.reshape(num_tokens - 1, all_layers, shape.experts_per_token)[:, shape.num_dense:]
    except (binascii.Error, ValueError) as error:
        raise RoutingError(f"engine: routed_experts that do not fit ({error}): must be of {wanted} (algorithm.router_replay). Serve the model as its "
                           "config.json says, or set algorithm.router_replay=off") from error
    if experts.size and not 0 <= experts.min() <= experts.max() < shape.num_experts:
        raise RoutingError(f"engine: routed_experts from {experts.min()} to {experts.max()}: must be of {wanted}. Set algorithm.router_replay=off")
    return experts.astype(shape.dtype).tobytes()
