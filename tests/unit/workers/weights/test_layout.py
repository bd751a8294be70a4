"""Where tensors lie in files: known beforehand, the same for every version, and what safetensors and transformers read."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

from tests.support.model_folders import FAMILIES, write_random_model  # noqa: E402
from workers.config import Dtype  # noqa: E402
from workers.model.architecture import read_architecture  # noqa: E402
from workers.model.frozen import read_frozen  # noqa: E402
from workers.model.tensors import check_tensors  # noqa: E402
from workers.weights import layout, safetensors_writer  # noqa: E402
from workers.weights.layout import ALIGNMENT, lay_out, small_files  # noqa: E402
from workers.weights.manifest import WeightsError  # noqa: E402
from workers.weights.safetensors_writer import MappedShards, write_hf_folder  # noqa: E402
from workers.weights.store import allocate  # noqa: E402

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    write_random_model(folder, "qwen2")
    return folder


def weights(model: Path, seed: int = 0) -> Tensors:
    """Random float32 tensors of the model's shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in read_architecture(model).tensor_shapes().items()}


def mapped(folder: Path, files: list[layout.ShardFile], dtype: torch.dtype) -> MappedShards:
    return MappedShards(folder, files, dtype, lambda where, name, size: allocate(where / name, size))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 3)), min_size=1, max_size=20),
       st.sampled_from(list(layout.NAMES)), st.sampled_from([1, 100, 2000, 1 << 29]))
def test_every_tensor_has_one_place(tensors: list[tuple[list[int], int]], dtype: Dtype, limit: int) -> None:
    shapes = {f"t{number}": tuple(shape) for number, (shape, _) in enumerate(tensors)}
    sources = {f"t{number}": source for number, (_, source) in enumerate(tensors)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SHARD_BYTES", limit)
        files = lay_out(shapes, dtype, sources)
    assert [file.name for file in files] == [f"model-{number:05d}.safetensors" for number in range(len(files))]
    found: dict[str, tuple[int, ...]] = {}
    size_of = 4 if dtype is Dtype.float32 else 2
    for file in files:
        assert {sources[name] for name in file.places} == {file.source}
        end = len(file.header)
        assert end % ALIGNMENT == 0 and len(file.places) >= 1
        for name, place in file.places.items():
            assert place.offset == end, "end to end"
            end += math.prod(place.shape) * size_of
            found[name] = place.shape
        assert file.size == end and (end - len(file.header) <= limit or len(file.places) == 1)
    assert found == shapes and sum(len(file.places) for file in files) == len(shapes)
    assert [file.source for file in files] == sorted(file.source for file in files)


@pytest.mark.parametrize("dtype", list(layout.NAMES))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_is_put_is_what_is_read(tmp_path: Path, family: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any order of tensors, views and transposed ones among them."""
    monkeypatch.setattr(layout, "SHARD_BYTES", 20_000)
    model, published = tmp_path / "model", tmp_path / "published"
    architecture = write_random_model(model, family)
    published.mkdir()
    files, tensors = lay_out(architecture.tensor_shapes(), dtype), weights(model)
    filling = mapped(published, files, getattr(torch, dtype.value))
    for number, (name, tensor) in enumerate(reversed(tensors.items())):
        given_tensor = tensor.t().contiguous().t() if number % 2 and tensor.dim() == 2 else tensor.clone().requires_grad_()
        filling.put(name, given_tensor)
        with torch.no_grad():
            given_tensor.zero_()  # it is a copy
    filling.complete()
    filling.close()
    own = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**own, "auto_map": {"AutoConfig": "configuration_own.Config"}}))  # Python, which stays behind
    for name, content in small_files(files, model, dtype).items():
        (published / name).write_bytes(content)
    assert json.loads((published / "config.json").read_text()).keys() == (own.keys() | {"dtype"}) - {"torch_dtype"}
    check_tensors(published, read_architecture(published), frozen=False)
    assert read_architecture(published) == architecture and len(files) > 1
    index = json.loads((published / "model.safetensors.index.json").read_text())["weight_map"]
    for path in sorted(published.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
        for name, tensor in load_file(path).items():
            assert tensor.dtype is getattr(torch, dtype.value) and torch.equal(tensor, tensors[name].to(tensor.dtype))
            assert index.pop(name) == path.name
    assert not index
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(published, dtype="auto", output_loading_info=True)
    assert set(report["missing_keys"]) == architecture.frozen_shapes().keys(), "which engines keep from the start"
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    assert loaded.dtype is getattr(torch, dtype.value)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_written_folder_has_what_is_frozen_as_it_was(tmp_path: Path, family: str) -> None:
    architecture, folder = write_random_model(tmp_path / "model", family), tmp_path / "written"
    folder.mkdir()
    write_hf_folder(folder, weights(tmp_path / "model").items(), tmp_path / "model", Dtype.bfloat16)
    check_tensors(folder, architecture)
    frozen = read_frozen(tmp_path / "model", architecture)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert frozen and all(torch.equal(loaded.state_dict()[name], bias) and bias.dtype is torch.float32 for name, bias in frozen.items())
    (tmp_path / "model" / "model-0.safetensors").unlink()
    (tmp_path / "again").mkdir()
    with pytest.raises(WeightsError, match=r"e_score_correction_bias of shape \(8,\) is missing. Copy the model again"):
        write_hf_folder(tmp_path / "again", weights(tmp_path / "model").items(), tmp_path / "model", Dtype.bfloat16)


def test_layouts_of_two_versions_are_the_same_and_only_numbers_differ(model: Path, tmp_path: Path) -> None:
    contents = []
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_hf_folder(folder, weights(model, seed).items(), model, Dtype.bfloat16)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    first, second = contents
    assert {name: len(content) for name, content in first.items()} == {name: len(content) for name, content in second.items()}
    assert {name for name in first if first[name] != second[name]} == {"model-00000.safetensors"}
    header = 8 + int.from_bytes(first["model-00000.safetensors"][:8], "little")
    assert first["model-00000.safetensors"][:header] == second["model-00000.safetensors"][:header]


def test_an_old_dtype_in_the_config_does_not_stay(model: Path, tmp_path: Path) -> None:
    old = shutil.copytree(model, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({**config, "dtype": "float16", "torch_dtype": "float16"}))
    write_hf_folder(tmp_path, weights(model).items(), old, Dtype.bfloat16)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["dtype"] == "bfloat16" and "torch_dtype" not in found


def test_what_does_not_fit_the_layout_is_refused(model: Path, tmp_path: Path) -> None:
    files, tensors = lay_out(read_architecture(model).tensor_shapes(), Dtype.float32), weights(model)
    filling, norm = mapped(tmp_path, files, torch.float32), "model.norm.weight"
    with pytest.raises(WeightsError, match="more: the layout of the weights has no such tensor"):
        filling.put("more", tensors[norm])
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: has shape \(3,\) instead of \(24,\)"):
        filling.put(norm, torch.zeros(3))
    filling.put(norm, tensors[norm])
    with pytest.raises(WeightsError, match=f"{len(tensors) - 1} tensors of the layout were not given, lm_head.weight among them"):
        filling.complete()
    for wrong, problem in (({norm: torch.zeros(3)}, "not of shape"), ({"more": tensors[norm]}, "more: no tensor"), ({}, "were not given")):
        folder = tmp_path / problem
        folder.mkdir()
        with pytest.raises(WeightsError, match=problem):
            write_hf_folder(folder, wrong.items(), model, Dtype.float32)


def test_a_full_disk_is_said(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written where that is known, else when it happens."""
    with monkeypatch.context() as little:
        little.setattr(safetensors_writer.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 1 << 20))  # type: ignore[attr-defined]
        with pytest.raises(WeightsError, match=r"1 MiB are free, the weights take 0 MiB .*Free some space, or choose another folder: run\.dir,"):
            write_hf_folder(tmp_path, weights(model).items(), model, Dtype.float32)
    assert list(tmp_path.iterdir()) == []

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors_writer.os, "pwrite", full)
    with pytest.raises(WeightsError, match="No space left on device.*Free some space"):
        write_hf_folder(tmp_path, weights(model).items(), model, Dtype.float32)
