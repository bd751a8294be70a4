"""What tests of the trainer share, and which files `make test-quick` leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOW = ("workers/trainer/megatron/", "workers/trainer/selftest/test_self_test", "workers/trainer/saving/", "workers/weights/test_peft_folder",
        "workers/reward/pool/", "workers/coordinator/groups/test_concurrency", "workers/rollout/engines/servers/embedded/test_model",
        "workers/model/test_initialize", "workers/reward/verifiers/test_mathematics", "launcher/memory/test_estimate",
        "launcher/launch/test_selftest", "test_wheel")
"""How the paths of files begin that train models, simulate long runs, or start many processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them as slow."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def megatron_groups() -> Iterator[None]:
    """Megatron's parallel groups are global to the process: the engines of a module's tests share them, and they come down at its end."""
    import torch

    from workers.trainer.megatron.parallel import process_group

    torch.set_num_threads(1)
    yield
    process_group.close()
