"""The calls that change weights: from a folder, or by broadcast in a weight group.

    POST /update_weights_from_disk ------------------------------------------> engine: read, swap
    POST /swap_weights -----> read (a thread), while the engine generates ---> engine: swap, between two steps
    POST /init_weights_update_group ---> member of the group (rank 0 is the trainer)
    POST /begin_weight_update ---------> session
    POST /update_weights_from_distributed (again and again) ---> receive (a thread), keep aside
    POST /end_weight_update ---------------------------------------------------> engine: swap

The calls, their fields and order are SGLang's, but for /swap_weights and slices of tensors, which it lacks. SGLang loads every bucket as it
comes, so that an update that breaks off leaves a mixture; here the old weights serve until the end, and an update must bring every tensor.
SGLang checks hardly anything in a folder; here nothing but a complete model of the same architecture is taken. update_weights_from_tensor is
missing: its payload is a pickle, and the folder in shared memory does the same. A client that leaves does not stop an update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp import web

from workers.model.architecture import Architecture, ModelError
from workers.rollout.engines.servers.embedded import api
from workers.rollout.engines.servers.embedded.api import RequestError, decode_body, require
from workers.rollout.engines.servers.embedded.engine_loop import Engine
from workers.rollout.engines.servers.embedded.gate import Gate

if TYPE_CHECKING:
    import torch

    from workers.weights.update_group import BroadcastGroup

GROUP_TIMEOUT_S = 300.0
"""How long a member waits for the others, and for a broadcast. SGLang has torch's default, half an hour."""
NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are paused in place. Send flush_cache=false, or pause by retract"


class Swap(msgspec.Struct, forbid_unknown_fields=True):
    """POST /swap_weights: as /update_weights_from_disk in a pause by `mode`, but the pause."""

    model_path: str
    weight_version: str | None = None
    mode: Literal["retract", "in_place"] = "retract"


@dataclass
class Session:
    """An update by broadcast that has begun: what has come so far; `missing`: items of tensors of which not all slices have come."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    slices: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    version: str | None = None
    flush: bool = False

    def take(self, name: str, tensor: torch.Tensor, starts: list[int] | None, shape: tuple[int, ...]) -> None:
        """Keep `tensor`, all of `name`, whose shape is `shape`, or the slice of it at `starts`. Raises `RequestError`."""
        if starts is None:
            require(tuple(tensor.shape) == shape, name, tuple(tensor.shape), f"its shape must be {shape}", "Send this model's weights")
            self.tensors[name] = tensor
            return
        fits = len(starts) == len(shape) == tensor.dim() and all(
            0 <= start <= start + length <= size for start, length, size in zip(starts, tensor.shape, shape, strict=True))
        require(fits, name, (starts, tuple(tensor.shape)), f"must be a slice of shape {shape}", "Send this model's weights")
        require((name, tuple(starts)) not in self.slices, name, starts, "has come before", "Send each slice once")
        self.slices.add((name, tuple(starts)))
        whole = self.tensors.setdefault(name, tensor.new_empty(shape))
        whole[tuple(slice(start, start + length) for start, length in zip(starts, tensor.shape, strict=True))] = tensor
        self.missing[name] = self.missing.get(name, whole.numel()) - tensor.numel()


class WeightUpdates:
    """Serves the calls. `model_path` and `version`: what was loaded last."""

    def __init__(self, engine: Engine, gate: Gate, architecture: Architecture, model_path: Path, version: str) -> None:
        self.model_path, self.version = model_path, version
        self._engine, self._gate, self._shapes = engine, gate, architecture.tensor_shapes()
        self._groups: dict[str, BroadcastGroup] = {}
        self._one_call_of_a_group = asyncio.Lock()
        self._session: Session | None = None

    def routes(self) -> list[web.RouteDef]:
        """What the server serves of this."""
        return [
            web.post("/update_weights_from_disk", _serving(api.UpdateWeights, self._from_disk)),
            web.post("/swap_weights", _serving(Swap, self._swap)),
            web.post("/init_weights_update_group", _serving(api.InitGroup, self._init_group)),
            web.post("/destroy_weights_update_group", _serving(api.DestroyGroup, self._destroy_group)),
            web.post("/begin_weight_update", _serving(api.Begin, self._begin)),
            web.post("/update_weights_from_distributed", _serving(api.FromDistributed, self._from_distributed)),
            web.post("/end_weight_update", _serving(api.End, self._end)),
        ]

    async def _from_disk(self, body: api.UpdateWeights) -> str:
        folder = _folder_of(body)
        async with self._gate.update():
            flushed = await asyncio.wrap_future(self._engine.update_weights(folder, body.weight_version, body.flush_cache))
        self.model_path = folder
        return self._loaded(flushed, body.weight_version)

    async def _swap(self, body: Swap) -> str:
        folder = _folder_of(body)
        async with self._gate.turn:  # so there are never more than two sets of weights
            weights = await asyncio.to_thread(self._engine.load_weights, folder)
            await asyncio.wrap_future(self._engine.exchange_weights(weights, body.weight_version, body.mode))
            self.model_path = folder
            return self._loaded(True, body.weight_version)

    async def _init_group(self, body: api.InitGroup) -> str:
        from workers.rollout.engines.servers.embedded.weight_buckets import join

        require(body.group_name not in self._groups, "group_name", body.group_name, "is a group already", "Give a new name")
        async with self._one_call_of_a_group:
            self._groups[body.group_name] = await asyncio.to_thread(join, body, GROUP_TIMEOUT_S)
        return f"Rank {body.rank_offset} of {body.world_size} in weight group {body.group_name}."

    async def _destroy_group(self, body: api.DestroyGroup) -> str:
        async with self._one_call_of_a_group:
            require(body.group_name in self._groups, "group_name", body.group_name, "is no group", "Call /init_weights_update_group first")
            await asyncio.to_thread(self._groups.pop(body.group_name).close)
        return f"Weight group {body.group_name} is left."

    async def _begin(self, body: api.Begin) -> str:
        if self._session is not None:
            raise RequestError("a weight-update session is already open. Call /end_weight_update first")
        async with self._gate.update(in_session=True):
            self._session = Session()
        return "The weight-update session is open."

    async def _from_distributed(self, body: api.FromDistributed) -> str:
        from workers.rollout.engines.servers.embedded.weight_buckets import receive

        session = self._session
        if session is None:
            raise RequestError("/update_weights_from_distributed must stand between /begin_weight_update and /end_weight_update. Begin first")
        async with self._gate.update(in_session=True), self._one_call_of_a_group:
            require(body.group_name in self._groups, "group_name", body.group_name, "is no group", "Call /init_weights_update_group first")
            require(not body.starts or len(body.starts) == len(body.names), "starts", len(body.starts or []), f"must be {len(body.names)}, as names",
                    "Give each tensor its own")
            tensors = await asyncio.to_thread(receive, self._groups[body.group_name], body)
        for place, (name, tensor) in enumerate(zip(body.names, tensors, strict=True)):
            session.take(name, tensor, body.starts[place] if body.starts else None, self._shapes.get(name, tuple(tensor.shape)))
        session.flush |= body.flush_cache
        session.version = body.weight_version or session.version
        return f"{len(tensors)} tensors have come."

    async def _end(self, body: api.End) -> str:
        session, self._session = self._session, None
        if session is None:
            raise RequestError("no weight-update session is open. Call /begin_weight_update first")
        if not session.tensors:
            return "Nothing has changed."
        incomplete = sorted(name for name, items in session.missing.items() if items)
        require(not incomplete, "slices", incomplete[:1], "must make up the whole tensor", "Send each slice once")
        async with self._gate.update(in_session=True):
            flushed = await asyncio.wrap_future(self._engine.update_weights(session.tensors, session.version, session.flush))
        return self._loaded(flushed, session.version)

    def _loaded(self, flushed: bool, version: str | None) -> str:
        if not flushed:
            raise RequestError(NOT_FLUSHED)
        self.version = version or self.version
        return f"Weights {self.version} are serving."


def _folder_of(body: api.UpdateWeights | Swap) -> Path:
    require("\0" not in body.model_path, "model_path", body.model_path, "must be a path", "Give the folder of a model")
    return Path(body.model_path)


def _serving(kind: type[api.Body], work: Callable[[Any], Awaitable[str]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that does `work` with the body, to its end even if the client leaves, and says how it went."""
    async def handler(http: web.Request) -> web.Response:
        try:
            message = await asyncio.shield(asyncio.ensure_future(work(decode_body(await http.read(), kind))))
        except (RequestError, ModelError) as error:
            return _answer(False, str(error))
        return _answer(True, message)

    return handler


def _answer(success: bool, message: str) -> web.Response:
    told = msgspec.json.encode({"success": success, "message": message, "num_paused_requests": 0})
    return web.Response(body=told, status=200 if success else 400, content_type="application/json")
