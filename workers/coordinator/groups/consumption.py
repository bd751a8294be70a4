"""What the coordinator knows about consumption: ages of groups and tokens, and the run's totals. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from workers.messages.groups import group_firsts, head_step
from workers.messages.parts import Group


@dataclass(frozen=True)
class BatchAges:
    """How old the groups of one batch are, in training steps, when they are consumed at `step`; `tokens_trained`: those that the loss counts, of
    which `mean_token_age` is, as the divergence is measured of them; `share_truncated`: the share of responses that ended because there was no room
    for more; `part_scores`: the mean of each verifier of a sum."""

    step: int
    head_ages: list[int]
    mean_token_age: float
    max_token_age: int
    share_mixed: float
    mean_reward: float
    mean_score: float
    mean_length: float
    num_samples: int
    tokens_trained: int
    share_no_spread: float
    share_truncated: float
    part_scores: dict[str, float] = field(default_factory=dict)


def measure(step: int, groups: list[Group], max_new_tokens: int, context_length: int) -> BatchAges:
    """Measure the batch of `step`; a group's age is that of its oldest first token. A turn has at most `max_new_tokens`, a sample
    with its prompt `context_length`."""
    ages = np.maximum(0, step - np.concatenate([np.asarray(group.steps) for group in groups]))  # of each run of tokens
    counts = np.concatenate([np.asarray(group.run_lengths) for group in groups]).astype(np.int64)
    masks = np.concatenate([np.asarray(group.loss_mask) for group in groups]).astype(np.int64)
    trained = np.add.reduceat(masks, np.cumsum(counts) - counts)  # tokens of each run that the loss counts
    rewards = [np.asarray(group.rewards)[group_firsts(group)] for group in groups]
    return BatchAges(
        step=step,
        head_ages=[max(0, step - head_step(group)) for group in groups],
        mean_token_age=float(ages @ trained / trained.sum()),
        max_token_age=int(ages.max()),
        share_mixed=float(np.mean([group.run_lengths.size > 1 and len(set(group.steps.tolist())) > 1 for group in groups])),
        mean_reward=float(np.concatenate(rewards).mean()),
        mean_score=float(np.concatenate([np.asarray(group.scores)[group_firsts(group)] for group in groups]).mean()),
        mean_length=float(np.concatenate([np.asarray(group.lengths) for group in groups]).mean()),
        num_samples=sum(group.rewards.size for group in groups),
        tokens_trained=int(trained.sum()),
        share_no_spread=float(np.mean([np.ptp(reward) == 0 for reward in rewards])),
        share_truncated=float(np.concatenate([truncated(group, max_new_tokens, context_length) for group in groups]).mean()),
        part_scores=part_means(groups),
    )


def part_means(groups: list[Group]) -> dict[str, float]:
    """The mean score of each part of weighted sums, over the episodes of the groups that it judged."""
    sums: dict[str, list[float]] = {}
    for group in groups:
        for name, score in group.part_scores.items():
            total, number = sums.get(name, (0.0, 0.0))
            sums[name] = [total + score * group_firsts(group).size, number + group_firsts(group).size]
    return {name: total / number for name, (total, number) in sums.items()}


def truncated(group: Group, max_new_tokens: int, context_length: int) -> np.ndarray:
    """Which samples are as long as they may be, bool [n]: in their last turn, or with the prompt. One that ends with its last token counts too
    (as in verl's response_length/clip_ratio)."""
    lengths = np.asarray(group.lengths).astype(np.int64)
    ends = np.cumsum(lengths)
    outside = np.concatenate([[-1], np.flatnonzero(~np.asarray(group.loss_mask))])
    last_turns = np.minimum(lengths, ends - 1 - outside[np.searchsorted(outside, ends) - 1])
    return (last_turns >= max_new_tokens) | (group.prompt.size + lengths >= context_length)


@dataclass
class Totals:
    """Counters over the whole run."""

    head_ages: Counter[int] = field(default_factory=Counter)
    tokens_generated: int = 0
    tokens_interrupted: int = 0
    tokens_trained: int = 0
    num_steps: int = 0
    num_evaluations: int = 0
    num_duplicates: int = 0
    num_retries: int = 0

    def consumed(self, ages: BatchAges) -> None:
        """Count a batch whose step is finished."""
        self.head_ages.update(ages.head_ages)
        self.num_steps += 1
        self.tokens_trained += ages.tokens_trained

    @property
    def max_staleness(self) -> int:
        """The oldest head consumed, in steps."""
        return max(self.head_ages, default=0)

    @property
    def share_stale(self) -> float:
        """Share of consumed groups that were begun under an older version than the one they trained."""
        total = sum(self.head_ages.values())
        return 1 - self.head_ages[0] / total if total else 0.0
