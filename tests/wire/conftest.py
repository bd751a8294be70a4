"""What tests over real sockets begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.conftest import megatron_groups as megatron_groups
from workers.run.folder import RunFolder
from workers.transport.keys import make_keys


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run's folder, with its keys."""
    folder = RunFolder.create(tmp_path / "run")
    make_keys(folder)
    return folder
