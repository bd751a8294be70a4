"""The run that `headway selftest` makes of a config, and its verdict."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from launcher.__main__ import CONF
from launcher.config.schema import FullConfig, register, to_object
from launcher.launch.selftest import shorten, verdict
from workers.config import ConfigError, SelfTestAction

register()


def composed(*overrides: str) -> FullConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_object(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize("overrides", [
    ["experiment=demo"], ["experiment=tiny", "selftest.action=off", "run.target_accuracy=0.5"],
    ["experiment=demo", "algorithm=decoupled_ppo_critic", "checkpoint.every_steps=1", "trainer.export_every_steps=1"],
    ["experiment=demo", "staleness.bound=hard", "staleness.eta=8", "staleness.target=4"],
    ["experiment=tiny", "allocation.num_devices=40", "allocation.inference_fraction=0.75"],
])
def test_the_shortest_run_that_tests_a_config(overrides: list[str]) -> None:
    given, config = composed(*overrides), composed(*overrides)
    shorten(config)
    config.check()
    assert (config.run.num_steps, config.trainer.lr, config.trainer.min_lr, config.algorithm.critic_lr, config.staleness.eta) == (2, 0, 0, 0, 0)
    assert config.run.target_accuracy is None and not config.evaluation.enabled
    assert config.checkpoint.every_minutes == config.checkpoint.every_steps == 0
    assert not config.trainer.export_final and not config.trainer.export_every_steps
    assert config.self_test_action is SelfTestAction.fail
    assert config.trainer.batch_groups >= config.plan().num_replicas, "every engine is tested"
    assert config.trainer.batch_groups <= max(8, config.plan().num_replicas) and config.rollout.concurrency >= config.trainer.batch_groups
    same = ("model", "data", "engine", "weights", "allocation", "transport", "reward")
    assert all(getattr(config, part) == getattr(given, part) for part in same)
    assert config.workflow.temperature == given.workflow.temperature and config.trainer.dtype is given.trainer.dtype


@pytest.mark.parametrize(("overrides", "words"), [
    (["experiment=sft_tiny"], "run.kind='supervised': has no self-test"), (["experiment=tiny", "engine.server=synthetic"], "It holds no model"),
    (["experiment=tiny", "launch.detach=true"], "launch.detach=True"),
])
def test_where_there_is_nothing_to_test(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shorten(composed(*overrides))


def step(mean: float) -> dict:
    return {"logprob_gap_mean": mean, "logprob_gap_max": 2 * mean, "num_tokens_compared": 120.0}


@pytest.mark.parametrize(("steps", "agreed", "words"), [
    ([step(1e-4), step(2e-4)], True, ["starting weights: log-probs differ by 0.0001 nats", "update at learning rate 0: log-probs differ by 0.0002"]),
    ([step(1e-4), step(2e-3)], False, ["0.0001 nats on average over 120 tokens, 0.0002 at most", "0.002 nats"]),
    ([step(1e-4)], False, ["0.0001", "did not get so far"]), ([], False, ["did not get so far"] * 2),
    ([step(1e-4), {"num_tokens_compared": 0.0}], False, ["0.0001", "did not get so far"]),
])
def test_the_verdict(steps: list[dict], agreed: bool, words: list[str]) -> None:
    found, lines = verdict(steps, composed("experiment=tiny"))
    assert found is agreed and len(lines) == 3 and "0.001 are allowed" in lines[-1] and "weights.transport=zmq" in lines[-1]
    assert all(word in line for word, line in zip(words, lines, strict=False))


@pytest.mark.parametrize(("override", "words"), [
    ("selftest.mean_tolerance=-1", "must not be negative"), ("evaluation.every_steps=3", "must be 0 with evaluation.enabled=false"),
    ("run.target_accuracy=0.5", "must be null with evaluation.enabled=false"),
])
def test_values_that_cannot_work(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        composed("experiment=tiny", "evaluation.every_steps=0", "evaluation.enabled=false", override)


def test_off_is_a_word_everywhere() -> None:
    assert composed("experiment=tiny", "selftest.action=off").selftest.action is SelfTestAction.off
