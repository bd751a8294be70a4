"""The data sets of conf/data, composed as a user does, on rows and folders as they are published."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hydra import compose, initialize_config_dir

from launcher.__main__ import CONF
from launcher.config.schema import register, to_object
from workers.config import ConfigError
from workers.data.prompt import PromptSource
from workers.data.prompts import open_prompts
from workers.reward.code.tests import check_reference

register()

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
GSM8K = [{"question": f"{number} and 1?", "answer": f"It is <<{number}+1={number + 1}>>{number + 1}.\n#### {number + 1}"} for number in range(9)]
MATH = [{"problem": f"P{number}", "level": "Level 1", "type": "Algebra", "solution": rf"\boxed{{{number}}}"} for number in range(9)]
AIME = [{"id": number, "problem": f"P{number}", "solution": "S", "answer": f"{number:03d}", "url": "u", "year": "2024"} for number in range(30)]
DEEPSCALER = [{"problem": f"P{number}", "answer": f"\\frac{{1}}{{{number}}}", "solution": ""} for number in range(300)]
LIVE = [{"question_title": "T", "question_content": f"Q{number}", "question_id": f"q{number}", "contest_date": "2023-08-21T00:00:00",
         "starter_code": "", "metadata": "{}", "private_test_cases": "[]",
         "public_test_cases": '[{"input": "1", "output": "2", "testtype": "stdin"}]'}
        for number in range(120)]
HUMAN = [{"task_id": f"HumanEval/{number}", "prompt": f"def f{number}(x):\n", "entry_point": f"f{number}", "canonical_solution": "    return x\n",
          "test": f"def check(candidate):\n    assert candidate({number}) == {number}\n"} for number in range(164)]


def parquet(folder: Path, name: str, rows: list[dict]) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)


def opened(name: str, path: Path, *overrides: str) -> PromptSource:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_object(compose("config", overrides=["model.path=/model", f"data={name}", f"data.path={path}", *overrides]))
    return open_prompts(config.data, config.reward, config.run.seed)


def test_gsm8k(tmp_path: Path) -> None:
    for subset in ("main", "socratic"):
        parquet(tmp_path, f"{subset}/train-00000-of-00001.parquet", GSM8K[:6])
        parquet(tmp_path, f"{subset}/test-00000-of-00001.parquet", GSM8K[6:])
    source = opened("gsm8k", tmp_path)
    first = next(source.preview(0))
    assert (first.text, first.reference, first.verifier, first.response) == (f"0 and 1?{BOXED}", "1", "math_verify", "It is 1.\n#### 1")
    assert [prompt.reference for prompt in source.heldout()] == ["7", "8", "9"]


def test_math(tmp_path: Path) -> None:
    parquet(tmp_path, "data/train-00000-of-00001.parquet", MATH[:5])
    parquet(tmp_path, "data/test-00000-of-00001.parquet", MATH[5:])
    source = opened("math", tmp_path)
    assert [prompt.reference for prompt in [*source.preview(0), *source.heldout()]] == [str(number) for number in range(9)]


def test_aime(tmp_path: Path) -> None:
    parquet(tmp_path, "data/train-00000-of-00001.parquet", AIME)
    source = opened("aime", tmp_path)
    prompts = [*source.preview(0), *source.heldout()]
    assert len(source.heldout()) == 15 and {(prompt.id, prompt.reference) for prompt in prompts} == {(str(n), str(n)) for n in range(30)}


def test_deepscaler(tmp_path: Path) -> None:
    (tmp_path / "deepscaler.json").write_text(json.dumps(DEEPSCALER))
    source = opened("deepscaler", tmp_path / "deepscaler.json")
    assert len(source.heldout()) == 200 and len(list(source.preview(0))) == 100
    assert {prompt.reference for prompt in [*source.preview(0), *source.heldout()]} == {row["answer"] for row in DEEPSCALER}


def test_livecodebench(tmp_path: Path) -> None:
    large = LIVE[0] | {"question_id": "large", "private_test_cases": json.dumps([{"input": "1" * (1 << 20), "output": "", "testtype": "stdin"}])}
    for number, rows in enumerate((LIVE[:60], [*LIVE[60:], large])):
        (tmp_path / f"test{number or ''}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = opened("livecodebench", tmp_path)
    prompts = [*source.preview(0), *source.heldout()]
    assert {prompt.id for prompt in prompts} == {f"q{number}" for number in range(120)} and {prompt.verifier for prompt in prompts} == {"code"}
    assert any(note.startswith("1 of 121 prompts") for note in source.notes())
    check_reference(prompts[0].reference)


def test_human_eval(tmp_path: Path) -> None:
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in HUMAN).encode()))
    source = opened("human_eval", tmp_path / "HumanEval.jsonl.gz")
    assert len(list(source.preview(0))) == 100 and len(source.heldout()) == 64
    for prompt in source.preview(0):
        check_reference(prompt.reference)
        assert json.loads(prompt.reference)["prompt"] == prompt.text


def test_the_mixture_and_its_parts() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_object(compose("config", overrides=["model.path=/model", "data=mixture", "data.num_heldout=4", "data.parts.chains.task=gcd"]))
    source = open_prompts(config.data, config.reward, 1)
    assert {(prompt.id.split("/")[0], prompt.verifier) for prompt in source.preview(10)} == {("sums", "numeric"), ("chains", "reasoning_gym")}
    assert len(source.heldout()) == 4


def test_rows_of_another_data_set_are_refused(tmp_path: Path) -> None:
    parquet(tmp_path, "main/train-00000-of-00001.parquet", MATH)
    parquet(tmp_path, "main/test-00000-of-00001.parquet", MATH)
    with pytest.raises(ConfigError, match=r"train-00000-of-00001.parquet: row 1: no column 'answer'; its columns are 'problem'"):
        opened("gsm8k", tmp_path)
