"""Reports of whole runs: there at the end, whoever ended it."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.runs import headway, live_run, wait_for
from workers.files import read_lines


def test_a_run_leaves_its_report(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", "run.num_steps=6", "evaluation.every_steps=3") as run:
        assert run.launcher.wait(250) == 0, run.output.read_text()
        run.assert_nothing_left()
    assert f"report {run.run.report}" in run.output.read_text()
    page = run.run.report.read_text()
    assert "all steps done" in page and "Samples before and after" in page and "answered after step 0 and after step 6" in page
    samples = read_lines(run.run.heldout_samples)
    assert [record["step"] for record in samples] == [0, 3, 6] and all(len(record["samples"]) == 8 for record in samples)
    assert len({tuple(sample["prompt"] for sample in record["samples"]) for record in samples}) == 1, "the same prompts each time"


def test_a_run_that_was_killed_has_one_from_the_launcher(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", "run.num_steps=100000", "evaluation.every_steps=0") as run:
        wait_for("two steps", lambda: len(read_lines(run.run.metrics)) >= 2, 150)
        coordinator = next(process for process in run.look() if "workers.coordinator.worker" in process.cmdline())
        coordinator.kill()
        assert run.launcher.wait(150) == 1, run.output.read_text()
    assert f"report {run.run.report}" in run.output.read_text()
    assert "failed" in run.run.report.read_text() and not run.run.summary.exists()


def test_a_sweep_leaves_its_page(tmp_path: Path) -> None:
    result = headway("-m", "--plain", "experiment=tiny", "staleness.eta=0,1", "run.num_steps=1", "evaluation.enabled=false",
                     "evaluation.every_steps=0", "trainer.export_final=false", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"report {tmp_path / 'sweep' / 'report.html'}"
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "2 runs, which differ in staleness.eta." in page and page.count("<td>finished</td>") == 2
