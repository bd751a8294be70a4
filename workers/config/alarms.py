"""Config of the alarms: when training looks unhealthy, and what follows (docs/health.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.config.rules import require

RL_ALARMS = ("entropy_collapse", "exploding_weights", "logprob_mismatch", "equal_rewards", "growing_length", "starving_trainer", "idle_rollouts",
             "reward_collapse", "gradient_spikes", "stale_data", "strangers")
SUPERVISED_ALARMS = ("rising_loss", "gradient_spikes", "strangers")
ALARMS = tuple(dict.fromkeys(RL_ALARMS + SUPERVISED_ALARMS))


@dataclass
class AlarmsConfig:
    """Alarms are judged after every training step by medians over the last `window` steps. One begins when its condition has held for `steps`
    steps in a row, and ends when it has clearly not held (by a fifth of the limit) for as many. "The beginning" is the first `window` steps.

    `stop`: the alarms that end the run when they begin; the others only warn. `off`: those that are not judged at all. The limits:

    `entropy`: entropy_collapse, as a share of the beginning's. `weight_ess`, `weight_max`, `weight_masked`: exploding_weights, the effective sample
    size, the largest weight, and the share of tokens above algorithm.behavior_cap. `equal`: equal_rewards, the share of groups without spread or
    rejected. `truncated`, `length`: growing_length, by how much the share of truncated responses has grown; the length as a share of what there is
    room for. `waiting`: starving_trainer and idle_rollouts, the share of time. `accuracy`: reward_collapse, as a share of the best. `grad_norm`:
    gradient_spikes, as a multiple of the median before. `stale`: stale_data, the share of groups older than staleness.eta. `loss`: rising_loss, as
    a multiple of the lowest. `refused`: strangers, the number of connections and messages refused in a window. logprob_mismatch takes
    selftest.mean_tolerance.
    """

    stop: list[str] = field(default_factory=list)  # names of the alarms that end the run when they begin; docs/health.md lists them
    off: list[str] = field(default_factory=list)  # names of the alarms that are not judged
    window: int = 10  # [training steps] over which medians are taken
    steps: int = 5  # [training steps] in a row after which an alarm begins, or ends
    entropy: float = 0.05  # entropy_collapse: below this share of the beginning's
    weight_ess: float = 0.3  # exploding_weights: effective sample size below this share
    weight_max: float = 1000.0  # exploding_weights: a largest weight above this
    weight_masked: float = 0.1  # exploding_weights: a larger share of tokens above algorithm.behavior_cap
    equal: float = 0.9  # equal_rewards: a larger share of groups without spread, or rejected
    truncated: float = 0.2  # growing_length: the share of truncated responses has grown by more
    length: float = 0.8  # growing_length: a larger share of the length there is room for
    waiting: float = 0.75  # starving_trainer, idle_rollouts: a larger share of the time
    accuracy: float = 0.5  # reward_collapse: below this share of the best
    grad_norm: float = 5.0  # gradient_spikes: above this multiple of the median before
    stale: float = 0.2  # stale_data: a larger share of groups older than staleness.eta
    loss: float = 1.5  # rising_loss: above this multiple of the lowest; of supervised runs
    refused: float = 20.0  # strangers: more connections and messages refused within a window

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        for key in ("stop", "off"):
            unknown = [name for name in getattr(self, key) if name not in ALARMS]
            require(not unknown, f"alarms.{key}", unknown, f"must be among {', '.join(ALARMS)}", "docs/health.md describes them")
        both = sorted(set(self.stop) & set(self.off))
        require(not both, "alarms.stop", both, "must not be in alarms.off too", "An alarm that is not judged cannot end the run")
        for key in ("window", "steps"):
            require(getattr(self, key) >= 1, f"alarms.{key}", getattr(self, key), "must be at least 1", "It is a number of training steps")
        for key in ("entropy", "weight_ess", "weight_masked", "equal", "truncated", "length", "waiting", "accuracy", "stale"):
            require(0 < getattr(self, key) < 1, f"alarms.{key}", getattr(self, key), "must be between 0 and 1",
                    "It is a share; alarms.off names what is not to be judged")
        require(0 < self.refused < float("inf"), "alarms.refused", self.refused, "must be greater than 0, and finite",
                "It is a number; alarms.off names what is not to be judged")
        for key in ("weight_max", "grad_norm", "loss"):
            require(1 < getattr(self, key) < float("inf"), f"alarms.{key}", getattr(self, key), "must be greater than 1, and finite",
                    "It is a multiple; alarms.off names what is not to be judged")

    def check_judged(self, supervised: bool) -> None:
        """Raise `ConfigError` where an alarm is to end a run of a kind of which it is not judged."""
        judged = SUPERVISED_ALARMS if supervised else RL_ALARMS
        never = [name for name in self.stop if name not in judged]
        require(not never, "alarms.stop", never, f"must be among {', '.join(judged)}", f"The others are not judged of "
                f"{'supervised runs' if supervised else 'reinforcement learning'}, and would end none")
