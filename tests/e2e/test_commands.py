"""The command as a user meets it: composed configs, dry runs, sweeps; and, answered in this process, errors before anything is started."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from launcher.__main__ import CONF
from launcher.cli import starting
from launcher.monitoring import status, watch
from tests.e2e.runs import headway
from tests.unit.launcher.cli.test_mistakes import answered
from workers.model.initialize import make_tiny
from workers.run.folder import RunFolder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, 1)
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said on standard error where a run is refused."""
    status, _, err = answered(shlex.join(arguments), capsys)
    assert status == 2 and "Traceback" not in err
    return err


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    result = headway("--dry-run", "experiment=tiny", "allocation.num_devices=8", f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert "8 devices: 6 for inference (6 x 1, 75%), 2 for training" in result.stdout
    assert result.stdout.count("role='rollout'") == 6 and result.stdout.count("role='train'") == 1
    assert not (tmp_path / "run").exists()


def test_the_composed_config_can_be_shown() -> None:
    result = headway("--cfg", "job", "experiment=demo", "staleness.eta=7")
    assert result.returncode == 0 and "eta: 7" in result.stdout and "source: smollm2" in result.stdout


def test_sweeps_run_every_combination(tmp_path: Path) -> None:
    result = headway("--dry-run", "-m", "experiment=tiny", "staleness.eta=0,4", "allocation.num_devices=2,4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("plan:") == 4 and result.stdout.count("4 devices") == 2


@pytest.mark.parametrize("there", ["sweep.json", "001-tiny"])
def test_a_sweep_into_the_folder_of_another_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str) -> None:
    (tmp_path / there).mkdir()
    told = refused(capsys, "sweep", "experiment=tiny", "staleness.eta=0,4", f"hydra.sweep.dir={tmp_path}")
    assert f"hydra.sweep.dir='{tmp_path}': holds runs of a sweep already" in told and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("statuses", "status"), [((0, 0), 0), ((2, 2), 2), ((0, 2), 1), ((1, 2), 1), ((0, 1), 1)])
def test_only_a_sweep_that_started_nothing_was_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...], status: int) -> None:
    left = list(statuses)
    monkeypatch.setattr(starting, "_start", lambda *_: left.pop(0))
    assert starting.main("sweep", ["experiment=tiny", "staleness.eta=0,4", f"hydra.sweep.dir={tmp_path / 'sweep'}"], CONF) == status and not left


@pytest.mark.parametrize(("overrides", "words"), [
    (["trainer.lrr=1"], "lrr"),
    (["experiment=none"], "group experiment has no 'none'"),
    (["staleness.eta=-1"], "staleness.eta=-1: must be 0 or more"),
    (["allocation.num_devices=1"], "allocation.num_devices=1"),
    (["allocation.inference_fraction=2"], "allocation.inference_fraction=2"),
    (["allocation.num_devices=8", "allocation.devices_per_node=8", "allocation.replica_size=3"], "[1, 2, 4, 8]"),
    (["trainer.batch_groups=7"], "trainer.num_minibatches=2"),
    (["data.num_heldout=1000"], "data.num_heldout=1000"),
    (["data=jsonl", "data.path=/missing.jsonl", "data.heldout_path=/missing.jsonl"], "/missing.jsonl"),
    (["data=reasoning_gym", "data.task=chain_summ", "reward.verifier=reasoning_gym"], "chain_sum"),
    (["reward.verifier=numerics"], "did you mean 'numeric'"),
    (["reward.verifier=nomod:f"], "No module named 'nomod'"),
    (["workflow.name=tests.support.agent_programs:breaks"], "agent_programs:breaks', tried on prompt"),
    (["engine.context_length=600"], "max_position_embeddings=512"),
    (["data.num_examples=8"], "engine.context_length=32"),
    (["model=hf", "model.path=/missing"], "/missing: no readable config.json"),
    (["data.chat_template=true"], "chat_template"),
])
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(overrides: list[str], words: str, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, "experiment=tiny", f"run.dir={tmp_path / 'run'}", *overrides)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("damage", "words"), [
    (lambda folder: (folder / "config.json").write_text("{"), "no readable config.json"),
    (lambda folder: (folder / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]})), "MambaForCausalLM"),
    (lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100]), "broken safetensors"),
    (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
    (lambda folder: (folder / "tokenizer.json").write_text("nonsense"), "not a readable tokenizer"),
])
def test_a_broken_model_is_refused(tmp_path: Path, damage, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    make_tiny(folder, 1)
    damage(folder)
    assert words in refused(capsys, "experiment=tiny", "model=hf", f"model.path={folder}", f"run.dir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("lines", "words"), [
    ("", "holds no prompt"), ("{", ":1"), ('{"prompt": "1"}\n', "answer"), ('{"prompt": "1", "answer": 2, "colour": 3}\n', "colour"),
    ('{"prompt": "' + "1" * 40 + '", "answer": "1"}\n', "engine.context_length=32"),
])
def test_malformed_data_is_refused(tmp_path: Path, model: Path, lines: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text(lines)
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "7", "answer": 7}\n')
    assert words in refused(capsys, "experiment=tiny", "model=hf", f"model.path={model}", "data=jsonl", f"data.path={tmp_path / 'train.jsonl'}",
                            f"data.heldout_path={tmp_path / 'heldout.jsonl'}", f"run.dir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_who_watches_is_told_when_nothing_of_a_run_is_left(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a power cut: no process, and no outcome."""
    monkeypatch.setattr(watch, "LOST_S", 0.2)
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text("{}")
    run.submitted.write_text('{"cluster": "local", "complete": true, "jobs": []}')
    for command, flag in ((watch, "--plain"), (status, "--json")):
        assert command.main([flag, str(run.path)]) == 1
        said = capsys.readouterr().out
        assert f"nothing of the run is left on this machine, and nobody has written down why. Go on with: headway resume {run.path}" in said


def test_run_folders_are_not_used_twice_and_must_be_private(tmp_path: Path) -> None:
    taken = tmp_path / "run"
    taken.mkdir()
    (taken / "precious").write_text("kept")
    result = headway("experiment=tiny", f"run.dir={taken}")
    assert result.returncode == 2 and "exists already" in result.stderr and (taken / "precious").read_text() == "kept"
    (tmp_path / "file").write_text("")
    assert "cannot be made" in headway("experiment=tiny", f"run.dir={tmp_path / 'file' / 'run'}").stderr
    (taken / "config.json").write_text("{}")
    taken.chmod(0o755)
    for command in ("status", "watch", "stop"):
        result = headway(command, str(taken))
        assert result.returncode == 2 and "chmod 700" in result.stderr
        assert "not a run folder" in headway(command, str(tmp_path / "nothing")).stderr
