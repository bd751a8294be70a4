"""What the coordinator records for reports, and how it has one written at the end of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.groups import make_group
from tests.support.report_runs import make
from workers.config import Config
from workers.coordinator.core import Coordinator
from workers.coordinator.groups.heldout_evaluation import NUM_SHOWN, Evaluation, EvaluationResult
from workers.coordinator.monitoring import reporting
from workers.coordinator.process import shutdown
from workers.coordinator.snapshot import restore_evaluation, save_evaluation
from workers.data.prompt import Prompt
from workers.messages.groups import Group
from workers.messages.parts import Purpose
from workers.metrics.recorder import Recorder
from workers.run.folder import RunFolder


class FewPrompts:
    """Held-out prompts that are longer than what is recorded of them."""

    def train(self, index: int) -> Prompt:
        return Prompt(f"t{index}", "", "math", "")

    def heldout(self) -> list[Prompt]:
        return [Prompt(f"p{index}", f"begin{'x' * 5000}{index}", "math", f"{index}{'y' * 5000}") for index in range(NUM_SHOWN + 2)]


def answered(evaluation: Evaluation, texts: dict[int, str]) -> None:
    """Lease the prompts that wait, and finish those of `texts`, half of them right."""
    for _ in range(len(texts)):
        group_id, index, attempt = evaluation.lease(b"worker")
        group = make_group(group_id, attempt, [3], rewards=[float(index % 2)], purpose=Purpose.evaluation)
        assert evaluation.finish(_with_text(group, texts[index]))


def _with_text(group: Group, text: str) -> Group:
    return type(group)(**{name: getattr(group, name) for name in group.__struct_fields__ if name != "first_text"}, first_text=text)


def finished(evaluation: Evaluation) -> EvaluationResult:
    """The result, which must be there."""
    result = evaluation.result()
    assert result is not None
    return result


def test_answers_to_the_first_prompts_are_kept() -> None:
    evaluation = Evaluation(NUM_SHOWN + 2, 3)
    evaluation.start(3)
    answered(evaluation, {index: f"answer {index}" for index in range(NUM_SHOWN + 2)})
    assert finished(evaluation).shown == {index: (f"answer {index}", float(index % 2)) for index in range(NUM_SHOWN)}
    evaluation.start(4)
    answered(evaluation, dict.fromkeys(range(NUM_SHOWN + 2), "again"))
    assert set(finished(evaluation).shown.values()) == {("again", 0.0), ("again", 1.0)}, "nothing of the one before"


def test_an_interrupted_evaluation_keeps_its_answers() -> None:
    evaluation, later = Evaluation(4, 3), Evaluation(4, 3)
    evaluation.start(3)
    answered(evaluation, {0: "a", 1: "b"})
    restore_evaluation(later, save_evaluation(evaluation))
    answered(later, {2: "c", 3: "d"})
    assert [text for text, _ in finished(later).shown.values()] == ["a", "b", "c", "d"]


def test_what_is_recorded_is_bounded() -> None:
    coordinator = Coordinator(Config(), FewPrompts(), 1, 0.0)
    evaluation = coordinator.evaluation
    evaluation.start(3)
    answered(evaluation, dict.fromkeys(range(NUM_SHOWN + 2), "😀" * 50000))
    record = reporting.samples_record(coordinator, finished(evaluation))
    assert record["step"] == 3 and [sample["prompt_id"] for sample in record["samples"]] == [f"p{index}" for index in range(NUM_SHOWN)]
    second = record["samples"][1]
    assert second["prompt"].endswith("x1") and second["reference"].startswith("1y") and second["score"] == 1.0
    assert len(json.dumps(record)) < 300_000


def test_whoever_goes_on_cuts_the_samples_back(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    first = Recorder(run)
    first.samples({"step": 0, "samples": []})
    positions = first.positions()
    first.samples({"step": 1, "samples": []})
    first.close()
    Recorder(run, positions, 0).close()
    assert [json.loads(line)["step"] for line in run.heldout_samples.read_text().splitlines()] == [0]
    Recorder(run, {name: size for name, size in positions.items() if name != run.heldout_samples.name}, 0).close()
    assert run.heldout_samples.read_text() == "", "a checkpoint that knew of none"


async def test_the_coordinator_has_the_report_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "run", None, (0.25, 0.5), 3, "finished")
    monkeypatch.setattr(shutdown, "REPORT_S", 120.0)
    await shutdown.write_report(run)
    assert "all steps done" in run.report.read_text()


async def test_a_report_that_fails_is_only_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", None, (), 3, "failed")
    monkeypatch.setattr(shutdown, "REPORT_S", 0.0)
    await shutdown.write_report(run)
    assert capsys.readouterr().out == f"no report: its process takes more than 0 s. Later: headway report {run.path}\n" and not run.report.exists()
    monkeypatch.setattr(shutdown, "REPORT_S", 120.0)
    run.config.write_text("{")
    await shutdown.write_report(run)
    assert "no report: its process exited with status 2" in capsys.readouterr().out
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    await shutdown.write_report(run)
    assert "no report: its process cannot be started" in capsys.readouterr().out
