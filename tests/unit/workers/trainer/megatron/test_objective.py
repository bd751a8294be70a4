"""What the policy's loss can be made of besides recomputed log-probs and advantages of responses, against Hugging Face models and autograd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.algorithm_files import FILES, algorithm_of
from tests.support.hf_reference import ReferenceLearner, load_reference, reference_logprobs, reference_loss
from tests.support.megatron_case import config, make_groups, rewards_of, train, write_model
from workers.config import Advantage, Config, KlEstimator, KlPlace, Proximal
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.objective import PolicyTargets, per_token
from workers.trainer.megatron.parallel.stop_gate import StopGate
from workers.trainer.megatron.passes import PackedPasses

pytestmark = pytest.mark.usefixtures("megatron_groups")

KINDS = ["llama", "qwen2-tied", "qwen3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, root / kind) for kind in KINDS}


def setup_of(trainer: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    setup = config(**{"lr": 1e-3, "adam_eps": 1e-5, **(trainer or {})})
    for name, value in algorithm.items():
        setattr(setup.algorithm, name, value)
    return setup


def aged_groups(engine: MegatronEngine, seed: int = 0) -> list[TrainGroup]:
    """Groups sampled by several versions before step 4, near the current policy, whose versions differ within a response."""
    groups, rng = make_groups(4, seed=seed), np.random.default_rng(seed)
    for group, rows in zip(groups, engine.logprobs(groups), strict=True):
        group.behavior_logprobs = [row + rng.normal(-0.2, 0.4, row.shape).astype(np.float32) for row in rows]
        group.versions = [np.sort(rng.integers(0, 4, size=len(row))).astype(np.int32) for row in rows]
    return groups


def numpy_logprobs(model: Any, groups: list[TrainGroup], setup: Config) -> list[list[np.ndarray]]:
    with torch.no_grad():
        return [[row.numpy() for row in reference_logprobs(model, group, setup.workflow.temperature)[0]] for group in groups]


def centres(mode: Proximal, model: Any, groups: list[TrainGroup], before: list[list[np.ndarray]], setup: Config) -> list[list[np.ndarray]]:
    """Proximal log-probs of a later minibatch, `before` being those from before the step, which is step 4."""
    current = numpy_logprobs(model, groups, setup)
    if mode is Proximal.recompute:
        return before
    if mode is Proximal.reuse:
        return current
    found = []
    for group, rows in zip(groups, current, strict=True):
        shares = [(3 - versions) / (4 - versions) for versions in group.versions]
        found.append([(then + share * (now - then)).astype(np.float32)
                      for then, now, share in zip(group.behavior_logprobs, rows, shares, strict=True)])
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", list(Proximal))
def test_every_proximal_policy_trains_like_hugging_face(folders: dict[str, Path], kind: str, mode: Proximal) -> None:
    setup = setup_of({"num_minibatches": 2}, proximal=mode)
    engine, model = MegatronEngine(setup, folders[kind]), load_reference(folders[kind])
    engine._policy.trained.advance(3)  # the next step is the fourth
    groups = aged_groups(engine)
    learner = ReferenceLearner(model, setup.trainer, setup.trainer.lr)
    found = train(engine, groups)
    first, second = groups[:2], groups[2:]
    before = numpy_logprobs(model, second, setup)
    results = [learner.step(reference_loss(model, first, None, setup))]
    results.append(learner.step(reference_loss(model, second, centres(mode, model, second, before, setup), setup)))
    assert found["loss"] == pytest.approx(np.mean([loss for loss, _ in results]), rel=1e-4, abs=1e-6)
    assert found["grad_norm"] == pytest.approx(np.mean([norm for _, norm in results]), rel=1e-4)
    for name, tensor in engine.iter_hf_tensors():
        if not name.endswith("k_proj.bias"):  # its gradient is nothing but rounding
            assert float((tensor.cpu() - model.state_dict()[name]).norm() / tensor.norm()) <= 1e-4, name


@pytest.mark.parametrize("mode", [Proximal.loglinear, Proximal.reuse])
def test_the_cheap_ones_make_no_extra_pass(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, mode: Proximal) -> None:
    engine = MegatronEngine(setup_of({"num_minibatches": 2}, proximal=mode), folders["llama"])
    groups = aged_groups(engine)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an extra forward pass")

    monkeypatch.setattr(PackedPasses, "evaluate", refuse)
    metrics = train(engine, groups)
    if mode is Proximal.reuse:
        assert metrics["clip_share"] == 0.0 and metrics["gap_current_proximal"] == 0.0
    else:
        assert metrics["gap_current_proximal"] > 0.0


def moved(folder: Path, setup: Config) -> tuple[MegatronEngine, Any]:
    """An engine whose policy has gone some steps away from the model in `folder`, and a Hugging Face model with its weights."""
    engine = MegatronEngine(setup, folder)
    for seed in range(3):
        train(engine, aged_groups(engine, seed))
    model = load_reference(folder)
    model.load_state_dict(dict(engine.iter_hf_tensors()), strict=False)
    return engine, model


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_a_reference_model_are_those_of_hugging_face(folders: dict[str, Path], kind: str) -> None:
    setup = setup_of({"lr": 1e-2}, kl_weight=0.3)
    engine, model = moved(folders[kind], setup)
    groups = aged_groups(engine, seed=9)
    groups[1].rewards = np.zeros(5, np.float32)  # moved by the divergence alone
    starting = numpy_logprobs(load_reference(folders[kind]), groups, setup)
    assert engine._reference is not None
    never = StopGate(lambda: False)
    reference = engine._reference.logprobs(groups, never)
    assert all(np.abs(row - expected).max() <= 1e-4 for rows, other in zip(reference, starting, strict=True)
               for row, expected in zip(rows, other, strict=True))
    targets = PolicyTargets(per_token(rewards_of(groups), groups), reference)
    engine._policy.accumulate(groups, [0, 1, 2, 3], targets, float(sum(group.num_valid_tokens for group in groups)), never)
    reference_loss(model, groups, None, setup, starting=starting).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: parameter.main_grad.cpu() for name, parameter in engine._policy.trained.model.named_parameters()}
    for name, other in (("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
                        ("decoder.layers.1.mlp.linear_fc2.weight", "model.layers.1.mlp.down_proj.weight"),
                        ("decoder.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight")):
        assert float((found[name] - expected[other]).norm() / expected[other].norm()) <= 1e-4, name


def test_the_reference_stays_the_starting_model(folders: dict[str, Path], tmp_path: Path) -> None:
    setup = setup_of({"lr": 1e-2}, kl_weight=0.1)
    engine = MegatronEngine(setup, folders["qwen3"])
    divergences = [train(engine, aged_groups(engine, seed))["kl_reference"] for seed in range(3)]
    assert divergences[0] == pytest.approx(0.0, abs=1e-7) and divergences[2] > 1e-3
    (tmp_path / "state").mkdir(mode=0o700)
    engine.save_state(tmp_path / "state")
    resumed = MegatronEngine(setup, folders["qwen3"])
    resumed.load_state(tmp_path / "state")
    groups = aged_groups(engine, seed=5)
    assert train(resumed, groups) == train(engine, groups)
    # It is no part of the state, which a run without it can go on from.
    without = MegatronEngine(setup_of(), folders["qwen3"])
    without.load_state(tmp_path / "state")
    assert without._reference is None and "kl_reference" not in train(without, groups)


def test_the_divergence_keeps_the_policy_near(folders: dict[str, Path]) -> None:
    gaps = []
    for weight in (0.0, 5.0):
        engine = MegatronEngine(setup_of({"lr": 5e-3}, kl_weight=weight), folders["llama"])
        groups = aged_groups(engine)
        before = engine.logprobs(groups)
        for _ in range(6):
            train(engine, groups)
        gaps.append(np.mean([np.abs(now - then).mean() for rows, old in zip(engine.logprobs(groups), before, strict=True)
                             for now, then in zip(rows, old, strict=True)]))
    assert gaps[1] < 0.5 * gaps[0]


def test_advantages_of_tokens(folders: dict[str, Path]) -> None:
    setup = setup_of()
    by_response, by_token, engine = (MegatronEngine(setup, folders["qwen3"]) for _ in range(3))
    groups = aged_groups(engine)
    spread = [[np.full(len(response), reward, np.float32) for response, reward in zip(group.responses, group.rewards, strict=True)]
              for group in groups]
    assert train(by_response, groups) == train(by_token, groups, advantages=spread)
    rng = np.random.default_rng(0)
    advantages = [[rng.normal(size=len(response)).astype(np.float32) for response in group.responses] for group in groups]
    model = load_reference(folders["qwen3"])
    loss, norm = ReferenceLearner(model, setup.trainer, setup.trainer.lr).step(reference_loss(model, groups, None, setup, advantages))
    metrics = train(engine, groups, advantages=advantages)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4) and metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_advantages_that_do_not_fit_are_refused(folders: dict[str, Path]) -> None:
    engine, groups = MegatronEngine(setup_of(), folders["llama"]), make_groups(2)
    part = [[0, 1]]
    with pytest.raises(ValueError, match="advantages is not aligned"):
        engine.train_step(groups, part, None, [[np.zeros(1, np.float32)] * 5] * 2)
    with pytest.raises(ValueError, match="must be 5 finite numbers"):
        engine.train_step(groups, part, None, [np.full(5, np.nan, np.float32)] * 2)
    engine = MegatronEngine(setup_of(advantage=Advantage.gae), folders["llama"])
    with pytest.raises(ValueError, match="advantages are given with algorithm.advantage=gae: the critic makes them"):
        engine.train_step(groups, part, None, rewards_of(groups))


@pytest.mark.parametrize("name", FILES)
def test_how_a_batch_is_laid_out_makes_no_difference(folders: dict[str, Path], name: str) -> None:
    """Prompts shared or not, in many micro-batches or one: the same loss and gradient, in both minibatches of a step."""
    results = []
    for layout in ({"share_prompts": True, "microbatch_tokens": 40}, {"share_prompts": False, "microbatch_tokens": 4096}):
        setup = setup_of({"num_minibatches": 2, **layout})
        teacher = str(folders["llama"]) if name == "distillation" else ""
        setup.algorithm = replace(algorithm_of(name), critic_warmup_steps=0, teacher=teacher)
        engine = MegatronEngine(setup, folders["qwen3"])
        engine._policy.trained.advance(3)
        results.append(engine.train_step(aged_groups(engine), [[0, 2], [1, 3]]))
    shared, plain = results
    assert shared["num_microbatches"] > plain["num_microbatches"] and shared["grad_norm"] > 0
    for key in set(shared) - {"num_microbatches", "num_packed_tokens"}:
        assert shared[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-6), key


def test_the_gradient_of_the_entropy_is_that_of_hugging_face(folders: dict[str, Path]) -> None:
    setup = setup_of(entropy_weight=0.3)
    engine, model, groups = MegatronEngine(setup, folders["qwen3"]), load_reference(folders["qwen3"]), make_groups()
    tokens = sum(group.num_valid_tokens for group in groups)
    nothing = [np.zeros(group.num_samples, np.float32) for group in groups]
    engine._policy.accumulate(groups, [0, 1, 2, 3], PolicyTargets(per_token(nothing, groups)), float(tokens), StopGate(lambda: False))
    total = torch.zeros(())
    for group in groups:
        for entropy, mask in zip(reference_logprobs(model, group, setup.workflow.temperature)[1], group.loss_mask, strict=True):
            total = total - 0.3 * entropy[torch.from_numpy(mask)].sum() / tokens
    total.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: parameter.main_grad.cpu() for name, parameter in engine._policy.trained.model.named_parameters()}
    for name, other in (("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
                        ("decoder.layers.1.mlp.linear_fc2.weight", "model.layers.1.mlp.down_proj.weight")):
        assert float((found[name] - expected[other]).norm() / expected[other].norm()) <= 1e-4, name


def test_a_divergence_in_the_rewards_is_that_of_the_policy_before_the_step(folders: dict[str, Path]) -> None:
    """From advantages made by hand of Hugging Face's log-probs; those of the behaviour policy where it is the old one."""
    for decoupled in (True, False):
        setup = setup_of({"lr": 1e-2}, kl_weight=0.2, kl_in=KlPlace.reward, kl_estimator=KlEstimator.k1, decoupled=decoupled,
                         advantage=Advantage.group_center)
        engine, model = moved(folders["qwen3"], setup)
        groups = aged_groups(engine, seed=9)
        old = numpy_logprobs(model, groups, setup) if decoupled else [group.behavior_logprobs for group in groups]
        starting = numpy_logprobs(load_reference(folders["qwen3"]), groups, setup)
        advantages, taken = [], []
        for group, then, first in zip(groups, old, starting, strict=True):
            penalties = [0.2 * float((a - b)[mask].sum()) for a, b, mask in zip(then, first, group.loss_mask, strict=True)]
            rewards = group.rewards - np.array(penalties)
            advantages.append((rewards - rewards.mean()).astype(np.float32))
            taken += penalties
        found = [np.concatenate(rows) for rows in engine._prepare(groups, None, None, None, StopGate(lambda: False))[0].advantages]
        wanted = [np.concatenate(rows) for rows in per_token(advantages, groups)]
        assert all(np.abs(a - b).max() <= 2e-4 for a, b in zip(found, wanted, strict=True))
        metrics = engine.train_step(groups, [[0, 1, 2, 3]])
        assert metrics["reward_penalty"] == pytest.approx(np.mean(taken), rel=1e-3, abs=1e-5) and metrics["kl_reference"] > 0


def test_the_second_moments_mask_is_one_for_the_whole_step(folders: dict[str, Path]) -> None:
    """Not one for each minibatch, whose own mean is within the limit or far beyond it."""
    setup = setup_of({"num_minibatches": 2, "lr": 0.0})
    setup.algorithm = algorithm_of("m2po")
    engine = MegatronEngine(setup, folders["llama"])
    groups = aged_groups(engine)
    for group, rows in zip(groups[:2], engine.logprobs(groups[:2]), strict=True):
        group.behavior_logprobs = [row.copy() for row in rows]  # nothing to leave out here
    results = [engine.train_step(groups, parts) for parts in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    shares = [metrics["behavior_masked_share"] for metrics in results]
    assert shares[0] == shares[1] > 0
    kept = engine._prepare(groups, None, None, None, StopGate(lambda: False))[0].kept
    assert kept is not None and all(row.all() for rows in kept[:2] for row in rows)
    dropped = sum(int((~row & mask).sum()) for group, rows in zip(groups, kept, strict=True) for row, mask in zip(rows, group.loss_mask, strict=True))
    assert dropped == round(shares[0] * sum(group.num_valid_tokens for group in groups))
