"""What the plan says of generation, and what it warns of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console

from launcher.__main__ import CONF
from launcher.config.schema import FullConfig, register, to_object
from launcher.launch import on_slurm
from launcher.views import plan_advice
from workers.run.folder import RunFolder

GSM8K = ("cluster=slurm", "cluster.inference.partition=gpu", "cluster.train.partition=gpu", "cluster.inference.time=60", "cluster.train.time=60",
         "allocation.num_devices=8", "model.path=/models/Qwen3-0.6B", "data=gsm8k")
register()
RIGHT = ("engine=sglang", "workflow.max_new_tokens=1024", "data.chat_template=true", "trainer.microbatch_tokens=8192")


def composed(*overrides: str) -> FullConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_object(compose("config", overrides=list(overrides)))


def test_defaults_that_do_not_suit_a_data_set_and_a_cluster_are_told_loudly() -> None:
    config = composed(*GSM8K)
    assert plan_advice.generation(config) == (
        f"generation: embedded engine in {config.engine.dtype.value}, up to 16 new tokens a turn (workflow.max_new_tokens) in a context of 256 "
        "(engine.context_length), prompts as they are, without a chat template")
    tokens, template, engine = plan_advice.warnings(config, with_template=True)
    assert "WARNING: workflow.max_new_tokens=16: data.adapter=gsm8k has solutions" in tokens and "Give 512 or more" in tokens
    assert "data.chat_template=true; a base model does not" in template and "Use engine=sglang" in engine


def test_what_suits_is_not_warned_of() -> None:
    config = composed(*GSM8K, *RIGHT)
    assert plan_advice.warnings(config, with_template=True) == []
    assert "sglang engine in " in (told := plan_advice.generation(config)) and "1024 new tokens" in told and "in the model's chat template" in told
    assert len(plan_advice.warnings(composed(*GSM8K, *RIGHT, "data.chat_template=false"), with_template=True)) == 1
    assert plan_advice.warnings(composed(*GSM8K, *RIGHT, "data.chat_template=false"), with_template=False) == []
    assert plan_advice.warnings(composed(*GSM8K, *RIGHT[1:], "engine.context_length=2048", "cluster.inference.gpus=none"), with_template=False) == []


def test_gpus_that_ranks_cannot_see_are_warned_of() -> None:
    (told,) = plan_advice.warnings(composed(*GSM8K, *RIGHT, "cluster.train.gpus=gpus_per_task"), with_template=True)
    assert "NVLink" in told and "cluster.train.gpus=gres" in told


@pytest.mark.parametrize("experiment", ["tiny", "demo", "gsm_symbolic", "multi_turn", "code_tiny"])
def test_the_experiments_that_come_along_need_no_warning(experiment: str) -> None:
    assert plan_advice.warnings(composed(f"experiment={experiment}"), with_template=True) == []


def test_a_supervised_run_is_told_what_it_learns() -> None:
    assert plan_advice.generation(composed("experiment=sft_tiny")).startswith("examples: up to ")


def test_chat_templates_are_found(tmp_path: Path) -> None:
    assert not plan_advice.has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert not plan_advice.has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert not plan_advice.has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert plan_advice.has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert plan_advice.has_chat_template(tmp_path)


def test_the_plan_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_slurm, "_settle_nodes", lambda config: "")
    console = Console(record=True, width=400)
    on_slurm.settle(composed(*GSM8K), RunFolder(tmp_path / "run"), console)
    said = console.export_text()
    assert "      generation: embedded engine" in said and said.count("WARNING: ") == 2  # there is no model that could have a template
