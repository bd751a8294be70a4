"""The critic against Hugging Face models and autograd, in one process: values, gradients, training beside the policy, warm-up, state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.hf_reference import ReferenceCritic, ReferenceTraining
from tests.support.megatron_case import Asked, config, make_groups, train, write_model
from workers.config import Advantage, Config, Dtype
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron import critic as critic_module
from workers.trainer.megatron.checkpoint.checkpoint import CheckpointError
from workers.trainer.megatron.critic import Critic, estimates
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel.stop_gate import StepAbandoned, StopGate

pytestmark = pytest.mark.usefixtures("megatron_groups")

KINDS = ["llama-tied", "qwen2", "qwen3"]
NEVER = StopGate(lambda: False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root / kind) for kind in KINDS}


def setup_of(trainer: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    setup = config(**{"lr": 1e-3, "adam_eps": 1e-5, **(trainer or {})})
    for name, value in {"advantage": Advantage.gae, "gamma": 0.97, "gae_lambda": 0.9, "critic_lr": 2e-3, **algorithm}.items():
        setattr(setup.algorithm, name, value)
    return setup


def critic_of(engine: MegatronEngine) -> Critic:
    assert engine._critic is not None
    return engine._critic


def flat(values: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([row for rows in values for row in rows])


def with_some_head(engine: MegatronEngine, reference: ReferenceCritic) -> None:
    """The same head in both that is not zero: else nothing but the head had a gradient."""
    head = critic_of(engine).trained.model.value_head
    with torch.no_grad():
        for own, other in ((head.weight, reference.head.weight), (head.bias, reference.head.bias)):
            other.normal_(0, 0.5)
            own.copy_(other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [True, False])
def test_values_and_advantages_are_those_of_hugging_face(folders: dict[str, Path], kind: str, share: bool) -> None:
    setup = setup_of({"share_prompts": share})
    engine, reference, groups = MegatronEngine(setup, folders[kind]), ReferenceCritic(folders[kind]), make_groups(6)
    assert not flat(critic_of(engine).estimate(groups, NEVER).values).any(), "before the first step"
    with_some_head(engine, reference)
    found = critic_of(engine).estimate(groups, NEVER)
    for own, expected in zip((found.values, found.returns, found.advantages), reference.estimates(groups, setup), strict=True):
        assert np.abs(flat(own) - flat(expected)).max() <= 1e-4
    actions = np.concatenate([mask for group in groups for mask in group.loss_mask])
    returns, values = flat(found.returns)[actions], flat(found.values)[actions]
    assert found.metrics == pytest.approx({"explained_variance": 1 - np.var(returns - values) / np.var(returns),
                                           "value_mean": values.mean(), "return_mean": returns.mean()}, rel=1e-4)
    advantages = flat(found.advantages)[actions]
    assert advantages.mean() == pytest.approx(0, abs=1e-6) and advantages.std() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_value_loss_are_those_of_hugging_face(folders: dict[str, Path], kind: str) -> None:
    setup = setup_of(value_clip=0.3)
    engine, reference, groups = MegatronEngine(setup, folders[kind]), ReferenceCritic(folders[kind]), make_groups()
    with_some_head(engine, reference)
    estimated = critic_of(engine).estimate(groups, NEVER)
    rng = np.random.default_rng(1)  # values have moved since: some by more than the clip
    old = [[(row + rng.normal(0, 0.3, row.shape)).astype(np.float32) for row in rows] for rows in estimated.values]
    estimated = critic_module.Estimates(old, estimated.returns, estimated.advantages, {})
    critic_of(engine).accumulate(groups, [0, 1, 2, 3], estimated, float(sum(group.num_valid_tokens for group in groups)), NEVER)
    reference.loss(groups, old, estimated.returns, 0.3).backward()
    found = {name: parameter.main_grad.cpu() for name, parameter in critic_of(engine).trained.model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert not any("output_layer" in name for name in found)
    for name, other in (("embedding.word_embeddings.weight", "trunk.embed_tokens.weight"), ("value_head.weight", "head.weight"),
                        ("decoder.layers.1.mlp.linear_fc2.weight", "trunk.layers.1.mlp.down_proj.weight"), ("value_head.bias", "head.bias"),
                        ("decoder.layers.0.input_layernorm.weight", "trunk.layers.0.input_layernorm.weight"),
                        ("decoder.final_layernorm.weight", "trunk.norm.weight")):
        assert float((found[name] - expected[other]).norm() / expected[other].norm()) <= 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
def test_policy_and_critic_train_like_hugging_face(folders: dict[str, Path], kind: str) -> None:
    setup = setup_of({"num_minibatches": 2, "clip_grad": 0.2}, kl_weight=0.05)
    engine, reference = MegatronEngine(setup, folders[kind]), ReferenceTraining(folders[kind], setup)
    for seed in range(3):
        groups = make_groups(4, seed=seed)
        proximal = engine.logprobs(groups)
        for group, rows in zip(groups, proximal, strict=True):
            group.behavior_logprobs = rows
        expected, metrics = reference.step(groups, proximal), train(engine, groups, proximal)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert (metrics["lr"], metrics["critic_lr"]) == (1e-3, 2e-3)
    groups = make_groups(4, seed=7)
    assert np.abs(flat(critic_of(engine).estimate(groups, NEVER).values) - flat(reference.critic.estimates(groups, setup)[0])).max() <= 1e-4


def test_tokens_that_are_no_actions_do_not_matter(folders: dict[str, Path]) -> None:
    """Between two turns, at the end, and a response that is all of them."""
    setup = setup_of()
    MegatronEngine(setup, folders["qwen3"])
    group = make_groups(1)[0]
    group.responses = [np.arange(6, dtype=np.int32), np.arange(3, dtype=np.int32)]
    group.loss_mask = [np.array([True, True, False, False, True, False]), np.zeros(3, bool)]
    group.rewards = np.array([2.0, 5.0], np.float32)
    values = [[np.array([0.5, -1.0, 100.0, -50.0, 1.5, 7.0], np.float32), np.full(3, 9.0, np.float32)]]
    found = estimates([group], values, setup.algorithm)
    last = 2.0 - 1.5
    middle = 0.97 * 1.5 + 1.0 + 0.97 * 0.9 * last
    first = 0.97 * -1.0 - 0.5 + 0.97 * 0.9 * middle
    assert found.returns[0][0].tolist() == pytest.approx([first + 0.5, middle - 1.0, 0, 0, last + 1.5, 0])
    raw = np.array([first, middle, last])
    assert found.advantages[0][0][[0, 1, 4]] == pytest.approx((raw - raw.mean()) / raw.std(), rel=1e-4)
    assert not found.advantages[0][0][[2, 3, 5]].any() and not found.advantages[0][1].any() and not found.returns[0][1].any()
    assert found.metrics["value_mean"] == pytest.approx((0.5 - 1.0 + 1.5) / 3)


def learnable_groups(seed: int) -> list[TrainGroup]:
    """The prompt's last token says what the reward will be; the rest of it is new every time."""
    groups = make_groups(8, seed=seed)
    for number, group in enumerate(groups):
        group.prompt = np.append(group.prompt[:2], [7 + number % 2]).astype(np.int32)
        group.rewards = np.full(5, 2.0 if number % 2 else -1.0, np.float32)
    return groups


def test_the_critic_learns_to_explain_the_returns_and_the_policy_waits(folders: dict[str, Path]) -> None:
    setup = setup_of({"lr": 1e-2, "num_minibatches": 2}, critic_lr=5e-3, critic_warmup_steps=20, value_clip=0.0, gamma=1.0, gae_lambda=1.0)
    engine = MegatronEngine(setup, folders["qwen3"])
    before = {name: tensor.clone() for name, tensor in engine.iter_hf_tensors()}
    steps = [train(engine, learnable_groups(seed)) for seed in range(20)]
    assert steps[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert np.mean([step["explained_variance"] for step in steps[-4:]]) > 0.8
    assert steps[-1]["value_loss"] < 0.3 * steps[0]["value_loss"]
    assert engine.num_steps == 20 and all(step["grad_norm"] == 0.0 and step["gap_current_proximal"] == 0.0 for step in steps)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.iter_hf_tensors())
    assert train(engine, learnable_groups(20))["grad_norm"] > 0
    assert not all(torch.equal(tensor, before[name]) for name, tensor in engine.iter_hf_tensors())


def test_bfloat16_follows_float32(folders: dict[str, Path]) -> None:
    results = []
    for dtype in (Dtype.float32, Dtype.bfloat16):
        engine = MegatronEngine(setup_of({"dtype": dtype}, kl_weight=0.1), folders["qwen3"])
        results.append([train(engine, learnable_groups(seed)) for seed in range(4)][-1])
    for name in ("value_loss", "explained_variance", "value_mean"):
        assert results[1][name] == pytest.approx(results[0][name], rel=0.1, abs=0.03), name


def saved(engine: MegatronEngine, folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    engine.save_state(folder)
    return folder


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_a_resumed_run_is_the_uninterrupted_one(folders: dict[str, Path], tmp_path: Path, dtype: Dtype) -> None:
    setup = setup_of({"dtype": dtype, "num_minibatches": 2, "warmup_steps": 3}, critic_warmup_steps=2)
    engine = MegatronEngine(setup, folders["llama-tied"])
    for seed in range(3):
        train(engine, make_groups(4, seed=seed))
    folder = saved(engine, tmp_path / "state")
    expected = [train(engine, make_groups(4, seed=seed)) for seed in (3, 4)]
    resumed = MegatronEngine(setup, folders["llama-tied"])
    train(resumed, make_groups(4, seed=9))  # leaves nothing behind
    resumed.load_state(folder)
    assert [train(resumed, make_groups(4, seed=seed)) for seed in (3, 4)] == expected
    assert all(torch.equal(own, other) for (_, own), (_, other) in zip(resumed.iter_hf_tensors(), engine.iter_hf_tensors(), strict=True))
    assert np.array_equal(*(flat(critic_of(which).estimate(make_groups(), NEVER).values) for which in (resumed, engine)))


def test_a_state_is_of_runs_with_a_critic_or_of_runs_without(folders: dict[str, Path], tmp_path: Path) -> None:
    engines = {"True": MegatronEngine(setup_of(), folders["qwen2"]), "False": MegatronEngine(config(), folders["qwen2"])}
    states = {name: saved(engine, tmp_path / name) for name, engine in engines.items()}
    for name, other in (("True", "False"), ("False", "True")):
        with pytest.raises(CheckpointError, match=rf"model: critic {other} \(here {name}\)\. Resume with .* a critic \(algorithm.advantage=gae\)"):
            engines[name].load_state(states[other])
        engines[name].load_state(states[name])


def everything(engine: MegatronEngine) -> list[torch.Tensor]:
    found = [tensor.clone() for _, tensor in engine.iter_hf_tensors()]
    trained = critic_of(engine).trained
    found += [parameter.detach().clone() for parameter in trained.model.parameters()]
    return found + [value.clone() for state in trained.optimizer.optimizer.state.values() for value in state.values()]


def test_abandoned_at_any_time_and_taken_again(folders: dict[str, Path]) -> None:
    setup = setup_of({"num_minibatches": 2}, kl_weight=0.1)
    plain, engine = (MegatronEngine(setup, folders["qwen3"]) for _ in range(2))
    first, second, never = make_groups(4, seed=1), make_groups(4, seed=2), Asked(10**9)
    train(plain, first)
    expected = train(plain, second, stop_requested=never)
    train(engine, first)
    before = everything(engine)
    for at in range(1, never.times + 1):
        with pytest.raises(StepAbandoned):
            train(engine, second, stop_requested=Asked(at))
        assert engine.num_steps == 1 and all(torch.equal(*pair) for pair in zip(everything(engine), before, strict=True))
    assert train(engine, second) == expected
    assert all(torch.equal(*pair) for pair in zip(everything(engine), everything(plain), strict=True))


def test_values_that_are_not_finite_touch_neither_policy_nor_critic(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, groups = MegatronEngine(setup_of(), folders["qwen3"]), make_groups()
    before, real = everything(engine), critic_module.clipped_value_loss

    def poisoned(factor: float, of_loss: bool) -> None:
        def loss(*args: Any, **kwargs: Any) -> Any:
            value, stats = real(*args, **kwargs)
            return value * factor, {"loss": stats["loss"] * factor} if of_loss else stats
        monkeypatch.setattr(critic_module, "clipped_value_loss", loss)

    for of_loss, text in ((True, r"minibatch 0: the loss is nan.*algorithm\.critic_lr"), (False, r"the gradient norm is nan.*algorithm\.critic_lr")):
        poisoned(float("nan"), of_loss)
        with pytest.raises(FloatingPointError, match=text):
            train(engine, groups)
        assert engine.num_steps == 0 and all(torch.equal(*pair) for pair in zip(everything(engine), before, strict=True))
    monkeypatch.setattr(critic_module, "clipped_value_loss", real)
    assert np.isfinite(train(engine, groups)["value_grad_norm"])


def test_without_gae_there_is_no_critic(folders: dict[str, Path]) -> None:
    engine = MegatronEngine(config(), folders["qwen3"])
    assert engine._critic is None and "value_loss" not in train(engine, make_groups())
