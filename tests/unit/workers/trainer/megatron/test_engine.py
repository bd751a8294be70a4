"""The Megatron engine against Hugging Face models with autograd, on the CPU, in one process.

Megatron's parallel groups are global to the process, so the engines of all tests share them; they come down at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.hf_reference import adamw, load_reference, reference_logprobs, reference_loss, saved_tensors  # noqa: E402
from tests.support.megatron_case import VOCAB, config, make_groups, rewards_of, train, write_model  # noqa: E402
from workers.config import Dtype, OffPolicy, RunConfig, Schedule, TrainerConfig  # noqa: E402
from workers.trainer.batch.group import TrainGroup  # noqa: E402
from workers.trainer.megatron.engine import MegatronEngine  # noqa: E402
from workers.trainer.megatron.objective import PolicyTargets, microbatch_loss, per_token  # noqa: E402
from workers.trainer.megatron.optimizer.optimizer import build_scheduler  # noqa: E402
from workers.trainer.megatron.parallel import cpu_backend  # noqa: E402
from workers.trainer.megatron.parallel.gang import Gang  # noqa: E402
from workers.trainer.megatron.parallel.stop_gate import StopGate  # noqa: E402

pytestmark = pytest.mark.usefixtures("megatron_groups")

MODELS = ["llama", "llama-tied", "mistral", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied", "qwen3moe", "glm4moe", "deepseek"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root / kind) for kind in MODELS}


def gradients(engine: MegatronEngine, groups: list[TrainGroup], proximal: Any) -> dict[str, torch.Tensor]:
    """Gradients of one minibatch under Megatron's names, before clipping."""
    engine._policy.accumulate(groups, list(range(len(groups))), PolicyTargets(per_token(rewards_of(groups), groups), proximal=proximal),
                              float(sum(group.num_valid_tokens for group in groups)), StopGate(lambda: False))
    return {name: parameter.main_grad.to("cpu", copy=True) for name, parameter in engine._policy.trained.model.named_parameters()}


def off_policy(groups: list[TrainGroup], engine: MegatronEngine, seed: int = 5) -> list[list[np.ndarray]]:
    """Proximal log-probs near the current ones, behaviour log-probs near the proximal ones: all branches of the loss."""
    rng = np.random.default_rng(seed)
    proximal = [[row + rng.normal(0, 0.2, row.shape).astype(np.float32) for row in rows] for rows in engine.logprobs(groups)]
    for group, rows in zip(groups, proximal, strict=True):
        group.behavior_logprobs = [row + rng.normal(-0.3, 1.0, row.shape).astype(np.float32) for row in rows]
    return proximal


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("share", [True, False])
def test_logprobs_and_entropies_are_those_of_hugging_face(folders: dict[str, Path], kind: str, share: bool) -> None:
    engine = MegatronEngine(config(share_prompts=share), folders[kind])
    groups = make_groups(6)
    logprobs, entropies = engine.logprobs_and_entropy(groups)
    model = load_reference(folders[kind])
    for index, group in enumerate(groups):
        with torch.no_grad():
            expected = reference_logprobs(model, group, 0.7)
        for sample in range(group.num_samples):
            assert logprobs[index][sample].dtype == np.float32
            assert np.abs(logprobs[index][sample] - expected[0][sample].numpy()).max() <= 1e-4
            assert np.abs(entropies[index][sample] - expected[1][sample].numpy()).max() <= 1e-4


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3"])
def test_shared_prompts_leave_gradients_as_they_are(folders: dict[str, Path], kind: str) -> None:
    groups = make_groups()
    shared = MegatronEngine(config(), folders[kind])
    proximal = off_policy(groups, shared)
    expected = gradients(MegatronEngine(config(share_prompts=False, microbatch_tokens=4096), folders[kind]), groups, proximal)
    for name, gradient in gradients(shared, groups, proximal).items():
        assert relative(gradient, expected[name]) <= 1e-5, name


@pytest.mark.parametrize("policy", [OffPolicy.mask, OffPolicy.clamp])
@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "qwen3"])
def test_gradients_are_those_of_hugging_face(folders: dict[str, Path], kind: str, policy: OffPolicy) -> None:
    setup = config()
    setup.algorithm.off_policy = policy
    groups = make_groups()
    engine = MegatronEngine(setup, folders[kind])
    proximal = off_policy(groups, engine)
    found = gradients(engine, groups, proximal)
    model = load_reference(folders[kind])
    reference_loss(model, groups, proximal, setup).backward()
    for name, parameter in model.named_parameters():
        if name == "model.embed_tokens.weight":
            assert relative(found["embedding.word_embeddings.weight"], parameter.grad) <= 1e-4
        if name.endswith("1.mlp.down_proj.weight"):
            assert relative(found["decoder.layers.1.mlp.linear_fc2.weight"], parameter.grad) <= 1e-4
        if name.endswith("0.input_layernorm.weight"):
            assert relative(found["decoder.layers.0.input_layernorm.weight"], parameter.grad) <= 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "qwen3"])
def test_an_optimizer_step_is_that_of_torch_adamw_with_clipping(folders: dict[str, Path], kind: str) -> None:
    setup = config(clip_grad=0.05, weight_decay=0.1, adam_eps=1e-5)
    groups = make_groups()
    engine = MegatronEngine(setup, folders[kind])
    proximal = off_policy(groups, engine)
    model = load_reference(folders[kind])
    trainer = setup.trainer
    optimizer = adamw(model, trainer)
    for _ in range(2):
        loss = reference_loss(model, groups, proximal, setup)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.clip_grad)
        optimizer.step()
        metrics = train(engine, groups, proximal)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    expected = model.state_dict()
    for name, tensor in engine.iter_hf_tensors():
        # Adam turns gradients that are nothing but rounding into whole steps; key biases have no other gradient.
        if not name.endswith("k_proj.bias"):
            assert relative(tensor.cpu(), expected[name]) <= 1e-5, name


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_gives_back_what_was_loaded(folders: dict[str, Path], tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = load_reference(folders[kind]).to(dtype)
    model.save_pretrained(tmp_path)
    engine = MegatronEngine(config(dtype=Dtype(str(dtype).removeprefix("torch."))), tmp_path)
    exported, expected = dict(engine.iter_hf_tensors()), saved_tensors(model)
    assert sorted(exported) == sorted(engine.architecture.tensor_shapes())
    for name, tensor in exported.items():
        assert tensor.dtype == dtype and torch.equal(tensor.cpu(), expected[name]), name


def test_bfloat16_follows_float32(folders: dict[str, Path]) -> None:
    groups = make_groups()
    results = []
    for dtype in (Dtype.float32, Dtype.bfloat16):
        engine = MegatronEngine(config(dtype=dtype, lr=1e-3), folders["qwen3"])
        for group, rows in zip(groups, engine.logprobs(groups), strict=True):
            group.behavior_logprobs = rows
        results.append([train(engine, groups) for _ in range(2)])
    assert results[1][0]["grad_norm"] == pytest.approx(results[0][0]["grad_norm"], rel=0.1)
    assert results[1][1]["loss"] == pytest.approx(results[0][1]["loss"], abs=0.05)


def test_own_proximal_logprobs_are_those_of_the_caller(folders: dict[str, Path]) -> None:
    groups = make_groups(6)
    given, own = (MegatronEngine(config(num_minibatches=3), folders["qwen2"]) for _ in range(2))
    for _ in range(2):
        expected = train(given, groups, given.logprobs(groups))
        found = train(own, groups)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_groups_without_advantage_count_but_have_no_gradient(folders: dict[str, Path]) -> None:
    groups = make_groups()
    groups[1].rewards = np.zeros(5, np.float32)
    engine = MegatronEngine(config(), folders["llama"])
    proximal = off_policy(groups, engine)
    setup = config()
    metrics = train(engine, groups, proximal)
    model = load_reference(folders["llama"])
    reference_loss(model, groups, proximal, setup).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["num_tokens"] == sum(group.num_valid_tokens for group in groups)


def test_training_raises_the_probability_of_rewarded_responses(folders: dict[str, Path]) -> None:
    engine = MegatronEngine(config(lr=2e-3, num_minibatches=2), folders["qwen3-tied"])
    groups = make_groups(4, seed=3)
    for group in groups:
        group.responses = [np.full(4, 7, np.int32), np.full(4, 9, np.int32)]
        group.loss_mask = [np.ones(4, bool)] * 2
        group.versions = [np.zeros(4, np.int32)] * 2
        group.rewards = np.array([1.0, -1.0], np.float32)
        group.behavior_logprobs = [np.zeros(4, np.float32)] * 2
    before = engine.logprobs(groups)
    for _ in range(5):
        for group, rows in zip(groups, engine.logprobs(groups), strict=True):
            group.behavior_logprobs = rows
        metrics = train(engine, groups)
    after = engine.logprobs(groups)
    assert all(new[0].sum() > old[0].sum() and new[1].sum() < old[1].sum() for new, old in zip(after, before, strict=True))
    assert 0.99 < metrics["behavior_ess"] <= 1.0 and metrics["num_microbatches"] >= 2


def expected_lr(schedule: Schedule, step: int, warmup: int, num_steps: int) -> float:
    if step <= warmup:
        return step / warmup
    ratio = (step - warmup) / (num_steps + 1 - warmup)
    return {Schedule.constant: 1.0, Schedule.linear: 1 - 0.9 * ratio,
            Schedule.cosine: 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * ratio))}[schedule]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_learning_rate(schedule: Schedule, warmup: int) -> None:
    class Optimizer:
        param_groups: list[dict] = [{"params": []}]

    trainer = TrainerConfig(lr=1.0, min_lr=0.1, lr_schedule=schedule, warmup_steps=warmup)
    scheduler = build_scheduler(Optimizer(), trainer, RunConfig(num_steps=10))
    for step in range(1, 11):
        scheduler.step(1)
        assert Optimizer.param_groups[0]["lr"] == pytest.approx(expected_lr(schedule, step, warmup, 10))


def test_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps=11"):
        build_scheduler(None, TrainerConfig(warmup_steps=11), RunConfig(num_steps=10))


def test_non_finite_values_do_not_touch_the_weights(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MegatronEngine(config(), folders["qwen2"])
    groups = make_groups()
    before = {name: tensor.clone() for name, tensor in engine.iter_hf_tensors()}
    used = "workers.trainer.megatron.policy.microbatch_loss"

    def poisoned_gradient(*args: Any, **kwargs: Any) -> Any:
        loss, stats = microbatch_loss(*args, **kwargs)
        return loss * float("nan"), stats

    monkeypatch.setattr(used, poisoned_gradient)
    with pytest.raises(FloatingPointError, match=r"training step 1: the gradient norm is nan.*trainer\.lr"):
        train(engine, groups)
    monkeypatch.setattr(used, lambda *args, **kwargs: (microbatch_loss(*args, **kwargs)[0], {"loss": torch.tensor(float("inf"))}))
    with pytest.raises(FloatingPointError, match="the loss is inf"):
        train(engine, groups)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.iter_hf_tensors())
    assert engine.num_steps == 0
    monkeypatch.setattr(used, microbatch_loss)
    assert np.isfinite(train(engine, groups)["grad_norm"])


def test_bad_input_is_refused(folders: dict[str, Path]) -> None:
    engine = MegatronEngine(config(num_minibatches=2), folders["llama"])
    groups = make_groups(3)
    with pytest.raises(ValueError, match="must hold each of the 3 groups once"):
        engine.train_step(groups, [[0], [1]], None, rewards_of(groups))
    groups = make_groups(2)
    with pytest.raises(ValueError, match="advantages are for 1 groups"):
        engine.train_step(groups, [[0], [1]], None, rewards_of(groups)[:1])
    with pytest.raises(ValueError, match="not aligned"):
        train(engine, groups, [[np.zeros(1, np.float32)] * 5] * 2)
    groups[1].responses[0] = np.array([VOCAB], np.int32)
    with pytest.raises(ValueError, match=f"token {VOCAB} is outside the vocabulary"):
        engine.logprobs(groups)


def test_a_process_keeps_its_rank(folders: dict[str, Path]) -> None:
    MegatronEngine(config(), folders["llama"], Gang(0, 1, 0, "localhost", 1))
    with pytest.raises(ValueError, match=r"rank 0 of 1 already, it cannot become rank 1 of 2.*close\(\)"):
        MegatronEngine(config(), folders["llama"], Gang(1, 2, 0, "localhost", 1))


# What Megatron-core 0.16.1 takes from CUDA on the paths used here. A new entry after an upgrade: look at it, then add it.
EXPECTED_HITS = {
    ("distributed/param_and_grad_buffer.py:__init__", "current_device()"),
    ("optimizer/clip_grads.py:get_grad_norm_fp32", "device='cuda'"),
    ("optimizer/distrib_optimizer.py:__init__", ".type()"),
    ("optimizer/distrib_optimizer.py:_build_model_and_main_param_groups", ".type()"),
    ("optimizer/optimizer.py:__init__", "device='cuda'"),
    ("pipeline_parallel/schedules.py:forward_backward_no_pipelining", "device='cuda'"),
    ("tensor_parallel/layers.py:backward", "current_device()"),
    ("tensor_parallel/random.py:add", "RNG state"),
}


def test_places_that_need_the_cpu_backend(folders: dict[str, Path], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the CPU backend is off where CUDA is available")
    cpu_backend.HITS.clear()
    for dtype in (Dtype.float32, Dtype.bfloat16):
        engine = MegatronEngine(config(dtype=dtype, clip_grad=1e-3), folders["llama"])
        train(engine, make_groups())
        (tmp_path / dtype.value).mkdir()
        engine.save_state(tmp_path / dtype.value)
        engine.load_state(tmp_path / dtype.value)
    assert cpu_backend.HITS == EXPECTED_HITS
