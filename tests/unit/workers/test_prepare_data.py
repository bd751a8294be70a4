"""What the preparation of a run does with its data: all of a file is measured, what was left out is said, paths become absolute."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

from workers.config import (
    ClusterConfig,
    ClusterKind,
    Config,
    ConfigError,
    DataConfig,
    DataKind,
    EngineConfig,
    ModelConfig,
    ModelSource,
    RunConfig,
    RunKind,
    WorkflowConfig,
    load,
)
from workers.config.choices import DataFilter
from workers.config.data import PartConfig
from workers.data.limits import Limits
from workers.data.prompt import Prompt
from workers.data.prompts import open_prompts
from workers.model.initialize import EOS, make_tiny
from workers.model.tokenizer import open_tokenizer
from workers.prepare import NUM_CHECKED, prepare
from workers.rollout.workflows.rendering import question, texts_of_parts
from workers.run.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": "1" * (20 if number == NUM_CHECKED + 50 else 3) + f" + {number} =", "answer": 1, "response": " 2"} for number in range(600)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "7 + 7 =", "answer": 7, "response": " 14"}\n')
    return RunFolder.create(tmp_path / "run")


def prepared(run: RunFolder, data: DataConfig, kind: RunKind = RunKind.rl, model: ModelConfig | None = None) -> Config:
    config = Config(run=RunConfig(kind=kind), model=model or ModelConfig(source=ModelSource.tiny), data=data, engine=EngineConfig(context_length=24),
                    workflow=WorkflowConfig(max_new_tokens=4))
    run.config.write_bytes(msgspec.json.encode(config))
    prepare(run)
    return load(run.config)


FILES = {"kind": DataKind.jsonl, "path": "train.jsonl", "heldout_path": "heldout.jsonl"}


def files(**changes: object) -> DataConfig:
    return DataConfig(**{**FILES, **changes})  # type: ignore[arg-type]


def test_every_prompt_of_a_file_is_measured(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"/train.jsonl:563: the prompt has 28 tokens.* out with data.filter=drop and data.max_prompt_tokens=20"):
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
    parts = {"file": PartConfig(**FILES, num_heldout=5), "sums": PartConfig(num_heldout=5, num_examples=0)}
    data = DataConfig(kind=DataKind.mixture, parts=parts, max_prompt_tokens=16, filter=DataFilter.drop)
    config = prepared(run, data, kind)
    assert config.data.parts["file"].path == str(Path.cwd() / "train.jsonl") and config.data.parts["sums"].path == ""
    assert "data: file: 599 training prompts" in capfd.readouterr().out


@pytest.mark.parametrize("kind", list(RunKind))
def test_prompts_begin_as_the_models_tokenizer_begins_a_text(run: RunFolder, capfd: pytest.CaptureFixture[str], kind: RunKind) -> None:
    make_tiny(Path("model"), 1)
    tokenizer = open_tokenizer(Path("model"))
    tokenizer.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.token_to_id(EOS))])
    tokenizer.save("model/tokenizer.json")
    parts = {"sums": PartConfig(num_heldout=5, num_examples=0), "bare": PartConfig(num_heldout=5, num_examples=0, bos="")}
    config = prepared(run, DataConfig(kind=DataKind.mixture, parts=parts, num_heldout=10), kind, ModelConfig(path="model"))
    assert f"data: prompts begin with '{EOS}' (data.bos)" in capfd.readouterr().out and config.data.bos == EOS and config.data.parts["bare"].bos == ""
    source = open_prompts(config.data, config.reward, 1, Path("model"))
    for prompt in (*source.heldout(), *map(source.train, range(20)), *source.preview(4)):
        assert prompt.text.startswith(EOS) is prompt.id.startswith("sums/") and prompt.text.count(EOS) <= 1
    text = texts_of_parts(config)["sums"]
    assert text.opening("1 + 1") == f"{EOS}1 + 1" == text.opening(f"{EOS}1 + 1") and text.following("1") == "1"
    assert question(f"{EOS}1 + 1", text) == "1 + 1" and text.opening([{"role": "user", "content": "Hi"}]) == f"{EOS}\nuser: Hi\nassistant:"
    limits = Limits(dataclasses.replace(config.data.sources()[0], max_prompt_tokens=5), Path("model"), None)
    assert "it has 6 tokens" in limits.problem(Prompt("1", "1 + 1", "numeric", "2")) and DataConfig().text_before == ""


@pytest.mark.parametrize(("line", "words"), [
    ('{"prompt": "' + "1 + " * 249_000 + '", "answer": 1}', r"/train.jsonl:1: the prompt has far more than 20 tokens; it must have"),
    ('{"prompt": "1", "answer": 1, "response": "' + "1" * 10_000_000 + '"}', r"/train.jsonl:1: prompt and response have far more than 48")])
def test_a_row_of_megabytes_is_named_by_its_line_without_counting_to_its_end(
        run: RunFolder, line: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.jsonl").write_text(line + "\n")
    looked_at = []
    encode = Tokenizer.encode

    class Counting:
        def __init__(self, folder: Path) -> None:
            self.tokenizer = open_tokenizer(folder)

        def encode(self, text: str, add_special_tokens: bool) -> Encoding:
            looked_at.append(len(text))
            return encode(self.tokenizer, text, add_special_tokens=add_special_tokens)

        def __getattr__(self, name: str) -> object:
            return getattr(self.tokenizer, name)

    monkeypatch.setattr("workers.prepare.open_tokenizer", Counting)
    with pytest.raises(ConfigError, match=words):
        prepared(run, files(), RunKind.supervised if "response" in line else RunKind.rl)
    assert looked_at and max(looked_at) < 100_000


def test_a_line_without_an_end_is_refused_before_it_is_held_whole(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.data.rows.MAX_ROW_MIB", 1)
    Path("train.jsonl").write_text('{"prompt": "1", "answer": 1}\n' + "1" * (2 << 20))
    with pytest.raises(ConfigError, match=r"/train.jsonl:2: the line has more than 1 MiB; it must be one row. End each row"):
        prepared(run, files())


def test_the_answers_other_name_is_explained(run: RunFolder) -> None:
    Path("train.jsonl").write_text('{"prompt": "1", "reference": 1}\n')
    with pytest.raises(ConfigError, match=r"jsonl:1: unknown column 'reference'; did you mean 'answer'\?.*`answer` is what verifiers and agents get"):
        prepared(run, files())


def test_only_looking_makes_nothing_and_says_what_it_did_not_look_at(
        run: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def look(**changes: object) -> str:
        model = ModelConfig(**{"source": ModelSource.smollm2, "path": str(tmp_path / "model"), **changes})  # type: ignore[arg-type]
        run.config.write_bytes(msgspec.json.encode(Config(model=model, data=files(), cluster=ClusterConfig(kind=ClusterKind.slurm))))
        prepare(run, made=False)
        return capfd.readouterr().out

    said = look()
    assert "not checked: the model, its memory, and whether prompts fit into it: it is made in" in said and "599 training" not in said
    assert "600 training prompts" in said and not (tmp_path / "model").exists() and not list(run.keys.iterdir())
    assert "is not on this machine. It must be where a run is started" in look(source=ModelSource.folder)
    Path("train.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=r"train.jsonl:1: "):
        look()
    Path("train.jsonl").unlink()
    assert f"not checked: the prompts, nor the tensors of the model: {Path.cwd()}/train.jsonl is not on this machine" in look()
