"""Reports of sweeps; those of runs stand with the runs that they are of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import headway


@pytest.mark.long  # its combinations: test_commands; its page: tests/unit/launcher/report
def test_a_sweep_leaves_its_page(tmp_path: Path) -> None:
    result = headway("-m", "--plain", "experiment=tiny", "staleness.eta=0,1", "run.num_steps=1", "evaluation.enabled=false",
                     "evaluation.every_steps=0", "trainer.export_final=false", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"report {tmp_path / 'sweep' / 'report.html'}"
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "2 runs, which differ in staleness.eta." in page and page.count("<td>finished</td>") == 2
