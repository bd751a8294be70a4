"""The model behind the engine: forwards and sampling with torch, as the engine's loop calls them."""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from workers.model.architecture import Architecture
from workers.rollout.engines.servers.embedded.model import Model
from workers.rollout.engines.servers.embedded.model_weights import Weights
from workers.rollout.engines.servers.embedded.requests import Copy, Request, Segment
from workers.rollout.engines.servers.embedded.sampling import SamplingBatch, sample

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Have malloc reuse freed memory instead of giving it back: faulting pages in again made a weight update 2-4 times slower."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; elsewhere it is only slower
        for parameter, value in ((_M_MMAP_THRESHOLD, 32 * 2**20), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)):
            libc.mallopt(parameter, value)


class Forward:
    """A `Compute` (engine_loop.py): `Model`, and the sampling parameters of the batch that it decodes."""

    def __init__(self, model: Model, num_threads: int) -> None:
        self._model, self._num_threads = model, num_threads
        self._batch_of: list[Request] = []
        self._batch = SamplingBatch.of([], 0)

    @classmethod
    def start(cls, options: argparse.Namespace, architecture: Architecture) -> Forward:
        """Load the model that the command line names. Raises `ModelError`."""
        keep_freed_memory()
        torch.set_num_threads(options.num_threads)
        model = Model(Path(options.model_path), architecture, getattr(torch, options.dtype), options.num_slots, options.context_length,
                      options.enable_return_routed_experts)
        return cls(model, options.num_threads)

    def on_thread(self) -> AbstractContextManager[object]:
        """No gradients, and this thread's share of OpenMP threads, which OpenMP keeps per thread."""
        torch.set_num_threads(self._num_threads)
        return torch.inference_mode()

    def apply(self, copies: Sequence[Copy], capacity: int) -> None:
        """Move rows of the KV cache and size it."""
        self._model.apply(copies, capacity)

    def prefill(self, segments: Sequence[Segment]) -> None:
        """Write the KV of `segments`."""
        self._model.prefill(segments)

    def decode(self, requests: list[Request]) -> tuple[list[int], list[float]]:
        """One forward over all rows, then one draw for each."""
        logits = self._model.decode([request.last_token for request in requests], [request.num_fed for request in requests])
        if requests != self._batch_of:
            self._batch_of = requests
            self._batch = SamplingBatch.of([request.sampling for request in requests], logits.shape[1])
        for index, request in enumerate(requests):
            if request.stop_ids and len(request.output) + 1 < request.min_new_tokens:
                logits[index, list(request.stop_ids)] = -math.inf
        return sample(logits, self._batch, [len(request.output) for request in requests])

    def take_routing(self) -> Sequence[bytes]:
        """The experts chosen since the last call, a token each; see engine_loop.py."""
        return self._model.take_routing()

    def load_weights(self, source: Path | Mapping[str, torch.Tensor]) -> Weights:
        """A folder's tensors, or these, with no more OpenMP threads than the engine's own. Raises `ModelError`."""
        torch.set_num_threads(self._num_threads)
        return self._model.load_weights(source)

    def use_weights(self, weights: Weights, keep_cache: bool) -> None:
        """Compute with `weights` from now on."""
        self._model.use_weights(weights, keep_cache)
