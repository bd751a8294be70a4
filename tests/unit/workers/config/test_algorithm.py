"""The objective's part of the config: what is refused, that a critic goes with GAE, and that every algorithm's file can be used."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.algorithm_files import FILES, algorithm_of, text_of
from workers.config import (
    Advantage,
    Aggregation,
    AlgorithmConfig,
    Config,
    ConfigError,
    ImportanceLevel,
    KlEstimator,
    KlPlace,
    OffPolicy,
    Proximal,
    RunKind,
    Surrogate,
)


@pytest.mark.parametrize(("change", "words"), [
    ({"kl_weight": -0.1}, "kl_weight=-0.1.*not be negative"), ({"entropy_weight": -0.1}, "entropy_weight=-0.1.*not be negative"),
    ({"gamma": 1.1}, "gamma.*from 0 to 1"), ({"gae_lambda": -1.0}, "gae_lambda.*from 0 to 1"),
    ({"gamma": 0.9}, "gamma=0.9.*must be 1 with algorithm.advantage=group_norm"),
    ({"gae_lambda": 0.9, "advantage": Advantage.reinforce_pp}, "gae_lambda=0.9.*must be 1 with"),
    ({"critic_lr": 1.0}, "critic_lr.*less than 1"), ({"critic_warmup_steps": -1, "advantage": Advantage.gae}, "critic_warmup_steps.*not be negative"),
    ({"critic_warmup_steps": 3}, "critic_warmup_steps=3.*must be 0 with algorithm.advantage=group_norm"), ({"value_clip": -1.0}, "value_clip"),
    ({"clip_epsilon": 1.0}, r"clip_epsilon=1.0.*in \(0, 1\)"), ({"clip_epsilon": 1.5, "surrogate": Surrogate.cispo}, r"in \(0, 1\]"),
    ({"clip_epsilon_high": -1.0}, "clip_epsilon_high.*not be negative"),
    ({"clip_epsilon_high": 0.3, "surrogate": Surrogate.sapo}, "clip_epsilon_high=0.3.*must be 0 with algorithm.surrogate=sapo"),
    ({"dual_clip": 0.5}, "dual_clip=0.5.*0 or more than 1"), ({"dual_clip": 3.0, "surrogate": Surrogate.cispo}, "dual_clip=3.0.*must be 0 with"),
    ({"sapo_tau_positive": 0.0}, "sapo_tau_positive.*must be positive"), ({"sapo_tau_negative": -1.0}, "sapo_tau_negative.*must be positive"),
    ({"ratio": ImportanceLevel.sequence}, "ratio='sequence'.*token or geometric"),
    ({"ratio": ImportanceLevel.geometric, "surrogate": Surrogate.cispo}, "ratio='geometric'.*must be token with algorithm.surrogate=cispo"),
    ({"ratio": ImportanceLevel.geometric, "surrogate": Surrogate.sapo}, "ratio='geometric'.*must be token with algorithm.surrogate=sapo"),
    ({"behavior_cap": 0.5}, "behavior_cap.*1 or more"), ({"behavior_floor": 1.5}, "behavior_floor.*from 0 to 1"),
    ({"second_moment": 0.0}, "second_moment=0.0.*positive"),
    ({"decoupled": False, "behavior_level": ImportanceLevel.sequence}, "behavior_level='sequence'.*must be token with algorithm.decoupled=false"),
    ({"decoupled": False, "behavior_floor": 0.5}, "behavior_floor=0.5.*must be 0 with algorithm.decoupled=false"),
    ({"decoupled": False, "off_policy": OffPolicy.second_moment}, "off_policy='second_moment'.*must be mask"),
    ({"off_policy": OffPolicy.second_moment, "proximal": Proximal.reuse}, "proximal='reuse'.*must be recompute with algorithm.off_policy"),
    ({"off_policy": OffPolicy.second_moment, "behavior_level": ImportanceLevel.geometric}, "behavior_level='geometric'.*must be token"),
    ({"off_policy": OffPolicy.second_moment, "behavior_floor": 0.5}, "behavior_floor=0.5.*must be 0 with algorithm.off_policy=second_moment"),
    ({"kl_weight": 0.1, "kl_estimator": KlEstimator.k1}, "kl_estimator='k1'.*k2 or k3 with algorithm.kl_in=loss"),
    ({"kl_weight": 0.1, "kl_in": KlPlace.reward, "proximal": Proximal.loglinear}, "kl_in='reward'.*must be loss with algorithm.proximal=loglinear"),
    ({"advantage": Advantage.none}, "kl_in='loss'.*must be advantage or loss with algorithm.advantage=none, with a kl_weight above 0"),
    ({"advantage": Advantage.none, "kl_weight": 1.0, "kl_in": KlPlace.reward}, "kl_in='reward'.*must be advantage or loss"),
    ({"advantage": Advantage.gae, "kl_weight": 1.0, "kl_in": KlPlace.advantage}, "kl_in='advantage'.*must be loss or reward with"),
    ({"kl_weight": 1.0, "kl_in": KlPlace.advantage, "proximal": Proximal.reuse}, "kl_in='advantage'.*must be loss with algorithm.proximal=reuse"),
    ({"teacher": "/models/large"}, "teacher='/models/large'.*must be empty with algorithm.kl_weight=0"),
    ({"aggregation_length": -1}, "aggregation_length.*not be negative"),
    ({"aggregation_length": 8}, "aggregation_length=8.*must be 0 with algorithm.aggregation=token_mean"),
], ids=lambda value: "-".join(f"{key}={getattr(part, 'value', part)}" for key, part in value.items()) if isinstance(value, dict) else "")
def test_what_cannot_work_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AlgorithmConfig(**change).check()


@pytest.mark.parametrize("change", [
    {"decoupled": False, "ratio": ImportanceLevel.geometric}, {"clip_epsilon": 1.0, "surrogate": Surrogate.cispo},
    {"decoupled": False, "kl_weight": 0.1, "kl_in": KlPlace.reward, "proximal": Proximal.reuse},
    {"advantage": Advantage.gae, "kl_weight": 0.1, "kl_in": KlPlace.reward, "gamma": 0.9, "gae_lambda": 0.9},
    {"aggregation": Aggregation.fixed_length, "aggregation_length": 8}, {"off_policy": OffPolicy.clamp, "behavior_level": ImportanceLevel.sequence},
], ids=lambda change: "-".join(f"{key}={getattr(value, 'value', value)}" for key, value in change.items()))
def test_what_can_work_is_not(change: dict[str, Any]) -> None:
    AlgorithmConfig(**change).check()


@pytest.mark.parametrize("name", FILES)
def test_a_file_names_keys_that_exist_and_go_together(name: str) -> None:
    algorithm_of(name).check()
    assert set(yaml.safe_load(text_of(name))) <= set(AlgorithmConfig.__dataclass_fields__)
    assert re.match(r"# .*(arXiv|paper|Yao)", text_of(name)), "it says what it implements"


def test_the_default_is_decoupled_ppo() -> None:
    found = algorithm_of("decoupled_ppo")
    assert found == AlgorithmConfig() and (found.critic, found.regularizes, found.needs_proximal) == (False, False, False)
    assert AlgorithmConfig(advantage=Advantage.gae).critic


@pytest.mark.parametrize("advantage", [kind for kind in Advantage if AlgorithmConfig(advantage=kind).compares_groups], ids=lambda kind: kind.value)
def test_a_group_of_one_has_nothing_to_be_compared_with(advantage: Advantage) -> None:
    config = Config()
    config.model.path, config.workflow.group_size, config.algorithm.advantage = "/model", 1, advantage
    with pytest.raises(ConfigError, match=rf"group_size=1: must be 2 or more with algorithm.advantage={advantage.value}"):
        config.check()
    config.algorithm.advantage = Advantage.reinforce_pp
    config.check()


def test_supervised_training_has_no_bonus() -> None:
    config = Config()
    config.model.path, config.run.kind, config.algorithm.entropy_weight = "/model", RunKind.supervised, 0.1
    with pytest.raises(ConfigError, match=r"entropy_weight=0.1: must be 0 with run\.kind=supervised"):
        config.check()


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    config = Config()
    config.model.path = "/model"
    config.algorithm = AlgorithmConfig(advantage=Advantage.gae, critic_warmup_steps=5)
    config.run.num_steps = 4
    with pytest.raises(ConfigError, match=r"critic_warmup_steps=5.*at most run\.num_steps=4"):
        config.check()
    config.run.num_steps = 5
    config.check()
