"""Files of rows: every format gives the same prompts, folders are found as Hugging Face lays them out, and what is wrong is named with its row."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import ConfigError, DataConfig, DataKind, RewardConfig
from workers.data.dataset_folders import files_of_split
from workers.data.prompt import Prompt, PromptSource
from workers.data.prompts import open_prompts
from workers.data.rows import read_rows

ROWS = [{"prompt": f"{number} + 1 =", "answer": number + 1} for number in range(150)]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_gz(path: Path, rows: list[dict]) -> None:
    path.write_bytes(gzip.compress("\n\n".join(json.dumps(row) for row in rows).encode()))


def write_array(path: Path, rows: list[dict]) -> None:
    path.write_text(json.dumps(rows, indent=2))


def write_bom(path: Path, rows: list[dict]) -> None:
    path.write_text("\ufeff" + "\r\n".join(json.dumps(row) for row in rows))


def write_parquet(path: Path, rows: list[dict]) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=40)


def write_stream(path: Path, rows: list[dict]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def write_file(path: Path, rows: list[dict]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


FORMATS: dict[str, tuple[str, Callable[[Path, list[dict]], None]]] = {
    "lines": ("a.jsonl", write_lines), "gz": ("a.jsonl.gz", write_gz), "array": ("a.json", write_array), "lines in json": ("a.json", write_lines),
    "byte order mark": ("a.jsonl", write_bom), "parquet": ("a.parquet", write_parquet), "stream": ("a.arrow", write_stream),
    "file": ("a.arrow", write_file)}


def open_file(path: Path, kind: DataKind = DataKind.jsonl, seed: int = 1, model: Path | None = None, **changes: Any) -> PromptSource:
    config = DataConfig(**{"kind": kind, "path": str(path), "num_heldout": 10, **changes})
    config.check()
    return open_prompts(config, RewardConfig(), seed, model)


def everything(source: PromptSource) -> list[Prompt]:
    return [*source.preview(0), *source.heldout()]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    filename, write = FORMATS[name]
    write(tmp_path / filename, ROWS)
    assert [row.columns for row in read_rows(tmp_path / filename, "data.path")] == ROWS


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.fixed_dictionaries({"prompt": st.text(), "answer": st.integers(-2**63, 2**63 - 1), "chat": st.lists(
    st.fixed_dictionaries({"role": st.text(), "content": st.text()}), max_size=2)}), min_size=1, max_size=5))
def test_what_is_written_is_read(rows: list[dict], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for filename, write in FORMATS.values():
        write(folder / filename, rows)
        assert [row.columns for row in read_rows(folder / filename, "data.path")] == rows


@pytest.mark.parametrize(("kind", "filename"), [(DataKind.jsonl, "a.jsonl"), (DataKind.parquet, "a.parquet")])
def test_prompts_can_be_held_out_of_the_training_file(tmp_path: Path, kind: DataKind, filename: str) -> None:
    rows = [*ROWS, ROWS[3] | {"id": "twice"}]  # the same text again, which must not be trained on if it is held out
    (write_parquet if kind is DataKind.parquet else write_lines)(tmp_path / filename, rows)
    source = open_file(tmp_path / filename, kind)
    heldout, train = source.heldout(), list(source.preview(0))
    assert len(heldout) == 10 and not {prompt.text for prompt in heldout} & {prompt.text for prompt in train}
    assert {prompt.text for prompt in everything(source)} == {row["prompt"] for row in ROWS}
    assert open_file(tmp_path / filename, kind).heldout() == heldout != open_file(tmp_path / filename, kind, seed=2).heldout()
    assert sorted(source.train(index).id for index in range(len(train))) == sorted(prompt.id for prompt in train)


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=20), count=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_holding_out_takes_whole_texts(texts: list[str], count: int, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    write_lines(path, [{"prompt": text, "answer": 1} for text in texts])
    if count >= len(set(texts)):
        with pytest.raises(ConfigError, match=rf"data.num_heldout={count}: .* has {len(set(texts))} different prompts"):
            open_file(path, seed=seed, num_heldout=count)
        return
    source = open_file(path, seed=seed, num_heldout=count)
    held = {prompt.text for prompt in source.heldout()}
    assert len(held) == len(source.heldout()) == count
    assert [prompt.text for prompt in source.preview(0)] == [text for text in texts if text not in held]


def test_texts_that_differ_in_what_templates_strip_are_the_same_prompt(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"prompt": text, "answer": 1} for text in ("a", "b", " a\n", "c", "b ")])
    for seed in range(8):
        source = open_file(tmp_path / "a.jsonl", seed=seed, num_heldout=1)
        [held] = source.heldout()
        assert held.text in ("a", "b", "c") and held.text not in {prompt.text.strip() for prompt in source.preview(0)}
    write_lines(tmp_path / "h.jsonl", [{"prompt": "c ", "answer": 1}])
    with pytest.raises(ConfigError, match=r"h.jsonl:1: the same prompt is \S+a.jsonl:4; a held-out prompt must not be trained on"):
        open_file(tmp_path / "a.jsonl", heldout_path=str(tmp_path / "h.jsonl"))
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "c"}]
    write_lines(tmp_path / "a.jsonl", [{"prompt": said, "answer": 1}, {"prompt": "d", "answer": 1}])
    write_lines(tmp_path / "h.jsonl", [{"prompt": [said[0], {"role": "user", "content": "c "}], "answer": 1}])
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<a>")
    with pytest.raises(ConfigError, match="h.jsonl:1: the same prompt is"):
        open_file(tmp_path / "a.jsonl", model=tmp_path, heldout_path=str(tmp_path / "h.jsonl"), chat_template=True)


@pytest.mark.parametrize("name", ["parquet", "stream", "file", "array"])
def test_malformed_rows_are_named(tmp_path: Path, name: str) -> None:
    filename, write = FORMATS[name]
    rows = [row | {"answer": str(row["answer"])} for row in ROWS]
    rows[130] = rows[130] | {"prompt": ""}
    write(tmp_path / filename, rows)
    config = DataConfig(kind=DataKind.jsonl, path=str(tmp_path / filename))
    with pytest.raises(ConfigError, match=rf"{filename}: row 131: the prompt is empty"):
        open_prompts(config, RewardConfig(), 1)
    rows[130] = {"prompt": None, "answer": "1"}
    write(tmp_path / filename, rows)
    with pytest.raises(ConfigError, match=rf"{filename}: row 131: no prompt in a column 'prompt'"):
        open_prompts(config, RewardConfig(), 1)


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 100, pa.array([b"ok"] * 70 + [b"\xff"] + [b"ok"] * 29).buffers())
    pa.parquet.write_table(pa.table({"prompt": broken}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet: row 71: .*Text must be UTF-8"):
        list(read_rows(tmp_path / "a.parquet", "data.path"))


@pytest.mark.parametrize(("filename", "content", "message"), [
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a.parquet: not a readable Parquet file.*git lfs pull"),
    ("a.arrow", b"\xff\xff\xff\xff", "a.arrow: not a readable Arrow file"),
    ("a.arrow", b"ARROW1\0\0" + b"\0" * 99, "a.arrow: not a readable Arrow file"),
    ("a.json", b"[{}, 1]", "a.json: row 2: Expected `object`"), ("a.json", b"[{}", "a.json: Input data was truncated"),
    ("a.jsonl.gz", b"no gzip", "data.path=.*a.jsonl.gz': not readable"),
    ("a.jsonl.gz", gzip.compress(b"{}" * 999, mtime=0)[:20], "data.path=.*not readable"),
    ("a.jsonl", b"\xff\xfe", "a.jsonl:1: "),
])
def test_broken_files_are_named(tmp_path: Path, filename: str, content: bytes, message: str) -> None:
    (tmp_path / filename).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(read_rows(tmp_path / filename, "data.path"))


def test_a_chat_of_one_message_is_the_same_prompt_as_its_text(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"prompt": "1 + 1", "answer": "2"}])
    write_lines(tmp_path / "h.jsonl", [{"prompt": [{"role": "user", "content": "1 + 1"}], "answer": "2"}])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    config = DataConfig(kind=DataKind.jsonl, path=str(tmp_path / "a.jsonl"), heldout_path=str(tmp_path / "h.jsonl"), chat_template=True)
    with pytest.raises(ConfigError, match="the same prompt"):
        open_prompts(config, RewardConfig(), 1, tmp_path)


def test_an_empty_answer_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"prompt": "1 + 1", "answer": " "}])
    with pytest.raises(ConfigError, match=r"a.jsonl:1: the answer cannot be used by verifier 'numeric': it is empty"):
        open_file(tmp_path / "a.jsonl", num_heldout=1)


@pytest.mark.parametrize(("filename", "write"), [("a.jsonl", write_lines), ("a.json", write_array)])
def test_empty_files_are_refused(tmp_path: Path, filename: str, write: Callable) -> None:
    write(tmp_path / filename, [])
    with pytest.raises(ConfigError, match="data.path=.*holds no prompt"):
        open_file(tmp_path / filename)
    pa.parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="data.path=.*holds no prompt"):
        open_file(tmp_path / "a.parquet", DataKind.parquet)


def test_a_folder_of_files_is_one_data_set(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", ROWS[5:20])
    write_lines(tmp_path / "a.jsonl", ROWS[:5])
    (tmp_path / "README.md").write_text("no data")
    prompts = list(open_file(tmp_path, num_heldout=1).preview(0))
    assert len(prompts) == 19 and len({prompt.id for prompt in prompts}) == 19
    assert {prompt.id.split("/")[0] for prompt in prompts} == {"a.jsonl", "b.jsonl"}


# Hugging Face's folders

def saved(folder: Path, rows: list[dict], shards: int = 2, **state: Any) -> Path:
    """As `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        write_stream(folder / name, rows[number * len(rows) // shards:(number + 1) * len(rows) // shards])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train", **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_saved_datasets(tmp_path: Path) -> None:
    saved(tmp_path / "one", ROWS)
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    saved(tmp_path / "several" / "train", ROWS[:100])
    saved(tmp_path / "several" / "test", ROWS[100:], shards=1)
    assert len(everything(open_file(tmp_path / "one", DataKind.hf))) == 150
    source = open_file(tmp_path / "several", DataKind.hf, heldout_split="test", num_heldout=50)
    assert [prompt.text for prompt in source.preview(0)] == [row["prompt"] for row in ROWS[:100]]
    assert [prompt.text for prompt in source.heldout()] == [row["prompt"] for row in ROWS[100:]]
    other = open_file(tmp_path / "several", DataKind.hf, heldout_path=str(saved(tmp_path / "other", [{"prompt": "x", "answer": "y"}], 1)))
    assert [prompt.text for prompt in other.heldout()] == ["x"] and len(list(other.preview(0))) == 100
    with pytest.raises(ConfigError, match=r"data.heldout_split='tset': .*no such split; did you mean 'test'"):
        open_file(tmp_path / "several", DataKind.hf, heldout_split="tset")
    with pytest.raises(ConfigError, match="data.heldout_split='test': these are the files that are trained on"):
        open_file(tmp_path / "one", DataKind.hf, heldout_split="test")


@pytest.mark.parametrize(("state", "message"), [
    ({"_indices_data_files": [{"filename": "i"}]}, "Save it again after flatten_indices"), ({"_data_files": None}, "names no data files"),
    ({"_data_files": [{"filename": "gone.arrow"}]}, "names gone.arrow, which is not there"),
    ({"_data_files": [{"filename": "../one/data-00000-of-00002.arrow"}]}, "which is not there"),
])
def test_saved_datasets_that_are_not_whole_are_refused(tmp_path: Path, state: dict, message: str) -> None:
    saved(tmp_path / "one", ROWS, **state)
    with pytest.raises(ConfigError, match=message):
        files_of_split(tmp_path / "one", "train")


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize(("names", "split", "subset", "expected"), [
    (["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"], "train", "",
     ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
    (["data/train-00000-of-00001-1234567890abcdef.parquet"], "train", "", ["data/train-00000-of-00001-1234567890abcdef.parquet"]),
    (["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet", "README.md"], "train", "main",
     ["main/train-00000-of-00001.parquet"]),
    (["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"], "train", "",
     ["default/train/0000.parquet", "default/train/0001.parquet"]),
    (["test.jsonl", ".cache/train.jsonl", "dataset_infos.json"], "test", "", ["test.jsonl"]),
    (["data/test-more-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], "test", "", ["data/test-00000-of-00001.parquet"]),
    (["aime_2024_problems.parquet"], "aime_2024_problems", "", ["aime_2024_problems.parquet"]),
    (["main/train.json", "dataset_info.json"], "train", "", ["main/train.json"]),
])
def test_published_datasets(tmp_path: Path, names: list[str], split: str, subset: str, expected: list[str]) -> None:
    touch(tmp_path, *names)
    assert files_of_split(tmp_path, split, subset) == [tmp_path / name for name in expected]


def test_a_subset_is_that_of_the_training_data(tmp_path: Path) -> None:
    touch(tmp_path, "test.parquet")
    assert files_of_split(tmp_path, "test", "main", "data.heldout_") == [tmp_path / "test.parquet"]
    with pytest.raises(ConfigError, match="no such subset"):
        files_of_split(tmp_path, "test", "main")


def test_a_column_that_nobody_asked_for_may_hold_anything(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": f"1 + {at} =", "a": "2", "response": ["one", "two"]}) + "\n" for at in range(2)))
    [prompt] = open_file(rows, columns={"prompt": "q", "answer": "a"}, num_heldout=1).heldout()
    assert (prompt.reference, prompt.response) == ("2", "")


@pytest.mark.parametrize(("names", "split", "subset", "message"), [
    ([], "train", "", "data.path=.*holds no Parquet, Arrow or JSON files"),
    (["train.parquet"], "trian", "", "data.split='trian': .*no such split; did you mean 'train'. Use one of 'train'"),
    (["a/train.parquet", "b/train.parquet"], "train", "", "data.subset='': .*no such subset. Use one of 'a', 'b'"),
    (["main/train.parquet", "other/train.parquet"], "train", "mian", "did you mean 'main'"),
    (["data/train-00000-of-00003.parquet", "data/train-00002-of-00003.parquet"], "train", "", "is one of 3 files, and number 1 is missing"),
    (["train-00000-of-00001.parquet", "train-00000-of-00001-12345678.parquet"], "train", "", "some are there twice"),
    (["train.parquet", "data/train.parquet"], "train", "", "hold the same split"),
    (["train.parquet", "train.jsonl"], "train", "", "hold the same split"),
])
def test_published_datasets_that_are_not_whole_are_refused(tmp_path: Path, names: list[str], split: str, subset: str, message: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(ConfigError, match=message):
        files_of_split(tmp_path, split, subset)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path='.*none': there is no such folder"):
        open_file(tmp_path / "none", DataKind.hf)


# From columns to prompts

def first(tmp_path: Path, row: dict, model: Path | None = None, **changes: Any) -> Prompt:
    write_lines(tmp_path / "a.jsonl", [row])
    write_lines(tmp_path / "h.jsonl", [row | {"question": "other", "chat": [{"role": "user", "content": "other"}]}])
    return open_file(tmp_path / "a.jsonl", heldout_path=str(tmp_path / "h.jsonl"), model=model, **changes).train(0)


QUESTION = {"question": "1 + 1 =", "topic": "sums", "solution": {"final": 2, "text": "it is 2"}, "judge": "math_verify", "number": 7, "none": None}


def test_declared_columns(tmp_path: Path) -> None:
    columns = {"prompt": r"{topic}: {question} \boxed{} {{number}} \frac{1}{2}", "answer": "solution.final", "response": "{solution.text}!",
               "id": "q{number}", "verifier": "judge"}
    prompt = first(tmp_path, QUESTION, columns=columns)
    assert prompt == Prompt("q7", r"sums: 1 + 1 = \boxed{} {number} \frac{1}{2}", "math_verify", "2", "it is 2!")
    assert first(tmp_path, QUESTION | {"answer": 5}, columns={"prompt": "question"}).reference == "5"
    assert first(tmp_path, QUESTION, columns={"prompt": "question", "answer": "number"}, response_field="topic").response == "sums"
    code = {"kind": "stdio", "tests": [{"input": "", "output": "1"}]}
    made = first(tmp_path, {"question": "x", "tests": code}, columns={"prompt": "question", "answer": "tests"}, verifier="math_verify")
    assert json.loads(made.reference) == code and made.verifier == "math_verify"


@pytest.mark.parametrize(("columns", "message"), [
    ({"prompt": "quesion", "answer": "number"}, r"a.jsonl:1: no column 'quesion' .data.columns.prompt.; did you mean 'question'"),
    ({"prompt": "{quesion}", "answer": "number"}, "no column 'quesion'.*did you mean 'question'"),
    ({"prompt": "question", "answer": "solution.finel"}, "no column 'solution.finel'.*did you mean 'final'"),
    ({"prompt": "question", "answer": "number.x"}, "no column 'number.x'"),
    ({"prompt": "{solution}", "answer": "number"}, "'solution' holds dict; it must be text or a number"),
    ({"prompt": "question", "answer": "none"}, "no answer for the verifier"),
    ({"prompt": "question"}, "no answer for the verifier in a column 'answer'"),
    ({"prompt": "question", "answer": "number", "id": "solution"}, "the id is"),
    ({"prompt": "question", "answer": "number", "verifier": "topic"}, "a.jsonl:1: verifier='sums': no such verifier"),
    ({"promt": "question"}, "data.columns.promt='question': there is no such field; did you mean 'prompt'"),
    ({"prompt": ""}, "data.columns.prompt='': must name a column"),
])
def test_wrong_columns_are_named(tmp_path: Path, columns: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        first(tmp_path, QUESTION, columns=columns)


def test_an_adapter_and_columns_on_top(tmp_path: Path) -> None:
    row = {"question": "1 + 1?", "answer": "#### 2", "level": 3}
    assert first(tmp_path, row, adapter="gsm8k") == Prompt("line/1", "1 + 1?", "numeric", "2", "#### 2")
    assert first(tmp_path, row, adapter="gsm8k", columns={"prompt": "{level}) {prompt}"}).text == "3) 1 + 1?"
    with pytest.raises(ConfigError, match=r"a.jsonl:1: column 'answer' ends in '2', not in '#### '.*choose another data.adapter"):
        first(tmp_path, row | {"answer": "2"}, adapter="gsm8k")
    write_lines(tmp_path / "a.jsonl", [{"problem": "1 + 1?", "answer": "2", "Solution": "It is 2"}] * 2)
    config = DataConfig(kind=DataKind.jsonl, path=str(tmp_path / "a.jsonl"), num_heldout=1, adapter="aime")
    with pytest.raises(ConfigError, match=r"a.jsonl:1: data.adapter='aime' makes no response of this row.*data.columns.response=COLUMN"):
        open_prompts(config, RewardConfig(), 1, responses=True)
    with pytest.raises(ConfigError, match="data.adapter='gsm': no such adapter"):
        first(tmp_path, row, adapter="gsm")


def test_chats_are_rendered(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}")
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1", "name": None}]
    columns = {"prompt": "chat", "answer": "answer"}
    assert first(tmp_path, {"chat": chat, "answer": 2}, model, columns=columns, chat_template=True).text == "<system>Add.<user>1 + 1<a>"
    with pytest.raises(ConfigError, match=r"a.jsonl:1: the prompt is a chat.*Set data.chat_template=true"):
        first(tmp_path, {"chat": chat, "answer": 2}, columns=columns)
    with pytest.raises(ConfigError, match="last message is the assistant's"):
        first(tmp_path, {"chat": [*chat, {"role": "assistant", "content": "2"}], "answer": 2}, model, columns=columns, chat_template=True)
