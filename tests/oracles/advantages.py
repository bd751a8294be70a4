"""Advantages from the papers, by loops over groups, responses and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

Rewards = Sequence[Sequence[float]]


def mean_of(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def spread_of(values: Sequence[float]) -> float:
    """The standard deviation of the population: divided by n."""
    centre = mean_of(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / len(values))


def equal(values: Sequence[float]) -> bool:
    return all(value == values[0] for value in values)


def normalized(values: Sequence[float], eps: float) -> list[float]:
    """(x - mean) / (std + eps); of equal values, which say nothing, exactly zero."""
    if equal(values):
        return [0.0 for _ in values]
    centre, spread = mean_of(values), spread_of(values)
    return [(value - centre) / (spread + eps) for value in values]


def grpo(rewards: Rewards, eps: float) -> list[list[float]]:
    """GRPO (arXiv 2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r), over the responses to one prompt. The paper has no `eps`."""
    return [normalized(group, eps) for group in rewards]


def rloo(rewards: Rewards) -> list[list[float]]:
    """RLOO (arXiv 2402.14740), section 3.3: A_i = r_i - 1/(k-1) sum over j != i of r_j."""
    result = []
    for group in rewards:
        row = []
        for index, reward in enumerate(group):
            others = [other for number, other in enumerate(group) if number != index]
            row.append(reward - mean_of(others) if others else math.nan)
        result.append(row)
    return result


def dr_grpo(rewards: Rewards) -> list[list[float]]:
    """Dr. GRPO (arXiv 2503.20783), section 3.2: A_i = r_i - mean(r), with no standard deviation."""
    return [[reward - mean_of(group) for reward in group] for group in rewards]


def batch_norm(rewards: Rewards, eps: float) -> list[list[float]]:
    """AReaL (arXiv 2505.24298), Table 3: (r - mean) / std over all responses of the batch, gamma = lambda = 1, no critic."""
    flat = iter(normalized([reward for group in rewards for reward in group], eps))
    return [[next(flat) for _ in group] for group in rewards]


def reinforce_pp(rewards: Sequence[float], divergences: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]], beta: float,
                 eps: float) -> list[list[float]]:
    """REINFORCE++ (arXiv 2501.03262), Eqs. 8 to 10, for the responses of a whole batch:

        A_t = r - beta sum over i = t .. T of KL(i)        A = (A - mean) / std, mean and std over all actions of the batch

    `divergences` are the k1 estimates log(pi_old / pi_ref) of every token, Eq. 9. What is no action has zero.
    """
    raw: list[list[float]] = []
    for reward, row, mask in zip(rewards, divergences, masks, strict=True):
        advantages, following = [0.0] * len(mask), 0.0
        for token in reversed(range(len(mask))):
            if mask[token]:
                following += row[token]
                advantages[token] = reward - beta * following
        raw.append(advantages)
    return normalized_actions(raw, masks, eps)


def reinforce_pp_baseline(rewards: Rewards, eps: float) -> list[list[float]]:
    """REINFORCE++ with baseline (arXiv 2501.03262), Eqs. 11 and 12, without divergence: r - mean of the group, normalised over the batch.

    Where every response has the same number of actions, this is the normalisation over all actions of the batch.
    """
    flat = iter(normalized([value for group in dr_grpo(rewards) for value in group], eps))
    return [[next(flat) for _ in group] for group in rewards]


def normalized_actions(advantages: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]], eps: float) -> list[list[float]]:
    """Advantages normalised over all actions of a batch; what is no action has zero."""
    actions = [value for row, mask in zip(advantages, masks, strict=True) for value, used in zip(row, mask, strict=True) if used]
    flat = iter(normalized(actions, eps)) if actions else iter(())
    return [[next(flat) if used else 0.0 for used in mask] for mask in masks]


def gae(reward_rows: Sequence[Sequence[float]], value_rows: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]], gamma: float,
        lam: float) -> tuple[list[list[float]], list[list[float]]]:
    """GAE (arXiv 1506.02438), Eq. 16, as the sum that it is: A_t = sum over l of (gamma lambda)^l delta_{t+l}, where delta_t = r_t + gamma V(s_{t+1})
    - V(s_t).

    Time passes with actions; the state after the last one is worth nothing. `reward_rows` has a reward for each token. Returns advantages and
    returns A + V; what is no action has zero.
    """
    advantages, returns = [], []
    for rewards, values, mask in zip(reward_rows, value_rows, masks, strict=True):
        actions = [token for token, used in enumerate(mask) if used]
        deltas = []
        for place, token in enumerate(actions):
            following = values[actions[place + 1]] if place + 1 < len(actions) else 0.0
            deltas.append(rewards[token] + gamma * following - values[token])
        row, targets = [0.0] * len(mask), [0.0] * len(mask)
        for place, token in enumerate(actions):
            row[token] = math.fsum((gamma * lam) ** (later - place) * deltas[later] for later in range(place, len(actions)))
            targets[token] = row[token] + values[token]
        advantages.append(row)
        returns.append(targets)
    return advantages, returns


def with_penalty(reward: float, divergences: Sequence[float], mask: Sequence[bool], beta: float) -> list[float]:
    """The rewards of a response's tokens with the divergence in them: r_t = [t is the last action] r - beta KL(t) (InstructGPT, arXiv 2203.02155,
    Eq. 2, spread over the tokens)."""
    rewards = [-beta * divergence if used else 0.0 for divergence, used in zip(divergences, mask, strict=True)]
    actions = [token for token, used in enumerate(mask) if used]
    if actions:
        rewards[actions[-1]] += reward
    return rewards
