"""A mixture learns by the experts that its engine chose, through the whole pipeline; a model that has none is refused before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import START_S, headway, live_run
from tests.support.model_folders import write_hf_model
from workers.config import load
from workers.model.architecture import read_architecture
from workers.model.initialize import make_tiny
from workers.run.files import read_lines


@pytest.mark.long  # from a real engine to real ranks: tests/wire/workers/trainer/megatron/model/test_router_replay.py
def test_a_mixture_learns_by_its_engines_choice_of_experts(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", 0)
    model = tmp_path / "mixture"
    write_hf_model(model, "glm4_moe", vocab_size=json.loads((tmp_path / "tiny" / "config.json").read_text())["vocab_size"])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (tmp_path / "tiny" / name).exists():
            shutil.copy(tmp_path / "tiny" / name, model / name)
    with live_run(tmp_path / "run", "model=hf", f"model.path={model}", "algorithm.router_replay=rollout", "engine.dtype=bfloat16",
                  "run.num_steps=6", "evaluation.every_steps=3") as run:
        assert run.launcher.wait(START_S) == 0, run.output.read_text()
        run.assert_nothing_left()
    assert load(run.run.config).model.routing == read_architecture(model).routing
    assert len(read_lines(run.run.metrics)) == 6
    assert "refused" not in run.output.read_text(), "the coordinator takes training groups with routing only"


def test_a_dense_model_has_nothing_to_be_replayed(tmp_path: Path) -> None:
    refused = headway("experiment=tiny", f"run.dir={tmp_path / 'run'}", "algorithm.router_replay=rollout")
    assert refused.returncode == 2 and "algorithm.router_replay='rollout': must be off with a dense model" in refused.stderr + refused.stdout
