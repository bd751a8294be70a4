"""The alarms: for each the condition, and the remedy in keys of the config. Pure; alarm_state.py says when one begins and ends.

A condition has alternatives, each a list of comparisons: it holds where all comparisons of any alternative do. The figures are medians over
`alarms.window` steps (alarm_inputs.py). Where an absolute value means nothing, a figure is held against the run's own beginning, best or past.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workers.config import Config, ImportanceLevel
from workers.config.alarms import RL_ALARMS, SUPERVISED_ALARMS
from workers.coordinator.monitoring.alarm_inputs import History, NotJudged

RELEASE = 0.8
"""A comparison is over only where the figure is a fifth of the limit away from it: conditions do not flicker."""
MIN_GAIN = 0.02
"""A mean score that has grown by less over a window has not grown."""
SOLVED = 0.95
"""From this mean score on, low entropy is no fault."""
MIN_ACCURACY = 0.05
"""Where the mean score was never higher, there is nothing to collapse."""
MIN_GROWTH = 1.5
"""Responses that are not longer than so many times their first length have not grown."""
MIN_RISE = 0.05
"""Nats a token by which the loss must have risen: near 0, multiples mean nothing."""
MIN_GRADIENT = 1e-3
"""The share of the run's highest gradient norm below which the usual one is that of a run that hardly learns: multiples of it mean nothing."""


class Comparison(NamedTuple):
    """`value`, which `what` names, is held against `limit` > 0; `source`: where the limit comes from."""

    what: str
    value: float
    limit: float
    above: bool
    source: str

    @property
    def holds(self) -> bool:
        """Whether the value is beyond the limit."""
        return self.value > self.limit if self.above else self.value < self.limit

    @property
    def over(self) -> bool:
        """Whether the value is clearly within the limit."""
        return self.value <= RELEASE * self.limit if self.above else self.value >= self.limit / RELEASE

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"{self.what} is {self.value:.3g}, {'above' if self.above else 'below'} {self.limit:.3g}{source}"


Alternative = Callable[[History, Config], list[Comparison]]


class Alarm(NamedTuple):
    """`remedy` names keys of the config, as `part.key`."""

    alternatives: tuple[Alternative, ...]
    remedy: str


def _entropy(past: History, config: Config) -> list[Comparison]:
    limit = config.alarms.entropy
    return [Comparison("entropy", past.now("entropy"), limit * past.first("entropy"), False,
                       f"alarms.entropy={limit:g} of the beginning's {past.first('entropy'):.3g} nats"),
            Comparison("the gain in score", past.now("accuracy") - past.earlier("accuracy"), MIN_GAIN, False,
                       f"over the last {past.window} steps"),
            Comparison("the mean score", past.now("accuracy"), SOLVED, False, "the task is not solved")]


def _of_tokens(config: Config) -> None:
    """Raise unless weights are those of tokens: those of whole responses are far apart by nature."""
    if config.algorithm.behavior_level is ImportanceLevel.sequence:
        raise NotJudged("behavior_ess")


def _sample_size(past: History, config: Config) -> list[Comparison]:
    _of_tokens(config)
    return [Comparison("the effective sample size of the importance weights", past.now("behavior_ess"), config.alarms.weight_ess, False,
                       "alarms.weight_ess, a share")]


def _largest_weight(past: History, config: Config) -> list[Comparison]:
    _of_tokens(config)
    return [Comparison("the largest importance weight", past.now("behavior_weight_max"), config.alarms.weight_max, True, "alarms.weight_max")]


def _masked(past: History, config: Config) -> list[Comparison]:
    return [Comparison("the share of tokens above algorithm.behavior_cap", past.now("behavior_masked_share"), config.alarms.weight_masked, True,
                       "alarms.weight_masked")]


def _mismatch(past: History, config: Config) -> list[Comparison]:
    return [Comparison("the mean |difference| of log-probs between engine and trainer", past.now("logprob_gap"), config.mean_tolerance, True,
                       "selftest.mean_tolerance, in nats")]


def _no_spread(past: History, config: Config) -> list[Comparison]:
    if not config.algorithm.compares_groups:
        raise NotJudged("share_no_spread")  # groups are held against each other, and need no spread of their own
    return [Comparison(f"the share of groups whose rewards are all equal (mean score {past.now('accuracy'):.3g})", past.now("share_no_spread"),
                       config.alarms.equal, True, "alarms.equal")]


def _rejected(past: History, config: Config) -> list[Comparison]:
    return [Comparison(f"the share of groups rejected by workflow.keep (mean score {past.now('accuracy'):.3g})", past.now("share_rejected"),
                       config.alarms.equal, True, "alarms.equal")]


def _truncated(past: History, config: Config) -> list[Comparison]:
    first = past.first("share_truncated")
    return [Comparison(f"the growth of the share of truncated responses, {first:.3g} in the beginning,", past.now("share_truncated") - first,
                       config.alarms.truncated, True, "alarms.truncated")]


def _length(past: History, config: Config) -> list[Comparison]:
    single, first = config.workflow.name == "single_turn", past.first("response_tokens")
    room, key = (config.workflow.max_new_tokens, "workflow.max_new_tokens") if single else (config.engine.context_length, "engine.context_length")
    return [Comparison("the mean response length", past.now("response_tokens"), config.alarms.length * room, True,
                       f"alarms.length={config.alarms.length:g} of {key}={room}"),
            Comparison(f"its multiple of the beginning's {first:.3g} tokens", past.now("response_tokens") / max(first, 1.0), MIN_GROWTH, True, "")]


def _waiting(past: History, config: Config) -> list[Comparison]:
    return [Comparison("the share of a step in which the trainer waits for its batch", past.now("waiting"), config.alarms.waiting, True,
                       "alarms.waiting")]


def _idle(past: History, config: Config) -> list[Comparison]:
    return [Comparison("the share of time in which rollout workers have no lease", past.now("idle"), config.alarms.waiting, True, "alarms.waiting")]


def _accuracy(past: History, config: Config) -> list[Comparison]:
    best, limit = past.highest("accuracy"), config.alarms.accuracy
    return [Comparison("the mean score", past.now("accuracy"), limit * best, False, f"alarms.accuracy={limit:g} of its best, {best:.3g}"),
            Comparison("that best", best, MIN_ACCURACY, True, "less is chance")]


def _gradients(past: History, config: Config) -> list[Comparison]:
    usual = past.before("grad_norm")
    if not usual or usual < MIN_GRADIENT * past.highest("grad_norm"):
        raise NotJudged("grad_norm")
    return [Comparison(f"the gradient norm of 3 in 10 of the last {past.window} steps", past.upper("grad_norm"), config.alarms.grad_norm * usual,
                       True, f"alarms.grad_norm={config.alarms.grad_norm:g} times the {usual:.3g} before")]


def _stale(past: History, config: Config) -> list[Comparison]:
    return [Comparison(f"the share of groups older than staleness.eta={config.staleness.eta}", past.now("stale"), config.alarms.stale, True,
                       "alarms.stale")]


def _loss(past: History, config: Config) -> list[Comparison]:
    lowest, limit = past.lowest("loss"), config.alarms.loss
    return [Comparison("the loss", past.now("loss"), limit * lowest, True, f"alarms.loss={limit:g} times the lowest, {lowest:.3g}"),
            Comparison("its rise", past.now("loss") - lowest, MIN_RISE, True, "in nats")]


def _strangers(past: History, config: Config) -> list[Comparison]:
    return [Comparison("the number of connections and messages refused, over the last window,", past.now("refused") - past.earlier("refused"),
                       config.alarms.refused, True, "alarms.refused")]


_ALL = {
    "entropy_collapse": Alarm(
        (_entropy,),
        "the policy has stopped exploring. Go on from an earlier checkpoint with algorithm.clip_epsilon_high=0.28, an algorithm.entropy_weight or "
        "algorithm.kl_weight above 0, a lower trainer.lr, or more samples of each prompt (workflow.group_size)"),
    "exploding_weights": Alarm(
        (_sample_size, _largest_weight, _masked),
        "the policy has moved too far from what sampled the data. Lower staleness.eta (staleness.bound=hard bounds the age of every group), "
        "trainer.lr, or trainer.num_minibatches; with logprob_mismatch the engine is at fault"),
    "logprob_mismatch": Alarm(
        (_mismatch,),
        "what is trained on is not what was sampled. `headway selftest` with this config names likely causes; first of all give engine.dtype and "
        "trainer.dtype the same value, workflow.top_p=1, workflow.top_k=-1, engine.interrupt=retract"),
    "equal_rewards": Alarm(
        (_no_spread, _rejected),
        "groups without spread teach nothing. With a score near 0: easier prompts (data.kind, data.path), a verifier that gives part of the "
        "score (reward.parts), a larger workflow.group_size or workflow.max_new_tokens. Near 1: harder prompts, or the end (run.target_accuracy). "
        "workflow.keep=spread trains on the other groups alone"),
    "growing_length": Alarm(
        (_truncated, _length),
        "responses run into their limit, and what is cut off scores nothing. Raise workflow.max_new_tokens (and engine.context_length), or let "
        "length cost something (reward.overlong_penalty, reward.overlong_buffer); look at samples for repetition"),
    "starving_trainer": Alarm(
        (_waiting,),
        "generation does not keep up. Raise allocation.inference_fraction or allocation.num_devices; rollout.concurrency or engine.num_slots if "
        "engines have room; staleness.eta; reward.num_processes if requests wait for verifiers"),
    "idle_rollouts": Alarm(
        (_idle,),
        "training does not keep up, and rollout workers wait at the staleness limit. Lower allocation.inference_fraction, which gives their "
        "devices to training, or raise trainer.microbatch_tokens"),
    "reward_collapse": Alarm(
        (_accuracy,),
        "go on from a checkpoint before the fall, with a lower trainer.lr or algorithm.clip_epsilon, or an algorithm.kl_weight above 0. Look for "
        "exploding_weights, logprob_mismatch or entropy_collapse before it; if it fell at once, at the verifier and the data"),
    "gradient_spikes": Alarm(
        (_gradients,),
        "single updates are out of proportion. Lower trainer.lr or trainer.clip_grad, lengthen trainer.warmup_steps, or raise "
        "trainer.batch_groups; look at the samples of those steps (consumed.jsonl names their prompts)"),
    "stale_data": Alarm(
        (_stale,),
        "long responses are consumed late. staleness.bound=hard lets nothing older pass; a lower rollout.concurrency or "
        "workflow.max_new_tokens keeps fewer of them under way; a higher staleness.eta allows for them"),
    "strangers": Alarm(
        (_strangers,),
        "somebody without the run's keys connects to its ports (a scanner, another user's program), or a worker sends what cannot be read. They get "
        "nothing; name a network that others do not use in transport.interface, and ports in transport.port_range"),
    "rising_loss": Alarm(
        (_loss,),
        "training diverges, or the data have changed. Lower trainer.lr, lengthen trainer.warmup_steps, and look at the examples of these steps "
        "(consumed.jsonl names them)"),
}


def alarms_of(config: Config) -> dict[str, Alarm]:
    """The alarms that are judged in a run with `config`, by name."""
    names = SUPERVISED_ALARMS if config.supervised else RL_ALARMS
    return {name: _ALL[name] for name in names if name not in config.alarms.off}
