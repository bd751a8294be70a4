"""What the preparation of a run does with its data: all of a file is measured, what was left out is said, paths become absolute."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from workers.config import Config, ConfigError, DataConfig, DataKind, EngineConfig, ModelConfig, ModelSource, RunConfig, RunKind, WorkflowConfig, load
from workers.config.choices import DataFilter
from workers.config.data import PartConfig
from workers.prepare import NUM_CHECKED, prepare
from workers.rundir import RunFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": "1" * (20 if number == NUM_CHECKED + 50 else 3) + f" + {number} =", "answer": 1, "response": " 2"} for number in range(600)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "7 + 7 =", "answer": 7, "response": " 14"}\n')
    return RunFolder.create(tmp_path / "run")


def prepared(run: RunFolder, data: DataConfig, kind: RunKind = RunKind.rl) -> Config:
    config = Config(run=RunConfig(kind=kind), model=ModelConfig(source=ModelSource.tiny), data=data, engine=EngineConfig(context_length=24),
                    workflow=WorkflowConfig(max_new_tokens=4))
    run.config.write_bytes(msgspec.json.encode(config))
    prepare(run)
    return load(run.config)


def files(**changes: object) -> PartConfig:
    return PartConfig(**{"kind": DataKind.jsonl, "path": "train.jsonl", "heldout_path": "heldout.jsonl", **changes})  # type: ignore[arg-type]


def test_every_prompt_of_a_file_is_measured(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"prompt line/563 has 28 tokens.* out with data.filter=drop and data.max_prompt_tokens=20"):
        prepared(run, files())


def test_what_is_left_out_is_said(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    config = prepared(run, files(max_prompt_tokens=20, filter=DataFilter.drop))
    folder = Path.cwd()
    assert (config.data.path, config.data.heldout_path) == (str(folder / "train.jsonl"), str(folder / "heldout.jsonl"))
    assert capfd.readouterr().out.splitlines() == [
        f"data: 599 training prompts of {folder}/train.jsonl, 1 held out",
        f"data: 1 of 600 prompts of {folder}/train.jsonl left out, since they are over the limits (data.max_prompt_tokens, data.max_reference_kb)"]


@pytest.mark.parametrize("kind", list(RunKind))
def test_a_mixture_is_prepared(run: RunFolder, capfd: pytest.CaptureFixture[str], kind: RunKind) -> None:
    parts = {"file": files(num_heldout=5), "sums": PartConfig(num_heldout=5, num_examples=0)}
    data = DataConfig(kind=DataKind.mixture, parts=parts, max_prompt_tokens=16, filter=DataFilter.drop)
    config = prepared(run, data, kind)
    assert config.data.parts["file"].path == str(Path.cwd() / "train.jsonl") and config.data.parts["sums"].path == ""
    assert "data: file: 599 training prompts" in capfd.readouterr().out
