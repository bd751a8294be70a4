"""Ten minutes of `make chaos`: everything that can break breaks, one thing every twenty seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.campaign import campaign
from tests.slurm.cluster import available


@pytest.mark.timeout(2400)
def test_ten_minutes_of_faults_lose_nothing(tmp_path: Path) -> None:
    if reason := available():
        pytest.skip(reason)
    findings = campaign(tmp_path, 10.0, 2)
    print(findings)
    assert not findings.faults
    assert sum(findings.begun.values()) >= 20 and findings.num_steps >= 200 and findings.num_replayed > 1000
