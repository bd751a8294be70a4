"""What the engine needs of whatever computes its tokens. No torch: the synthetic engine supplies another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from workers.rollout.engines.servers.embedded.requests import Copy, Request, Segment


class Compute(Protocol):
    """Computes the steps that the scheduler plans. All calls come from the engine's thread, inside `on_thread()`."""

    def on_thread(self) -> AbstractContextManager[object]:
        """Entered once, on the engine's thread, around everything else."""

    def apply(self, copies: Sequence[Copy], capacity: int) -> None:
        """Carry out `copies` in order, then make the cache hold `capacity` positions a row."""

    def prefill(self, segments: Sequence[Segment]) -> None:
        """Compute what later steps need of `segments`."""

    def decode(self, requests: list[Request]) -> tuple[list[int], list[float]]:
        """The next token of each request and its log-prob; `requests[i]` owns row i."""

    def replace_weights(self, source: Path | Mapping[str, Any], keep_cache: bool) -> None:
        """Take a folder's weights, or these tensors. Raises `ModelError` and keeps the present ones if they are not all of this model's."""
