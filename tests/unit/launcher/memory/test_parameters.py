"""The parameters of published models, by what their makers say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from launcher.memory.parameters import count_weights, layers_of  # noqa: E402
from launcher.prediction.costs import Shapes  # noqa: E402
from workers.model.architecture import Architecture, read_architecture  # noqa: E402


def published(folder: Path, config: Any, name: str) -> Architecture:
    """The architecture of a config of transformers, whose defaults are the model's own."""
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [name]}))
    return read_architecture(folder)


@pytest.mark.parametrize(("config", "name", "total", "active"), [
    (transformers.DeepseekV3Config(), "DeepseekV3ForCausalLM", 671e9, 37e9),  # arXiv 2412.19437, abstract
    (transformers.Glm4MoeConfig(attention_bias=True, head_dim=128), "Glm4MoeForCausalLM", 106e9, 12e9)])  # GLM-4.5-Air, arXiv 2508.06471, Table 1
def test_published_models(tmp_path: Path, config: Any, name: str, total: float, active: float) -> None:
    architecture = published(tmp_path, config, name)
    shapes = Shapes.of(architecture)
    assert shapes.weights.total == pytest.approx(total, rel=0.01)
    assert shapes.active == pytest.approx(active, rel=0.1)


def test_stages_have_all_layers_once_and_dense_ones_hold_less(tmp_path: Path) -> None:
    architecture = published(tmp_path, transformers.DeepseekV3Config(num_hidden_layers=8), "DeepseekV3ForCausalLM")
    weights, stages = count_weights(architecture), [layers_of(architecture, 4, stage) for stage in range(4)]
    assert [layer for stage in stages for layer in stage] == list(range(8))
    assert [weights.of(stage).experts // weights.layers[-1].experts for stage in stages] == [0, 1, 2, 2]
    assert sum(weights.of(stage).total for stage in stages) + 2 * weights.embedding == weights.total
    assert [layers_of(architecture, 2, stage, 2) for stage in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
