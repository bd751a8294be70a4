"""Checks and views of a group that arrives from outside."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from workers.messages.codec import MessageError
from workers.messages.parts import Group, Partial, Turns


@dataclass(frozen=True)
class SampleView:
    """One sample of a group: arrays over its response tokens, all of the same length. `routing`: bytes uint8 [tokens before and of it but the
    last, bytes a token]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    steps: np.ndarray
    reward: float
    routing: np.ndarray | None = None


def check_group(group: Group) -> None:
    """Raise `MessageError` unless the arrays of `group` fit together (lengths, values, versions)."""
    total = int(group.lengths.sum())
    rules = {
        "prompt must not be empty": group.prompt.size > 0,
        "lengths must be positive and name at least one sample": group.lengths.size > 0 and bool((group.lengths > 0).all()),
        "tokens, logprobs and loss_mask must have sum(lengths) items":
            group.tokens.size == group.logprobs.size == group.loss_mask.size == total,
        "rewards and scores must have one item a sample": group.rewards.size == group.scores.size == group.lengths.size,
        "episodes must have one item a sample and ascend from 0 without a gap":
            group.episodes is None or _numbered(group.episodes, group.lengths.size),
        "answers must have one item an episode, or none": len(group.answers) in (0, group_firsts(group).size),
        "version runs must cover sum(lengths) tokens":
            group.epochs.size == group.steps.size == group.run_lengths.size and int(group.run_lengths.sum()) == total
            and bool((group.run_lengths > 0).all()),
        "routing must have as many bytes for each token that was fed":
            group.routing is None or (group.routing.size > 0 and group.routing.size % _num_fed(group).sum() == 0),
        "versions must not be negative": bool((group.steps >= 0).all()) and bool((group.epochs >= 0).all()),
        "token ids must not be negative": bool((group.tokens >= 0).all()) and bool((group.prompt >= 0).all()),
        "logprobs and rewards must be finite":
            bool(np.isfinite(group.logprobs).all()) and bool(np.isfinite(group.rewards).all()) and bool(np.isfinite(group.scores).all()),
    }
    for rule, holds in rules.items():
        if not holds:
            raise MessageError(f"group {group.group_id}: {rule}")
    firsts = group_firsts(group)[group_episodes(group)]
    if not (np.array_equal(group.rewards, group.rewards[firsts]) and np.array_equal(group.scores, group.scores[firsts])):
        raise MessageError(f"group {group.group_id}: the samples of an episode must have the same reward and the same score")


def check_partial(partial: Partial) -> None:
    """Raise `MessageError` unless the arrays of `partial` fit together (lengths, values, versions)."""
    total = int(partial.lengths.sum())
    rules = {
        "lengths must not be negative and must name at least one sample": partial.lengths.size > 0 and bool((partial.lengths >= 0).all()),
        "tokens and logprobs must have sum(lengths) items": partial.tokens.size == partial.logprobs.size == total,
        "finished must have one item a sample": partial.finished.size == partial.lengths.size,
        "version runs must cover sum(lengths) tokens":
            partial.epochs.size == partial.steps.size == partial.run_lengths.size and int(partial.run_lengths.sum()) == total
            and bool((partial.run_lengths > 0).all()),
        "versions must not be negative": bool((partial.steps >= 0).all()) and bool((partial.epochs >= 0).all()),
        "token ids must not be negative": bool((partial.tokens >= 0).all()),
        "logprobs must be finite": bool(np.isfinite(partial.logprobs).all()),
        **(_turn_rules(partial.turns, partial.lengths.size) if partial.turns is not None else {}),
    }
    for rule, holds in rules.items():
        if not holds:
            raise MessageError(f"group {partial.group_id}, given back: {rule}")


def distinct(experts: np.ndarray) -> bool:
    """Whether no token is sent twice to an expert, of [.., experts per token]. Quicker than sorting them: this is most of a message."""
    return all(bool((one != other).all()) for one, other in itertools.combinations(np.ascontiguousarray(experts.reshape(-1, experts.shape[-1]).T), 2))


def _num_fed(group: Group) -> np.ndarray:
    """Of each sample the tokens that an engine feeds: prompt and sample without its last token."""
    return np.asarray(group.lengths) + (group.prompt.size - 1)


def _turn_rules(turns: Turns, num_samples: int) -> dict[str, bool]:
    sizes = {array.size for array in (turns.episodes, turns.conversations, turns.prompted, turns.outside_lengths, turns.cut)}
    return {
        "turns must have one item a sample": sizes == {num_samples},
        "turns must have sum(outside_lengths) tokens":
            bool((turns.outside_lengths >= 0).all()) and int(turns.outside_lengths.sum()) == turns.outside.size,
        "numbers of turns must not be negative": all(bool((array >= 0).all()) for array in (turns.episodes, turns.conversations, turns.outside)),
    }


def _numbered(episodes: np.ndarray, num_samples: int) -> bool:
    """Whether `episodes` has one item a sample, and they are 0, 1, ... in order, each at least once."""
    return episodes.size == num_samples > 0 and bool(episodes[0] == 0) and bool(np.isin(np.diff(episodes), (0, 1)).all())


def group_episodes(group: Group) -> np.ndarray:
    """The episode of each sample, int32 [n]."""
    return np.arange(group.lengths.size, dtype=np.int32) if group.episodes is None else np.asarray(group.episodes)


def group_firsts(group: Group) -> np.ndarray:
    """The first sample of each episode, int64: `group.rewards[group_firsts(group)]` counts every episode once."""
    return np.unique(group_episodes(group), return_index=True)[1]


def token_steps(group: Group) -> np.ndarray:
    """The step that sampled each of the flattened tokens, int32 [sum(lengths)]."""
    return np.repeat(np.asarray(group.steps), np.asarray(group.run_lengths))


def samples(group: Group) -> list[SampleView]:
    """The samples of `group`, as views into its arrays."""
    cuts = np.cumsum(np.asarray(group.lengths))[:-1]
    parts = (np.split(np.asarray(array), cuts) for array in (group.tokens, group.logprobs, group.loss_mask, token_steps(group)))
    return [SampleView(tokens, logprobs, mask, steps, float(reward), routing)
            for tokens, logprobs, mask, steps, reward, routing in zip(*parts, group.rewards, _routing(group), strict=True)]


def _routing(group: Group) -> list[np.ndarray] | list[None]:
    if group.routing is None:
        return [None] * group.lengths.size
    fed = _num_fed(group)
    return np.split(np.asarray(group.routing).reshape(int(fed.sum()), -1), np.cumsum(fed)[:-1])


def kept(minibatches: list[list[int]], number: int) -> list[int]:
    """Which groups of a copy's share of a batch are kept for people to read, `number` of them: those of the last minibatches, whose log-probs
    from before the step most objectives need anyway."""
    return [index for minibatch in reversed(minibatches) for index in minibatch][:number]


def head_step(group: Group) -> int:
    """The step whose weights sampled the oldest first token of the group's samples."""
    firsts = np.concatenate([[0], np.cumsum(np.asarray(group.lengths))[:-1]])
    runs = np.searchsorted(np.cumsum(np.asarray(group.run_lengths)), firsts, side="right")
    return int(np.asarray(group.steps)[runs].min())
