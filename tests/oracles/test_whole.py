"""Every algorithm's file, trained by the engine, against its paper's loss on padded rows of a Hugging Face model, in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.oracles.padded import forward
from tests.oracles.papers import PAPERS, published
from tests.oracles.whole_case import (
    FILES,
    KIND,
    NUM_STEPS,
    VARIANTS,
    PaperTraining,
    Results,
    algorithm,
    assert_equal,
    batch,
    setup,
    train,
    trained_by_engine,
    write_behavior,
)
from tests.support.hf_reference import ReferenceTraining, load_reference, reference_logprobs
from tests.support.megatron_case import write_model
from workers.trainer.megatron.engine import MegatronEngine

pytestmark = pytest.mark.usefixtures("megatron_groups")

CRITIC = "decoupled_ppo_critic"
TEACHER_KIND = "llama"
PACKINGS = {"shared": {"share_prompts": True, "microbatch_tokens": 64}, "apart": {"share_prompts": False, "microbatch_tokens": 4096},
            "small": {"share_prompts": True, "microbatch_tokens": 32}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = write_model(KIND, tmp_path_factory.mktemp("whole"))
    write_behavior(folder)
    write_model(TEACHER_KIND, folder / "teacher", seed=7)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Results]:
    """What each paper's training comes to."""
    return {name: PaperTraining(folder, name, setup(name, folder / "teacher")).run(folder) for name in PAPERS}


def test_every_file_has_an_oracle() -> None:
    assert {*FILES, *VARIANTS} == {*PAPERS, CRITIC}


@pytest.mark.parametrize("name", FILES)
def test_files_have_the_settings_that_the_papers_publish(name: str) -> None:
    for key, (paper, found) in published(algorithm(name), name).items():
        assert found == paper, key


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_trains_as_the_paper_says(folder: Path, expected: dict[str, Results], name: str) -> None:
    """In one layout of micro-batches; the others are compared for some algorithms."""
    config = setup(name, folder / "teacher", **PACKINGS["shared"])
    assert_equal(trained_by_engine(MegatronEngine(config, folder), folder, config), expected[name])


@pytest.mark.parametrize("packing", ["apart", "small"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "m2po", "reinforce_pp", "dr_grpo", "tis-sequence"])
def test_packing_changes_nothing(folder: Path, expected: dict[str, Results], name: str, packing: str) -> None:
    config = setup(name, folder / "teacher", **PACKINGS[packing])
    assert_equal(trained_by_engine(MegatronEngine(config, folder), folder, config), expected[name])


def test_algorithms_differ(expected: dict[str, Results]) -> None:
    """No comparison could pass for another algorithm's: losses, gradient norms or weights are others (by Adam, weights know of no scale)."""
    names = sorted(expected)
    for index, one in enumerate(names):
        for other in names[index + 1:]:
            assert max(distance(expected[one][key], expected[other][key]) for key in expected[one]) > 1e-3, (one, other)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / max(np.linalg.norm(one), 1e-3))


def test_trains_policy_and_critic(folder: Path) -> None:
    """The file with a critic, which warms up for no step here."""
    config = setup(CRITIC)
    config.algorithm.critic_warmup_steps, config.algorithm.critic_lr = 0, 1e-3
    engine, training = MegatronEngine(config, folder), ReferenceTraining(folder, config)
    for step in range(NUM_STEPS):
        groups = batch(folder, step)
        with torch.no_grad():
            proximal = [[row.numpy() for row in reference_logprobs(training.policy.model, group, config.workflow.temperature)[0]] for group in groups]
        for group in groups:  # that reference multiplies by the mask
            group.behavior_logprobs = [np.where(mask, row, np.float32(0)) for row, mask in zip(group.behavior_logprobs, group.loss_mask, strict=True)]
        found, wanted = train(engine, groups, config), training.step(groups, proximal)
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_the_log_probs_are_those_of_padded_rows(folder: Path) -> None:
    groups = batch(folder, 0)
    model = load_reference(folder)
    found = MegatronEngine(setup("grpo"), folder).logprobs(groups)
    with torch.no_grad():
        rows = iter(forward(model, groups, setup("grpo").workflow.temperature)[0].numpy())
    for group in found:
        for logprobs in group:
            assert np.abs(logprobs - next(rows)[:len(logprobs)]).max() <= 1e-4
