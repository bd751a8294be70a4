"""Assumptions from what an earlier run has measured: its lengths, and how much faster or slower its engines and trainer were than assumed.

    metrics.jsonl --the later two thirds of its steps--> lengths, prompts, seconds of training, of new weights, tokens/s of engines that had work
                                                     --> factors on what costs.py says of that run's config: they carry over to other configs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.prediction.assumptions import Assumptions, usual
from launcher.report.series import increments
from workers.config import Config, ConfigError, Server

FEWEST = 4
FIELDS = ("seconds", "tokens_generated", "tokens_trained", "rollout_idle_s", "weight_update_s", "weight_updates", "replicas", "running",
          "response_tokens", "num_tokens", "num_packed_tokens", "train_s", "publish_s")


@dataclass(frozen=True)
class Measured:
    """Of the steps that count: tokens generated and trained on; seconds of engines (all servers of all workers, without those that had no work or
    loaded weights); groups that ran at the same time; the rest are means of a step."""

    generated: float
    trained: float
    engine_s: float
    running: float
    mean_tokens: float
    prompt_tokens: float
    train_s: float
    publish_s: float
    pause_s: float


def measured(config: Config, steps: Sequence[dict], name: str) -> Measured:
    """What the metrics of a run with this config say. Raises `ConfigError` where they are of too few steps, or of no rollouts."""
    if config.supervised or config.evaluates or len(steps) < FEWEST + 1:
        raise ConfigError(f"--from {name}: has {len(steps)} steps in its metrics.jsonl, and {FEWEST + 1} of reinforcement learning are needed. "
                          "Give a run that has come further")
    counted = steps[len(steps) // 3:]
    if absent := [field for field in FIELDS if any(not isinstance(record.get(field), int | float) for record in counted)]:
        raise ConfigError(f"--from {name}: its metrics.jsonl has steps without {', '.join(absent)}: another version of Headway has written it. "
                          "Give a newer run")

    def grown(key: str) -> float:  # totals of workers begin anew with the training job
        return sum(increments(counted, key)[1:])

    def mean(key: str) -> float:
        return sum(float(record[key]) for record in counted[1:]) / (len(counted) - 1)

    seconds = grown("seconds")
    groups, samples = config.trainer.batch_groups, config.workflow.group_size
    prompts = groups * (1 if config.trainer.share_prompts else samples)
    stopped = grown("rollout_idle_s") + grown("weight_update_s")
    engine_s = config.num_servers * max(0.05 * mean("replicas") * seconds, mean("replicas") * seconds - stopped)
    return Measured(
        grown("tokens_generated"), grown("tokens_trained"), engine_s, mean("running"), mean("response_tokens"),
        max(0.0, (mean("num_packed_tokens") - mean("num_tokens")) / prompts), mean("train_s"), mean("publish_s"),
        grown("weight_update_s") / max(1.0, grown("weight_updates")))


def from_run(config: Config, found: Measured, costs: Callable[[Assumptions], tuple[float, float, float]], name: str) -> Assumptions:
    """Assumptions for configs like this one. `costs`: of this config, by what is assumed: tokens/s of a server with as many samples as ran, and
    seconds of a training step."""
    plain = usual(config)
    kept = min(1.0, found.trained / found.generated) if found.generated else 1.0
    said = dict.fromkeys(("mean_tokens", "prompt_tokens", "kept", "engine_factor", "trainer_factor", "pause_s", "publish_s"), name)
    lengths = dataclasses.replace(plain.lengths, mean=found.mean_tokens)
    assumed = dataclasses.replace(plain, lengths=lengths, prompt_tokens=found.prompt_tokens, kept=kept, pause_s=found.pause_s,
                                  publish_s=found.publish_s, said=plain.said | said)
    rate, computing_s, updating_s = costs(assumed)
    factor = 1.0 if config.engine.server is Server.synthetic or not found.generated else rate / (found.generated / found.engine_s)
    return dataclasses.replace(assumed, engine_factor=factor, trainer_factor=max(0.2 * found.train_s, found.train_s - updating_s) / computing_s)
