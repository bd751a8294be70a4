"""The recipes of conf/experiment for clusters: complete, as their sources say, and fit for the GPUs that they name; on a site that is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from launcher.__main__ import CONF
from launcher.config.schema import FullConfig, register, to_object
from launcher.launch import on_slurm
from launcher.memory.estimate import count_weights
from tests.support.documented import MODELS, World
from workers.config import Advantage, ClusterKind, ConfigError, Dtype, Proximal, Schedule, Server
from workers.data.chat import ChatTemplate
from workers.model.architecture import read_architecture

register()

RECIPES = {"gsm8k_qwen3_0.6b": "Qwen3-0.6B", "math_qwen3_8b": "Qwen3-8B", "code_qwen3_8b": "Qwen3-8B",
           "math_qwen3_32b": "Qwen3-32B", "math_qwen3_30b_a3b": "Qwen3-30B-A3B",
           "paper_1.5b": "DeepSeek-R1-Distill-Qwen-1.5B", "paper_7b": "DeepSeek-R1-Distill-Qwen-7B"}
Recipe = Callable[..., FullConfig]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """All that a user gives: the recipe, a site, a model, data; and on top what a test gives."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM to be asked
    monkeypatch.setattr(on_slurm, "prepare", lambda *given, **named: None)  # it looks at models and data themselves
    world = World(tmp_path)

    def composed(name: str, *more: str) -> FullConfig:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return to_object(compose("config", overrides=[
                f"hydra.searchpath=[file://{world.folder}/conf]", "cluster=mysite", f"experiment={name}",
                f"model.path={world.folder}/models/{RECIPES[name]}", "data.path=/datasets/some", *more]))

    return composed


def planned(config: FullConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    config.launch.dry_run, config.run.dir = True, str(tmp_path / "run")
    assert on_slurm.launch(config) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_complete_and_fits(name: str, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(name, "cluster.inference.gpu_memory_gb=79")
    told = planned(config, tmp_path, capsys)
    assert config.engine.server is Server.sglang and config.engine.dtype is config.trainer.dtype is Dtype.bfloat16
    assert config.data.chat_template and config.data.kind.value in ("hf", "jsonl") and config.rollout.concurrency == "auto"
    assert config.workflow.max_new_tokens + (config.data.max_prompt_tokens or 512) <= config.engine.context_length
    assert re.search(r"a training rank takes about [\d.]+ GiB of 79 GiB", told) and "an inference GPU takes at least about" in told
    assert "#SBATCH --partition=gpu\n" in told and "#SBATCH --partition=gpu-large\n" in told
    assert config.plan().num_inference_devices == 0.75 * config.allocation.num_devices and not config.plan().num_unused


def test_every_recipe_for_clusters_is_tested_and_says_what_to_expect() -> None:
    recipes = {path.stem: path.read_text() for path in (CONF / "experiment").glob("*.yaml") if "cluster=mysite" in path.read_text()}
    assert recipes.keys() == RECIPES.keys()
    for text in recipes.values():
        assert "# Expected: not run here" in text


@pytest.mark.parametrize(("devices", "train", "gpu_gb"), [(8, 2, 40), (4, 1, 40)])
def test_gsm8k_takes_one_node(devices: int, train: int, gpu_gb: int, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe("gsm8k_qwen3_0.6b", f"allocation.num_devices={devices}", f"cluster.train.gpu_memory_gb={gpu_gb}")
    told = planned(config, tmp_path, capsys)
    assert re.search(rf"#SBATCH --array=0-\d+%{devices - train}\n", told)
    assert "#SBATCH --gres=gpu:a100:1\n" in told and f"#SBATCH --gres=gpu:h100:{train}\n" in told and told.count("#SBATCH --nodes=1\n") == 2


def test_gsm8k_on_smaller_gpus_says_what_to_change(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="The nearest that fits: trainer.microbatch_tokens=5120"):
        planned(recipe("gsm8k_qwen3_0.6b", "cluster.train.gpu_memory_gb=24"), tmp_path, capsys)
    planned(recipe("gsm8k_qwen3_0.6b", "cluster.train.gpu_memory_gb=24", "trainer.microbatch_tokens=5120"), tmp_path, capsys)


PAPER: dict[str, Any] = {
    "trainer.batch_groups": 512, "workflow.group_size": 16, "trainer.num_minibatches": 4, "algorithm.clip_epsilon": 0.2, "algorithm.gamma": 1.0,
    "algorithm.gae_lambda": 1.0, "algorithm.kl_weight": 0.0, "algorithm.advantage": Advantage.batch_norm, "reward.correct": 5.0,
    "reward.wrong": -5.0, "trainer.lr": 2e-5, "trainer.adam_beta1": 0.9, "trainer.adam_beta2": 0.95, "trainer.adam_eps": 1e-5,
    "trainer.weight_decay": 0.05, "trainer.clip_grad": 1.0, "trainer.lr_schedule": Schedule.constant, "workflow.temperature": 1.0,
    "workflow.top_p": 1.0, "workflow.top_k": -1, "data.max_prompt_tokens": 1024, "workflow.max_new_tokens": 27648}
"""Table 3 of arXiv 2505.24298."""


@pytest.mark.parametrize(("name", "devices"), [("paper_1.5b", 16 * 8), ("paper_7b", 24 * 8)])
def test_the_papers_hyperparameters(name: str, devices: int, recipe: Recipe) -> None:
    config = recipe(name)
    for key, value in PAPER.items():
        part, _, field = key.partition(".")
        assert getattr(getattr(config, part), field) == value, key
    assert (config.allocation.num_devices, config.allocation.inference_fraction, config.run.num_steps) == (devices, 0.75, 250)
    assert config.staleness.eta == 8 and config.algorithm.decoupled and config.algorithm.proximal is Proximal.recompute
    assert config.trainer.microbatch_tokens == 32768 and config.cluster.kind is ClusterKind.slurm and config.run.name == name


@pytest.mark.parametrize("name", ["gsm8k_qwen3_0.6b", "math_qwen3_8b", "code_qwen3_8b"])
def test_qwen3_answers_without_its_thinking_mode(name: str, recipe: Recipe, tmp_path: Path) -> None:
    # The end of Qwen3's template, as published.
    template = ("{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
                "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
                "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}")
    folder = tmp_path / "models" / RECIPES[name]
    config = recipe(name)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    rendered = ChatTemplate(folder, config.data.chat_template_kwargs).render("1 + 1?")
    assert rendered == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(("name", "billions"), [
    ("Qwen3-0.6B", 0.596), ("Qwen3-8B", 8.19), ("DeepSeek-R1-Distill-Qwen-1.5B", 1.777), ("DeepSeek-R1-Distill-Qwen-7B", 7.616)])
def test_shapes_are_those_of_the_models(name: str, billions: float, tmp_path: Path) -> None:
    assert set(RECIPES.values()) == set(MODELS)
    architecture = read_architecture(World(tmp_path).folder / "models" / name)
    assert count_weights(architecture).total / 1e9 == pytest.approx(billions, rel=2e-3)
