"""The objective's part of the config: what is refused, and that a critic goes with GAE."""

from __future__ import annotations

import pytest

from workers.config import Advantage, AlgorithmConfig, Config, ConfigError, Proximal


@pytest.mark.parametrize(("change", "words"), [
    ({"kl_weight": -0.1}, "kl_weight=-0.1.*not be negative"), ({"gamma": 1.1}, "gamma.*from 0 to 1"),
    ({"gae_lambda": -1.0}, "gae_lambda.*from 0 to 1"),
    ({"critic_lr": 1.0}, "critic_lr.*less than 1"), ({"critic_warmup_steps": -1, "advantage": Advantage.gae}, "critic_warmup_steps.*not be negative"),
    ({"critic_warmup_steps": 3}, "critic_warmup_steps=3.*must be 0 with algorithm.advantage=group_norm"), ({"value_clip": -1.0}, "value_clip"),
])
def test_what_cannot_work_is_refused(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AlgorithmConfig(**change).check()


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    config = Config()
    config.model.path = "/model"
    config.algorithm = AlgorithmConfig(advantage=Advantage.gae, critic_warmup_steps=5)
    config.run.num_steps = 4
    with pytest.raises(ConfigError, match=r"critic_warmup_steps=5.*at most run\.num_steps=4"):
        config.check()
    config.run.num_steps = 5
    config.check()


def test_defaults_hold_one_model() -> None:
    config = AlgorithmConfig()
    assert (config.critic, config.kl_weight, config.proximal) == (False, 0.0, Proximal.recompute)
    assert AlgorithmConfig(advantage=Advantage.gae).critic
