"""The trainer on a GPU. Runs where there is one; nothing of this file has anything to say about a machine without."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

from tests.support.hf_reference import load_reference, reference_logprobs
from tests.support.megatron_case import config, make_groups, train, write_model
from workers.config import Dtype, Recompute
from workers.trainer.batch.context_parallel import part_of
from workers.trainer.batch.sequence_layout import pack_chunks, split_groups
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.model.attention_plan import plan_attention
from workers.trainer.megatron.model.packed_attention import PackedAttention
from workers.weights import safetensors_writer
from workers.weights.layout import lay_out
from workers.weights.store import allocate

pytestmark = pytest.mark.usefixtures("megatron_groups")

KINDS = ["llama", "qwen2-tied", "qwen3", "qwen3moe"]


class Setup:
    """What the attention reads of Megatron's configuration."""

    def __init__(self, kv_channels: int) -> None:
        self.kv_channels = kv_channels
        self.multi_latent_attention = False


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root / kind) for kind in KINDS}


def flat(values: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([row for rows in values for row in rows])


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("share", [True, False])
def test_flash_attention_is_that_of_the_buckets_in_float32_with_its_gradient(share: bool, size: int) -> None:
    """With shared prompts queries are fewer than keys."""
    torch.manual_seed(0)
    groups = make_groups(4)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, size, 2) / size)
    attention = PackedAttention(Setup(size), 1)
    for batch in pack_chunks(groups, split_groups(groups, list(range(4)), 60, share), 60):
        halves = [torch.randn(len(batch.tokens), heads, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
        results = []
        for dtype, by_lengths in ((torch.float32, False), (torch.bfloat16, True)):
            values = [half.detach().to(dtype).requires_grad_() for half in halves]
            plan = plan_attention(batch, part_of(batch), frequencies, torch.device("cuda"), dtype, by_lengths=by_lengths)
            output = attention(*values, packed_seq_params=plan)
            results.append([output, *torch.autograd.grad(output.float().square().sum(), values)])
        for expected, found in zip(*results, strict=True):
            assert (found.float() - expected.float()).norm() <= 2e-2 * expected.float().norm()


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_hugging_face(folders: dict[str, Path], kind: str) -> None:
    groups, model = make_groups(5), load_reference(folders[kind])
    with torch.no_grad():
        pairs = [reference_logprobs(model, group, 0.7) for group in groups]
    expected = np.concatenate([row.numpy() for pair in pairs for row in pair[0]])
    assert np.abs(flat(MegatronEngine(config(), folders[kind]).logprobs(groups)) - expected).max() <= 1e-3
    half = flat(MegatronEngine(config(dtype=Dtype.bfloat16), folders[kind]).logprobs(groups))
    assert np.abs(half - expected).mean() <= 0.1


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_recomputing_and_offloading_change_nothing(folders: dict[str, Path], dtype: Dtype) -> None:
    results, weights = [], []
    for changes in ({}, {"recompute": Recompute.full}, {"recompute": Recompute.selective}, {"optimizer_offload": 1.0}):
        # With so large an eps, clipping shows in the weights.
        engine = MegatronEngine(config(dtype=dtype, lr=1e-2, clip_grad=1e-3, adam_eps=1e-2, **changes), folders["qwen3"])
        results.append([train(engine, make_groups(4, seed)) for seed in range(3)])
        weights.append({name: tensor.float().cpu() for name, tensor in engine.iter_hf_tensors()})
    for changed, after in zip(results[1:], weights[1:], strict=True):
        for expected, found in zip(results[0], changed, strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2, abs=1e-3)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-2)
        for name, expected_weight in weights[0].items():
            assert (after[name] - expected_weight).norm() <= 1e-2 * expected_weight.norm()


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_state_is_saved_and_loaded(folders: dict[str, Path], tmp_path: Path, dtype: Dtype) -> None:
    engine = MegatronEngine(config(dtype=dtype), folders["qwen2-tied"])
    train(engine, make_groups(4, 1))
    engine.save_state(tmp_path)
    expected = train(engine, make_groups(4, 2))
    resumed = MegatronEngine(config(dtype=dtype), folders["qwen2-tied"])
    resumed.load_state(tmp_path)
    assert train(resumed, make_groups(4, 2))["loss"] == pytest.approx(expected["loss"], rel=1e-3)


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """Where published weights lie; files on a disk cannot be pinned."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("pinned", [True, False])
def test_weights_are_copied_from_the_device_into_files(shm_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """Straight into pinned memory, and by way of CUDA's own buffers; what changes on the device afterwards does not matter."""
    if not pinned:
        monkeypatch.setattr(safetensors_writer, "_pin", lambda content: False)
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {f"t{number}": torch.randn(1000, 1 + number, device="cuda", generator=generator) for number in range(8)}
    files = lay_out({name: tuple(tensor.shape) for name, tensor in tensors.items()}, Dtype.bfloat16)
    filling = safetensors_writer.MappedShards(shm_path, files, torch.bfloat16, lambda folder, name, size: allocate(folder / name, size))
    expected = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        filling.put(name, tensor)
        tensor.zero_()
    filling.complete()
    assert filling._pinned == [pinned] * len(files)
    filling.close()
    found = load_file(shm_path / files[0].name)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
