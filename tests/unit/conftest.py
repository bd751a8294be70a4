"""What tests of the trainer share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def megatron_groups() -> Iterator[None]:
    """Megatron's parallel groups are global to the process: the engines of a module's tests share them, and they come down at its end."""
    import torch

    from workers.trainer.megatron import process_group

    torch.set_num_threads(1)
    yield
    process_group.close()
