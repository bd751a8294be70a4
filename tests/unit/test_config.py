"""Every bad value fails at compose time, before anything starts, with key, value, rule and remedy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

from launcher.__main__ import CONF
from launcher.schema import FullConfig, register, to_object
from workers.config import Config, ConfigError, load

register()


def composed(*overrides: str) -> FullConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_object(compose("config", overrides=["model.path=/model", *overrides]))


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_every_experiment_composes(experiment: str) -> None:
    config = composed(f"experiment={experiment}")
    assert config.plan().num_replicas >= 1


@pytest.mark.parametrize("override", [f"{group.name}={path.stem}" for group in sorted(CONF.iterdir()) if group.is_dir() and group.name != "experiment"
                                      for path in sorted(group.glob("*.yaml"))])
def test_every_group_file_composes(override: str) -> None:
    extra = ["data.path=a", "data.heldout_path=b"] if override == "data=jsonl" else []
    composed(override, *extra, "model.path=/model")


@pytest.mark.parametrize("override", [
    "trainer.learning_rate=1", "nonsense=1", "trainer.lr=fast", "staleness.bound=loose", "engine.num_slots=1.5", "engine.server=vllm",
    "workflow.stop=text", "trainer=missing",
])
def test_unknown_keys_and_wrong_types_fail(override: str) -> None:
    with pytest.raises((ConfigCompositionException, ConfigError)):
        composed(override)


@pytest.mark.parametrize(("override", "words"), [
    ("allocation.inference_fraction=0", "greater than 0"), ("allocation.inference_fraction=1", "less than 1"),
    ("allocation.inference_fraction=1.5", "less than 1"), ("staleness.eta=-1", "0 or more"), ("trainer.num_minibatches=3", r"\[1, 2, 4, 8\]"),
    ("trainer.batch_groups=0", "at least 1"), ("workflow.temperature=0", "greater than 0"), ("workflow.group_size=1", "batch_norm"),
    ("workflow.top_p=0", "top_p"), ("workflow.max_new_tokens=256", "context_length"), ("run.num_steps=0", "at least 1"),
    ("run.name='a b'", "letters"), ("transport.port_range=99", "FIRST-LAST"), ("transport.port_range=9000-8000", "FIRST <= LAST"),
    ("transport.heartbeat_timeout_s=1", "twice"), ("reward.correct=-6", "reward.wrong"), ("algorithm.clip_epsilon=1", "0.2"),
    ("algorithm.behavior_cap=0.5", "1 or more"), ("trainer.min_lr=1", "trainer.lr"), ("data.digits=9", "1 to 6"), ("data=jsonl", "data.path"),
    ("model.path=''", "model.path"), ("run.target_accuracy=2", "target_accuracy"), ("cluster.max_hours=0", "max_hours"),
    ("rollout.concurrency=0", "concurrency"), ("engine.num_slots=0", "num_slots"), ("evaluation.every_steps=-1", "every_steps"),
])
def test_impossible_values_fail_with_rule_and_remedy(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        composed(override)
    assert override.split("=")[0].split(".")[0] in str(caught.value)


def test_a_missing_model_path_is_named() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(ConfigError, match="model.path"):
        to_object(compose("config"))


def test_the_workers_read_back_what_was_composed(tmp_path: Path) -> None:
    config = composed("experiment=tiny", "staleness.bound=hard", "workflow.stop=['a','b']").for_workers()
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    assert load(path) == config and isinstance(load(path), Config)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": {"seed": "one"}}'])
def test_a_broken_run_config_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="Start the run again"):
        load(path)
