"""Which matrices of a model have adapters, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.workers.model.test_architecture import MIXTURE, write_config
from workers.config import ConfigError, LoraConfig, LoraTarget, TrainerConfig
from workers.model.adapter_shapes import OF_MLP, adapter_shapes, check_adapters, layer_shapes
from workers.model.architecture import read_architecture

DENSE = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 30, "num_hidden_layers": 3, "hidden_size": 24, "head_dim": 4}


def test_shapes_are_those_of_the_targets_in_every_layer(tmp_path: Path) -> None:
    architecture = read_architecture(write_config(tmp_path, **DENSE))
    shapes = adapter_shapes(architecture, [LoraTarget.k_proj, LoraTarget.o_proj, LoraTarget.down_proj])
    assert len(shapes) == 3 * 3 and len(adapter_shapes(architecture, list(LoraTarget))) == 3 * 7
    assert shapes["model.layers.2.self_attn.k_proj"] == (24, 24) and shapes["model.layers.0.self_attn.o_proj"] == (24, 48)
    assert shapes["model.layers.1.mlp.down_proj"] == (24, 30)


@pytest.mark.parametrize("changes", [DENSE, MIXTURE])
def test_one_layer_stands_for_all(tmp_path: Path, changes: dict[str, Any]) -> None:
    architecture = read_architecture(write_config(tmp_path, **changes))
    targets = [target for target in LoraTarget if architecture.mixture is None or target not in OF_MLP]
    one, whole = layer_shapes(architecture, targets), adapter_shapes(architecture, targets)
    assert whole == {name.replace("layers.0.", f"layers.{index}."): shape for index in range(architecture.num_layers) for name, shape in one.items()}


def test_experts_have_none_and_routers_neither(tmp_path: Path) -> None:
    architecture = read_architecture(write_config(tmp_path, **MIXTURE))
    assert {name.rpartition(".")[2] for name in adapter_shapes(architecture, list(LoraTarget))} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    check_adapters(architecture, LoraConfig())
    check_adapters(architecture, LoraConfig(rank=2, targets=[LoraTarget.q_proj]))
    with pytest.raises(ConfigError, match=r"targets=\['q_proj', 'up_proj'\]: must not name up_proj in a mixture .* Use \[q_proj\]"):
        check_adapters(architecture, LoraConfig(rank=2, targets=[LoraTarget.q_proj, LoraTarget.up_proj]))


def test_a_rank_is_no_larger_than_the_matrices(tmp_path: Path) -> None:
    architecture = read_architecture(write_config(tmp_path, **DENSE))
    check_adapters(architecture, LoraConfig(rank=24))
    with pytest.raises(ConfigError, match=r"trainer\.lora\.rank=25: must be at most 24, the rank of the smallest matrix"):
        check_adapters(architecture, LoraConfig(rank=25))


@pytest.mark.parametrize(("lora", "words"), [
    (LoraConfig(rank=-1), r"trainer\.lora\.rank=-1: must not be negative\. 16 is usual; 0 trains the whole model"),
    (LoraConfig(alpha=0.0), r"trainer\.lora\.alpha=0\.0: must be positive"),
    (LoraConfig(alpha=float("inf")), r"trainer\.lora\.alpha=inf: must be positive"),
    (LoraConfig(targets=[]), r"trainer\.lora\.targets=\[\]: must not be empty\. Name some of q_proj, k_proj, .*down_proj; trainer\.lora\.rank=0"),
    (LoraConfig(targets=[LoraTarget.q_proj] * 2), r"trainer\.lora\.targets=\['q_proj', 'q_proj'\]: names a matrix twice"),
])
def test_values_that_cannot_work_are_refused(lora: LoraConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainerConfig(lora=lora).check()
