"""What tests of the trainer share, and which files `make test-quick` leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

SLOW = ("test_megatron_", "test_hf_conversion", "test_concurrency", "test_selftest", "test_run_saver", "test_memory", "test_embedded_model",
        "test_reward_pool", "test_reward_math", "test_starting", "test_wheel")
"""How the names of files begin that train models, simulate long runs, or start many processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them as slow."""
    for item in items:
        if item.path.name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def megatron_groups() -> Iterator[None]:
    """Megatron's parallel groups are global to the process: the engines of a module's tests share them, and they come down at its end."""
    import torch

    from workers.trainer.megatron.parallel import process_group

    torch.set_num_threads(1)
    yield
    process_group.close()
