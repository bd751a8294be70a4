"""What torch compiles where it runs on a GPU: a kernel or two in each direction, and one call of the host's, instead of a chain of operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled by torch for any shapes when it is first called."""
    return torch.compile(function, dynamic=True)
