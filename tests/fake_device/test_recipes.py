"""The recipes for clusters fit on the GPUs that they name: the step of a rank, in its config, at the model's full depth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

pytest.importorskip("megatron.core")

from launcher.__main__ import CONF
from launcher.config.schema import register, to_object
from launcher.memory.activations import GIB
from launcher.memory.estimate import GPU_RESERVE, GPU_RESERVED_SHARE
from launcher.preflight.fake_step import measure
from tests.support.documented import MODELS

HBM = 79 * GIB
"""Of a GPU of 80 GB."""
register()

pytestmark = pytest.mark.long  # ten minutes; all recipes by the launcher's estimate: tests/unit/test_recipes.py; that it holds: test_budgets.py


@pytest.mark.parametrize(("recipe", "model", "num_train_devices"), [
    ("math_qwen3_8b", "Qwen3-8B", 8), ("code_qwen3_8b", "Qwen3-8B", 8), ("math_qwen3_32b", "Qwen3-32B", 32),
    ("math_qwen3_30b_a3b", "Qwen3-30B-A3B", 16)])
def test_a_step_fits_with_what_is_no_tensor(recipe: str, model: str, num_train_devices: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_object(compose("config", overrides=["cluster=slurm", f"experiment={recipe}", f"model.path={tmp_path}", "data.path=/d"]))
    plan = config.plan()
    assert plan.num_train_devices == num_train_devices and plan.num_inference_devices == 3 * num_train_devices
    (figures,) = measure(config.for_workers(), tmp_path, tmp_path, num_train_devices, [0])
    assert figures["peak"] * (1 + GPU_RESERVED_SHARE) + GPU_RESERVE <= HBM
    assert figures["num_microbatches"] >= 2
