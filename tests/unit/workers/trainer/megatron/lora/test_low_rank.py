"""Adapters in one process: how they begin, what is trained, and what of a state they are. Layouts: tests/wire/workers/trainer/megatron/parallel."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import config, make_groups, train, with_routing, write_model
from workers.config import Advantage, Config, ConfigError, Dtype, LoraConfig, LoraTarget, Recompute, RouterReplay
from workers.trainer.megatron.checkpoint.checkpoint import CheckpointError
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel.stop_gate import StopGate, never

pytestmark = pytest.mark.usefixtures("megatron_groups")

ATTENTION = [LoraTarget.q_proj, LoraTarget.k_proj, LoraTarget.v_proj, LoraTarget.o_proj]
TARGETS: dict[str, list[LoraTarget]] = {
    "llama": list(LoraTarget), "qwen2-tied": [LoraTarget.v_proj, LoraTarget.gate_proj], "qwen3": [LoraTarget.down_proj], "qwen3moe": ATTENTION}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root / kind) for kind in TARGETS}


def adapted(kind: str, rank: int = 4, **trainer: Any) -> Config:
    return config(lora=LoraConfig(rank=rank, alpha=12.0, targets=TARGETS[kind]), **trainer)


def flat(values: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([row for rows in values for row in rows])


def weights(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in engine.iter_hf_tensors()}


def adapters(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in engine.iter_adapter_tensors()}


def number_of(state: dict[Any, dict[str, torch.Tensor]]) -> int:
    return sum(entry[name].numel() for entry in state.values() for name in ("exp_avg", "exp_avg_sq"))


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("kind", TARGETS)
def test_it_begins_exactly_as_the_starting_model(folders: dict[str, Path], kind: str, dtype: Dtype) -> None:
    engine, plain = MegatronEngine(adapted(kind, dtype=dtype), folders[kind]), MegatronEngine(config(dtype=dtype), folders[kind])
    groups = make_groups()
    assert np.array_equal(flat(engine.logprobs(groups)), flat(plain.logprobs(groups)))
    assert same(weights(engine), weights(plain))
    found = adapters(engine)
    assert len(found) == 2 * 2 * len(TARGETS[kind])
    for name, tensor in found.items():
        assert tensor.any() == ("lora_A" in name), name
        assert "lora_B" in name or tensor.float().abs().max() <= 1.01 / tensor.shape[1] ** 0.5, "uniform within 1 / sqrt(in)"
    assert len({tensor.float().sum().item() for name, tensor in found.items() if "lora_A" in name}) == len(found) // 2, "no two are alike"


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("kind", TARGETS)
def test_nothing_but_adapters_is_trained(folders: dict[str, Path], kind: str, recompute: Recompute) -> None:
    engine = MegatronEngine(adapted(kind, recompute=recompute), folders[kind])
    model, trained = engine._policy.trained.model, engine._policy.trained
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(2):  # the gradient of A is that of zero in the first
        train(engine, make_groups(seed=step))
    number = sum(tensor.numel() for tensor in adapters(engine).values())
    for name, parameter in model.named_parameters():
        own = name.startswith("adapters.")
        assert parameter.requires_grad is own and torch.equal(parameter, before[name]) is not own, name
        assert own or (parameter.grad is None and not hasattr(parameter, "main_grad")), name
    assert number <= sum(buffer.grad_data.numel() for buffer in trained.parallel[0].buffers) < number + 2 * 64 * len(before), "but for alignment"
    assert sum(number_of(part.optimizer.state) for part in trained.optimizer.chained_optimizers) == 2 * number
    assert not trained.parallel[0].expert_parallel_buffers


@pytest.mark.parametrize("kind", TARGETS)
def test_what_is_published_is_the_model_with_its_adapters(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    engine, groups = MegatronEngine(adapted(kind), folders[kind]), make_groups(6)
    before = flat(engine.logprobs(groups))
    for step in range(3):
        train(engine, make_groups(seed=step))
    shutil.copytree(folders[kind], tmp_path / "merged")
    save_file(weights(engine), tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    expected, found = flat(engine.logprobs(groups)), flat(MegatronEngine(config(), tmp_path / "merged").logprobs(groups))
    assert np.abs(found - expected).max() <= 1e-5 and np.abs(expected - before).max() >= 0.1
    assert same(weights(engine), {name: tensor.clone() for name, tensor in engine.iter_held_tensors()})


def test_merged_in_bfloat16_is_the_sum_rounded_once(folders: dict[str, Path]) -> None:
    engine = MegatronEngine(adapted("llama", dtype=Dtype.bfloat16), folders["llama"])
    train(engine, make_groups())
    pairs, base = adapters(engine), load_file(folders["llama"] / "model.safetensors")
    for name, tensor in weights(engine).items():
        module, whole = name.removesuffix(".weight"), base[name].bfloat16()
        if f"{module}.lora_A.weight" in pairs:
            a, b = (pairs[f"{module}.lora_{which}.weight"].float() for which in "AB")
            assert torch.allclose(tensor.float(), (whole.float() + 3.0 * b @ a).bfloat16().float(), rtol=2**-7), name
        else:
            assert torch.equal(tensor, whole), name


@pytest.mark.parametrize(("kind", "dtype"), [("llama", Dtype.float32), ("qwen3moe", Dtype.float32), ("qwen2-tied", Dtype.bfloat16)])
def test_a_resumed_run_is_the_uninterrupted_one(folders: dict[str, Path], tmp_path: Path, kind: str, dtype: Dtype) -> None:
    setup = adapted(kind, dtype=dtype, num_minibatches=2)
    setup.algorithm.advantage = Advantage.gae if kind == "llama" else setup.algorithm.advantage
    engine, folder = MegatronEngine(setup, folders[kind]), tmp_path / "state"
    folder.mkdir(mode=0o700)
    train(engine, make_groups(seed=1))
    engine.save_state(folder)
    expected = [train(engine, make_groups(seed=step)) for step in (2, 3)]
    resumed = MegatronEngine(dataclasses.replace(setup, run=dataclasses.replace(setup.run, seed=7)), folders[kind])  # begins with others
    resumed.load_state(folder)
    assert [train(resumed, make_groups(seed=step)) for step in (2, 3)] == expected
    assert same(adapters(resumed), adapters(engine)) and same(weights(resumed), weights(engine))


def test_the_state_of_other_adapters_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    engine, folder, other = MegatronEngine(adapted("llama"), folders["llama"]), tmp_path / "state", write_model("llama", tmp_path / "other", seed=1)
    folder.mkdir(mode=0o700)
    engine.save_state(folder)
    fewer = adapted("llama")
    fewer.trainer.lora = LoraConfig(rank=4, alpha=12.0, targets=ATTENTION)
    for setup, model, words in (
            (adapted("llama", rank=8), folders["llama"], r"another model: trainer\.lora\.rank 4 \(here 8\)\. Resume with the model"),
            (config(), folders["llama"], r"trainer\.lora\.rank 4 \(here None\)"),
            (fewer, folders["llama"], r"trainer\.lora\.targets \[.*\] \(here \['k_proj'"),
            (adapted("llama"), other, r"another model: starting model [0-9a-f]{64} \(here [0-9a-f]{64}\)")):
        with pytest.raises(CheckpointError, match=words):
            MegatronEngine(setup, model).load_state(folder)
    plain = MegatronEngine(config(), folders["llama"])
    (tmp_path / "plain").mkdir(mode=0o700)
    plain.save_state(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"trainer\.lora\.rank None \(here 4\)"):
        engine.load_state(tmp_path / "plain")


def test_the_reference_is_the_policy_without_its_adapters(folders: dict[str, Path]) -> None:
    """As far away as a second model in memory says, and the policy is itself again afterwards."""
    setup, groups = adapted("llama"), make_groups(5)
    setup.algorithm.kl_weight = 0.5
    engine, plain = MegatronEngine(setup, folders["llama"]), MegatronEngine(config(), folders["llama"])
    assert engine._reference is not None
    train(engine, make_groups(seed=1))
    moved = flat(engine.logprobs(groups))
    assert np.array_equal(flat(engine._reference.logprobs(groups, StopGate(never))), flat(plain.logprobs(groups)))
    assert np.array_equal(flat(engine.logprobs(groups)), moved)


def test_the_reference_chooses_its_experts_itself(folders: dict[str, Path]) -> None:
    """As a second model in memory would, though the policy does as the engine did."""
    setup, plain = adapted("qwen3moe"), MegatronEngine(config(), folders["qwen3moe"])
    setup.algorithm.kl_weight, setup.algorithm.router_replay = 0.5, RouterReplay.rollout
    engine = MegatronEngine(setup, folders["qwen3moe"])
    assert engine._reference is not None and engine.architecture.routing is not None
    groups = with_routing(make_groups(5), engine.architecture.routing)
    own = flat(plain.logprobs(make_groups(5)))
    assert np.array_equal(flat(engine._reference.logprobs(groups, StopGate(never))), own)
    assert not np.allclose(flat(engine.logprobs(groups)), own, atol=1e-3), "it replays"


def test_experts_take_no_adapters(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets=.*must not name gate_proj, up_proj, down_proj in a mixture of experts.*"
                                          r"Use \[q_proj,k_proj,v_proj,o_proj\]"):
        MegatronEngine(config(lora=LoraConfig(rank=4)), folders["qwen3moe"])
