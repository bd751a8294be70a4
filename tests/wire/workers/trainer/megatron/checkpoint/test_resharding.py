"""A training state handed from layout to layout, by real processes over gloo: every number of it arrives, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
from torch.distributed.checkpoint import load as load_tensors

from tests.support.megatron_case import VOCAB, write_model
from tests.wire.gangs import run_ranks
from tests.wire.ranks.resharding_rank import ADAPTED, KINDS, LAYOUTS, WITH_CRITIC, found, layouts_of, setup, step
from workers.config import Dtype
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group

TWO, FOUR = ["tp2", "pp2", "pp2vpp2", "ep2", "dp2", "cp2"], ["tp2pp2", "tp2dp2"]
EACH = [(kind, layout) for kind in KINDS for layout in layouts_of(kind, [*TWO, *FOUR])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process trains two steps and saves; the state goes through all layouts; one process takes it up again, as "back"."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("resharding")
    for kind in KINDS:
        write_model(kind, folder / kind)
        engine = MegatronEngine(setup(kind), folder / kind)
        step(engine)
        step(engine)
        (folder / f"one.{kind}.state").mkdir(mode=0o700)
        engine.save_state(folder / f"one.{kind}.state")
        np.savez(folder / f"one.{kind}.npz", **found(engine, step(engine)))
    run_ranks("tests.wire.ranks.resharding_rank", folder, 2, "one", *TWO)
    run_ranks("tests.wire.ranks.resharding_rank", folder, 4, TWO[-1], *FOUR)
    for kind in KINDS:
        engine = MegatronEngine(setup(kind), folder / kind)
        engine.load_state(folder / f"{FOUR[-1]}.{kind}.state")
        np.savez(folder / f"back.{kind}.npz", **found(engine, step(engine)))
    process_group.close()
    return folder


def tensors(state: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a saved state."""
    reader = FileSystemReader(state)
    whole = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in reader.read_metadata().state_dict_metadata.items()
             if isinstance(entry, TensorStorageMetadata)}
    load_tensors(whole, storage_reader=reader, no_dist=True)
    return whole


@pytest.mark.parametrize(("kind", "layout"), EACH)
def test_every_layout_loads_and_saves_every_number(folder: Path, kind: str, layout: str) -> None:
    """Weights, float32 weights, moments; rows that fill up the vocabulary aside."""
    assert VOCAB % 2, "two ranks hold a row more"
    expected, saved = tensors(folder / f"one.{kind}.state"), tensors(folder / f"{layout}.{kind}.state")
    moment = "adapters.model.layers.1.self_attn.k_proj.lora_B.weight" if kind == ADAPTED else "decoder.final_layernorm.weight"
    assert expected.keys() == saved.keys() and f"optimizer.state.exp_avg_sq.{moment}" in saved
    assert kind != ADAPTED or all("adapters." in name for name in saved), "the starting model's folder has the rest"
    assert ("optimizer.state.exp_avg.critic.value_head.weight" in saved) is (kind == WITH_CRITIC)
    padded = VOCAB + VOCAB % LAYOUTS[layout].get("tp", 1)
    for name, tensor in expected.items():
        found = saved[name]
        if len(tensor) == VOCAB:
            assert len(found) == padded and not found[VOCAB:].any()
            found = found[:VOCAB]
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize(("kind", "layout"), EACH)
def test_training_goes_on_alike_in_every_layout(folder: Path, kind: str, layout: str) -> None:
    """In float32 to 1e-6; in bfloat16 a weight is right to 2**-8, and so is a loss: the mean of advantages of size 1, which cancel."""
    expected, result = (dict(np.load(folder / f"{name}.{kind}.npz")) for name in ("one", layout))
    assert expected.keys() == result.keys() and result["num_tokens"] == expected["num_tokens"]
    exact = KINDS[kind] is Dtype.float32
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5 if exact else 1e-1, abs=1e-7 if exact else 2**-8)
    for name in (name for name in expected if name.startswith("weight:")):
        assert np.linalg.norm(result[name] - expected[name]) <= (1e-6 if exact else 2**-8) * np.linalg.norm(expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_that_comes_back_is_the_uninterrupted_one(folder: Path, kind: str) -> None:
    expected, result = (dict(np.load(folder / f"{name}.{kind}.npz")) for name in ("one", "back"))
    assert expected.keys() == result.keys()
    assert [name for name in expected if not np.array_equal(expected[name], result[name])] == []


def test_rank_0_learns_of_a_disk_that_is_full_elsewhere(folder: Path) -> None:
    beside, at_once = np.load(folder / "refused.0.npz")["refused"].tolist()
    for text in (beside, at_once, *np.load(folder / "refused.1.npz")["refused"].tolist()):
        assert "rank 1: OSError: [Errno 28] No space left on device" in text
