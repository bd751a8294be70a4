"""Submission as one act: all arrays or none, each written down before its sbatch and after."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from launcher.config.cluster import RoleConfig
from launcher.config.schema import FullConfig
from launcher.jobs import job_records, submit
from launcher.jobs.job_specs import JobSpec, job_specs
from launcher.slurm import queries
from launcher.sweep import Sweep
from workers.config import AllocationConfig, ClusterKind, ConfigError
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError

# An sbatch that does as it is told.
SBATCH = """#!/usr/bin/env python3
import os, re, sys, pathlib
folder = pathlib.Path(os.environ["FAKE"])
number = len(list(folder.glob("*.sh"))) + 1
text = pathlib.Path(sys.argv[1]).read_text()
(folder / f"{number}.sh").write_text(text)
(folder / f"{number}.env").write_text("\\n".join(os.environ))
if str(number) in os.environ.get("FAIL", "").split(","):
    sys.exit(os.environ.get("SAY", "sbatch: error: Batch job submission failed: Invalid qos specification"))
print(f"Submitted batch job {number}")
"""


class Fake:
    """What reached it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cancelled: list[str] = []
        self.named: list[str] = []

    def script(self, number: int) -> str:
        return (self.folder / f"{number}.sh").read_text()


def config(**train: object) -> FullConfig:
    full = FullConfig()
    full.run.name, full.run.max_hours, full.cluster.kind = "x", 2, ClusterKind.slurm
    full.allocation = AllocationConfig(4)
    full.cluster.inference = RoleConfig(time="60")
    full.cluster.train = RoleConfig(**{"partition": "gpu", "time": "60", **train})  # type: ignore[arg-type]
    return full


def specs_of(full: FullConfig, path: Path) -> tuple[JobSpec, JobSpec]:
    return job_specs(full.plan(), full, RunFolder(path))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    fake = Fake(folder)
    monkeypatch.setattr(queries, "show_config", lambda: {"MaxArraySize": "8", "ClusterName": "alpha"})
    monkeypatch.setattr(queries, "cancel", lambda ids, pending_only=False: fake.cancelled.extend(ids))
    monkeypatch.setattr(queries, "jobs_named", lambda name: fake.named)
    return fake


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "a run")
    folder.config.write_bytes(msgspec.json.encode(config().for_workers()))
    return folder


def test_arrays_are_written_down_and_chained(fake: Fake, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SBATCH_PARTITION", "SLURM_CONF"):
        monkeypatch.setenv(name, "outside")
    full = config()
    inference, train = specs_of(full, run.path)
    assert (inference.num_elements, train.num_elements) == (18, 6)
    submit.submit((inference, train), full, run, after=("90", "91"))
    record = run.submission()
    assert record["complete"] and record["cluster"] == "slurm" and len(record["token"]) == 8
    assert [(array["role"], array["job_id"], array["num_elements"], array["throttle"]) for array in record["arrays"]] == [
        ("inference", "1", 6, 3), ("inference", "2", 6, 3), ("inference", "3", 6, 3), ("train", "4", 6, 1)]
    assert [array["name"] for array in record["arrays"][2:]] == [f"x-{record['token']}-inference-3", f"x-{record['token']}-train-1"]
    assert {"gpus_per_element": 1, "nodes_per_element": 1, "time_limit_s": 3600, "cluster_name": "alpha"}.items() <= record["arrays"][3].items()
    dependencies = [line.split("=", 1)[1] for number in (1, 2, 3, 4) for line in fake.script(number).splitlines() if "--dependency" in line]
    assert dependencies == ["afterany:90:91", "afterany:1", "afterany:2", "afterany:90:91"]
    environment = (fake.folder / "1.env").read_text().split()
    assert "SLURM_CONF" in environment and not {"SLURM_JOB_ID", "SBATCH_PARTITION"} & set(environment) and os.environ["SLURM_JOB_ID"] == "outside"
    submit.submit((train,), full, run)
    assert run.submission()["arrays"][4]["name"] == f"x-{record['token']}-train-2" and run.submission()["token"] == record["token"]
    assert run.arrays("train") == ["4", "5"]


def test_what_is_submitted_is_what_a_dry_run_shows(fake: Fake, run: RunFolder) -> None:
    full = config(sbatch={"comment": "it's \"mine\""})
    specs = specs_of(full, run.path)
    submit.submit(specs, full, run)
    shown = [text for spec in specs for text in submit.scripts(spec, full, run, 8)]
    token = run.submission()["token"]
    for number, text in enumerate(shown, 1):
        text = text.replace(submit.DRY_RUN_TOKEN, token)
        for earlier, array in enumerate(run.submission()["arrays"], 1):
            text = text.replace(f"ID_OF_{array['name']}", str(earlier))
        assert text == fake.script(number)


@pytest.mark.parametrize("failing", [1, 3, 4])
def test_one_refusal_takes_everything_back(fake: Fake, run: RunFolder, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    monkeypatch.setenv("FAIL", str(failing))
    with pytest.raises(ConfigError, match="Invalid qos specification.*Nothing of this submission is left") as caught:
        submit.submit(specs_of(config(), run.path), config(), run)
    assert isinstance(caught.value, SlurmError)
    assert fake.cancelled == [str(number) for number in range(1, failing)]
    assert [array["job_id"] for array in run.submission()["arrays"]] == fake.cancelled and run.submission()["complete"]
    assert run.ended() and "Invalid qos" in run.ended()["cause"]


def test_an_array_whose_answer_was_lost_is_found_by_name(fake: Fake, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "2")
    fake.named = ["77"]
    with pytest.raises(ConfigError):
        submit.submit(specs_of(config(), run.path), config(), run)
    assert fake.cancelled == ["1", "77"]
    assert run.arrays("inference") == [] and run.arrays("train") == [], "that these were cancelled says nothing of the run"


@pytest.mark.parametrize("words", ["sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
                                   "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", "Killed", ""])
def test_an_answer_that_is_not_clear_leaves_a_record(fake: Fake, run: RunFolder, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """slurmctld may queue the array seconds after all looks."""
    monkeypatch.setenv("FAIL", "2")
    monkeypatch.setenv("SAY", words)
    with pytest.raises(ConfigError, match="did not say whether it accepts .*-inference-2.*may still queue .*-inference-2 .*headway stop"):
        submit.submit(specs_of(config(), run.path), config(), run)
    assert fake.cancelled == ["1"] and [array["job_id"] for array in run.submission()["arrays"]] == ["1", None]
    assert run.submission()["complete"] and run.ended(), "its elements find that the run has ended"
    (lost,) = job_records.unanswered(run)
    assert lost["name"] == run.submission()["arrays"][1]["name"] and job_records.settle(run) == {"inference": lost["submitted"]}
    fake.named = ["78"]
    assert job_records.settle(run)["inference"] > lost["submitted"], "it has come just now"
    assert job_records.settle(run) == {} and [array["job_id"] for array in run.submission()["arrays"]] == ["1", "78"]
    assert run.arrays("inference") == ["78"], "it was not cancelled"


def test_nothing_is_settled_while_somebody_submits(fake: Fake, run: RunFolder) -> None:
    text = '{"complete": false, "arrays": [{"role": "train", "name": "x", "job_id": null, "submitted": 1.0}]}'
    run.submitted.write_text(text)
    fake.named = ["78"]
    assert job_records.settle(run) == {} and run.submitted.read_text() == text


def test_a_run_stays_whole_while_more_is_submitted(fake: Fake, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, seen = specs_of(config(), run.path), []
    write = job_records.write_atomic
    monkeypatch.setattr(job_records, "write_atomic", lambda path, content: (write(path, content), seen.append(run.submission()["complete"])))
    submit.submit(specs, config(), run)
    assert seen[:-1] == [False] * 8 and seen[-1]
    seen.clear()
    submit.submit((specs[1],), config(), run, going_on=True)
    assert all(seen) and len(seen) == 3
    submit.submit((specs[1],), config(), run)
    assert seen[3:] == [False, False, True], "a run that is resumed is submitted whole again"


def test_a_resumed_run_whose_submission_fails_has_ended(fake: Fake, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = specs_of(config(), run.path)
    submit.submit(specs, config(), run)
    monkeypatch.setenv("FAIL", "6")
    with pytest.raises(ConfigError):
        submit.submit(specs, config(), run)
    assert "submission failed" in (run.ended() or {})["cause"] and fake.cancelled == ["5"]


def test_a_later_submission_that_fails_leaves_the_run_alone(fake: Fake, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = specs_of(config(), run.path)
    submit.submit(specs, config(), run)
    before = run.submission()["arrays"]
    monkeypatch.setenv("FAIL", "5")
    with pytest.raises(ConfigError):
        submit.submit((specs[1],), config(), run, going_on=True)
    assert run.ended() is None and run.submission()["arrays"] == before and run.submission()["complete"] and fake.cancelled == []


def test_what_cannot_be_taken_back_is_said(fake: Fake, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise SlurmError("scancel: no answer")

    monkeypatch.setenv("FAIL", "2")
    monkeypatch.setattr(queries, "cancel", unreachable)
    with pytest.raises(ConfigError) as caught:
        submit.submit(specs_of(config(), run.path), config(), run)
    assert "headway stop" in str(caught.value) and not run.submission()["complete"]


def test_the_runs_of_a_sweep_are_listed_and_wait_in_lanes(tmp_path: Path) -> None:
    for index in range(5):
        sweep = Sweep(tmp_path / "sweep", index, (f"staleness.eta={index}",))
        waits_for = {1: index - 1, 2: index - 2, 0: -1}
        for lanes, before in waits_for.items():
            assert sweep.after(lanes) == ((f"{before}0", f"{before}1") if before >= 0 else ())
        run = RunFolder.create(sweep.run_path("x"))
        run.submitted.write_text(msgspec.json.encode({"arrays": [{"role": role, "job_id": f"{index}{number}"}
                                                                 for number, role in enumerate(("inference", "train"))]}).decode())
        sweep.add(run)
    assert [entry["overrides"] for entry in sweep.runs()] == [[f"staleness.eta={index}"] for index in range(5)]
    assert sweep.runs()[3] == {"index": 3, "overrides": ["staleness.eta=3"], "run": str(tmp_path / "sweep" / "003-x")}
