"""Training in every layout, by real processes over gloo, against Hugging Face models and torch's AdamW in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.hf_reference import (
    ReferenceTraining,
    adamw,
    load_reference,
    merged,
    reference_logprobs,
    reference_loss,
    saved_tensors,
    with_adapters,
)
from tests.support.megatron_case import write_model
from tests.wire.gangs import run_ranks
from tests.wire.ranks.parallel_rank import KINDS, MIXTURES, NUM_STEPS, batch, kinds, setup
from tests.wire.ranks.parallel_rank import found as results_of
from workers.config import RoutingShape
from workers.model.architecture import read_architecture
from workers.trainer.megatron.parallel import process_group

TWO = ["tp2", "pp2", "cp2", "dp2", "ep2", "ep2-recompute", "tp2-recompute", "cp2-selective", "pp2vpp2"]
WITH_CRITIC = ["tp2-critic", "tp2-whole-critic", "pp2-critic", "cp2-critic", "dp2-critic", "pp2vpp2-critic"]
FOUR = ["tp2pp2", "tp2dp2", "tp2cp2", "pp2cp2", "tp2ep2", "pp4", "tp2pp2vpp2", "pp2vpp2dp2", "pp2dp2", "ep2dp2", "pp2ep2"]
LORA = ["tp2-lora", "tp2-whole-lora", "pp2-recompute-lora", "cp2-lora", "dp2-lora", "ep2-lora"]
REPLAY = {2: ["tp2-replay", "pp2-recompute-replay", "cp2-selective-replay", "dp2-replay", "ep2-recompute-replay",
               "pp2vpp2-recompute-replay"],
          4: ["tp2ep2-recompute-replay", "tp2pp2-replay", "pp2cp2-replay"]}
LORA_WITH_CRITIC, LORA_OF_FOUR = ["tp2-lora-critic", "pp2-lora-critic"], ["tp2pp2-lora", "tp2ep2-lora"]
QUICK_OF_FOUR, EVERY_KIND, QUICK_KINDS = ("tp2pp2", "tp2ep2"), ("pp2", "ep2"), ("qwen3-tied", "qwen3moe")
"""What is not `long`: of four ranks these layouts; of two ranks all, these with every kind of model; the others with these kinds."""
Results = dict[str, np.ndarray]


def cases(layouts: Sequence[str]) -> list[Any]:
    """Each layout with each of its models."""
    def is_long(layout: str, kind: str) -> bool:
        if layout in (*FOUR, *LORA_OF_FOUR):
            return layout not in QUICK_OF_FOUR or kind not in QUICK_KINDS
        return layout not in EVERY_KIND and kind not in QUICK_KINDS and len(kinds(layout)) > 1

    return [pytest.param(layout, kind, marks=pytest.mark.long if is_long(layout, kind) else [])
            for layout in layouts for kind in kinds(layout)]


def asked(request: pytest.FixtureRequest, layouts: Sequence[str]) -> list[str]:
    """Of these layouts, and of their models, those that some test to be run is of."""
    found: dict[str, dict[str, None]] = {}
    for item in request.session.items:
        given = item.callspec.params if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec") else {}
        if given.get("layout") in layouts:
            found.setdefault(given["layout"], {})[given.get("kind", "qwen3-tied")] = None
    return [f"{layout}={','.join(of_layout)}" for layout, of_layout in found.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    for kind in KINDS:
        write_model(kind, folder / kind)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Results]:
    torch.set_num_threads(1)
    return {kind: trained_by_hugging_face(folder / kind) for kind in KINDS}


def trained_by_hugging_face(folder: Path, adapters: Results | None = None, routing: RoutingShape | None = None) -> Results:
    """All of it, or, from the first ones of `adapters` on, these; with `routing` by the batches' choices of experts."""
    model: Any = load_reference(folder)
    config = setup("lora" if adapters else "", folder.name)
    if adapters:
        first = {name.partition(":")[2]: torch.from_numpy(value) for name, value in adapters.items() if name.startswith("first:")}
        with_adapters(model, first, config.trainer.lora.alpha / config.trainer.lora.rank)
    groups, _ = batch(0, routing)
    with torch.no_grad():
        pairs = [reference_logprobs(model, group, config.workflow.temperature) for group in groups]
    result = {name: np.concatenate([row.numpy() for pair in pairs for row in pair[number]]) for number, name in enumerate(("logprobs", "entropies"))}
    optimizer = adamw(model, config.trainer)
    for step in range(NUM_STEPS):
        groups, proximal = batch(step, routing)
        loss = reference_loss(model, groups, proximal, config)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.clip_grad)
        optimizer.step()
        result |= {f"{step}:loss": np.array(loss.item()), f"{step}:grad_norm": np.array(norm.item())}
    return result | {f"weight:{name}": tensor.numpy() for name, tensor in saved_tensors(merged(model)).items()
                     if not name.endswith("e_score_correction_bias")}


@pytest.fixture(scope="module")
def of_two(folder: Path, request: pytest.FixtureRequest) -> Path:
    """What adapters of all layouts begin with is that of tp2-lora."""
    found = asked(request, [*TWO, *WITH_CRITIC, *LORA[1:], *LORA_WITH_CRITIC])
    run_ranks("tests.wire.ranks.parallel_rank", folder, 2, LORA[0], *found)
    return folder


@pytest.fixture(scope="module")
def of_four(folder: Path, request: pytest.FixtureRequest) -> Path:
    if found := asked(request, [*FOUR, *LORA_OF_FOUR]):
        run_ranks("tests.wire.ranks.parallel_rank", folder, 4, *found)
    return folder


def assert_equal(folder: Path, layout: str, kind: str, expected: Results) -> None:
    """Loss and gradient norm to 1e-5, weights to 1e-5 of their norm, log-probs and entropies to 1e-4; counts exact."""
    found: Results = dict(np.load(folder / f"{layout}.{kind}.npz"))
    assert np.abs(found["logprobs"] - expected["logprobs"]).max() <= 1e-4
    assert np.abs(found["entropies"] - expected["entropies"]).max() <= 1e-4
    for step in range(NUM_STEPS):
        for name in ("loss", "grad_norm"):
            assert found[f"{step}:{name}"] == pytest.approx(expected[f"{step}:{name}"], rel=1e-5, abs=1e-8), (step, name)
        assert found[f"{step}:num_tokens"] == sum(group.num_valid_tokens for group in batch(step)[0])
    weights = {name for name in expected if name.startswith("weight:")}
    assert weights == {name for name in found if name.startswith("weight:")}
    for name in weights:
        assert np.linalg.norm(found[name] - expected[name]) <= 1e-5 * np.linalg.norm(expected[name]), name


@pytest.mark.parametrize(("layout", "kind"), cases(TWO))
def test_two_ranks_train_like_hugging_face(of_two: Path, reference: dict[str, Results], layout: str, kind: str) -> None:
    assert_equal(of_two, layout, kind, reference[kind])


@pytest.mark.parametrize(("layout", "kind"), cases(FOUR))
def test_four_ranks_train_like_hugging_face(of_four: Path, reference: dict[str, Results], layout: str, kind: str) -> None:
    assert_equal(of_four, layout, kind, reference[kind])


@pytest.fixture(scope="module")
def replayed(folder: Path) -> dict[str, Results]:
    torch.set_num_threads(1)
    return {kind: trained_by_hugging_face(folder / kind, routing=read_architecture(folder / kind).routing) for kind in MIXTURES}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_train_by_the_engines_choice_of_experts_like_hugging_face(
        folder: Path, reference: dict[str, Results], replayed: dict[str, Results], world: int) -> None:
    run_ranks("tests.wire.ranks.parallel_rank", folder, world, *REPLAY[world])
    for kind in MIXTURES:
        assert np.abs(replayed[kind]["logprobs"] - reference[kind]["logprobs"]).mean() > 0.1, "by others than the router's own"
        for layout in (layout for layout in REPLAY[world] if kind in kinds(layout)):
            assert_equal(folder, layout, kind, replayed[kind])


@pytest.fixture(scope="module")
def with_critic(folder: Path) -> dict[str, Results]:
    return {kind: _with_critic(folder / kind) for kind in {kind for layout in WITH_CRITIC for kind in kinds(layout)}}


def _with_critic(folder: Path) -> Results:
    torch.set_num_threads(1)
    config = setup("dp2-critic")
    training, result = ReferenceTraining(folder, config), {}
    for step in range(NUM_STEPS):
        result |= {f"{step}:{name}": np.array(value) for name, value in training.step(*batch(step)).items()}
    values, _, _ = training.critic.estimates(batch(NUM_STEPS)[0], config)
    weights = {f"weight:{name}": parameter.detach().numpy() for name, parameter in training.policy.model.named_parameters()}
    return result | weights | {"values": np.concatenate([row for rows in values for row in rows])}


@pytest.mark.parametrize(("layout", "kind"), cases(WITH_CRITIC))
def test_two_ranks_train_policy_and_critic_like_hugging_face(of_two: Path, with_critic: dict[str, Results], layout: str, kind: str) -> None:
    """With two minibatches, a reference model, and advantages by GAE, normalised over all copies."""
    found: Results = dict(np.load(of_two / f"{layout}.{kind}.npz"))
    for name, expected in with_critic[kind].items():
        assert np.linalg.norm(found[name] - expected) <= 1e-5 * np.linalg.norm(expected), name


@pytest.fixture(scope="module")
def with_lora(folder: Path, of_two: Path) -> dict[str, Results]:
    torch.set_num_threads(1)
    return {kind: trained_by_hugging_face(folder / kind, dict(np.load(of_two / f"tp2-lora.{kind}.npz"))) for kind in kinds("tp2-lora")}


@pytest.mark.parametrize(("layout", "kind"), cases(LORA))
def test_two_ranks_train_adapters_like_hugging_face(of_two: Path, with_lora: dict[str, Results], layout: str, kind: str) -> None:
    assert_equal(of_two, layout, kind, with_lora[kind])


@pytest.mark.parametrize(("layout", "kind"), cases(LORA_OF_FOUR))
def test_four_ranks_train_adapters_like_hugging_face(of_four: Path, with_lora: dict[str, Results], layout: str, kind: str) -> None:
    assert_equal(of_four, layout, kind, with_lora[kind])


@pytest.mark.parametrize("layout", [*LORA[:-1], pytest.param(LORA_OF_FOUR[0], marks=pytest.mark.long)])
def test_adapters_begin_and_end_alike_in_every_layout(of_two: Path, of_four: Path, layout: str) -> None:
    expected, result = (dict(np.load(of_two / f"{name}.qwen3-tied.npz")) for name in ("tp2-lora", layout))
    names = [name for name in expected if name.startswith(("first:", "last:"))]
    assert len(names) == 2 * 2 * 7 * 2 and names == [name for name in result if name.startswith(("first:", "last:"))]
    for name in names:
        limit = 0 if name.startswith("first:") else 1e-4 * np.linalg.norm(expected[name])
        assert np.linalg.norm(result[name] - expected[name]) <= limit, name


@pytest.mark.parametrize("layout", LORA_WITH_CRITIC)
def test_a_critic_with_adapters_trains_alike_in_every_layout(folder: Path, of_two: Path, layout: str) -> None:
    """As one process does, with the starting model as the reference, which the policy without its adapters is."""
    result, expected = dict(np.load(of_two / f"{layout}.qwen3-tied.npz")), results_of(folder, None, "lora-critic", "qwen3-tied")
    process_group.close()
    bubbles = {f"{step}:pipeline_bubble" for step in range(NUM_STEPS)} if layout.startswith("pp2") else set()
    assert result.keys() == expected.keys() | bubbles and all(0 < result[name] < 0.4 for name in bubbles)
    for name, value in expected.items():
        if "num_microbatches" not in name:  # stages want more of them
            assert np.linalg.norm(result[name] - value) <= 1e-4 * np.linalg.norm(value) + 1e-7, name
