"""What is made of a share of a batch before the step: the penalties of its actions, their advantages, and which of them are kept.

    rewards of responses; log-probs of the reference and the proximal policy --divergence--> penalties of actions
        |  group estimators, batch_norm: of episodes, less their responses' penalties; a batch's over all copies of the model
        |  reinforce_pp: of actions, the reward with the last one, to the end of the response; whitened over all copies
        |  gae: critic.py;  none: 0;  kl_in=advantage: less each action's penalty, after all that
        v
    advantages by token --second_moment: with the behaviour weights of the whole step, over all copies--> the tokens that are kept

Actions are the tokens that are trained on. The others (a tool's answer between two turns) are neither valued nor counted: the state after
an action is the one in which the next action is taken. All ranks call these functions together, those of a copy with the same groups.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workers.algorithms import advantages as estimators
from workers.algorithms.corrections import second_moment_cut, trust_region_tokens
from workers.algorithms.divergences import divergence
from workers.algorithms.values import outcome_rewards, rewards_to_go
from workers.config import Advantage, AlgorithmConfig, KlPlace
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.objective import TokenMasks, TokenValues, per_token
from workers.trainer.megatron.parallel import collectives, process_group

OF_GROUPS = {Advantage.group_norm: estimators.group_norm, Advantage.group_center: estimators.group_center,
             Advantage.leave_one_out: estimators.leave_one_out, Advantage.reinforce_pp_baseline: estimators.group_center}


def over_copies(part: Tensor) -> Tensor:
    """`ratios.Add` over the copies of the model."""
    return torch.from_numpy(collectives.sum_over_copies(part.numpy()))


class Actions:
    """The N actions of a share's n responses, one response after the other. `lengths` int64 [n] are their numbers."""

    def __init__(self, groups: list[TrainGroup]) -> None:
        masks = [mask for group in groups for mask in group.loss_mask]
        self._groups, self._ends = groups, np.cumsum([len(mask) for mask in masks])
        self._where = np.concatenate([np.zeros(0, np.bool_), *masks])
        self.lengths = torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.int64)

    def take(self, values: TokenValues) -> Tensor:
        """`values` of the actions: float64 [N]."""
        flat = np.concatenate([np.zeros(0, np.float32), *(row for rows in values for row in rows)])
        return torch.from_numpy(flat.astype(np.float64)[self._where])

    def rewards(self, penalties: TokenValues | None) -> Tensor:
        """Float64 [N]: the response's reward with its last action, less `penalties` of all tokens."""
        of_responses = np.concatenate([np.zeros(0, np.float32), *(group.rewards for group in self._groups)]).astype(np.float64)
        rewards = outcome_rewards(torch.from_numpy(of_responses), self.lengths)
        return rewards if penalties is None else rewards - self.take(penalties)

    def spread(self, values: Tensor) -> TokenValues:
        """`values` [N] at their places among the responses' tokens, float32; the other tokens have 0."""
        flat = np.zeros(len(self._where), np.float32)
        flat[self._where] = values.numpy()
        rows = iter(np.split(flat, self._ends[:-1]))
        return [[next(rows) for _ in group.responses] for group in self._groups]


def reward_penalties(groups: list[TrainGroup], reference: TokenValues, proximal: TokenValues | None, algorithm: AlgorithmConfig) -> TokenValues:
    """`kl_weight` times the divergence of the policy from the reference at each action: that of the `proximal` policy, or, with None, of the
    behaviour policy. 0 at other tokens."""
    actions = Actions(groups)
    old = actions.take([group.behavior_logprobs for group in groups] if proximal is None else proximal)
    return actions.spread(algorithm.kl_weight * divergence(algorithm.kl_estimator.value, old, actions.take(reference)))


def penalty_mean(groups: list[TrainGroup], penalties: TokenValues) -> float:
    """The mean over the responses of all copies of what was taken from their rewards, or from their tokens' advantages."""
    sums = torch.tensor([float(row.sum(dtype=np.float64)) for rows in penalties for row in rows], dtype=torch.float64)
    return estimators.moments(sums, over_copies)[0]


def make_advantages(groups: list[TrainGroup], algorithm: AlgorithmConfig, penalties: TokenValues | None) -> TokenValues:
    """The advantages of this copy's share of a batch, for every token, as `algorithm.advantage` says; not for gae, which takes a critic.

    Where an episode has several responses it counts once, and they share its advantage. With `kl_in=advantage` the penalties are taken from each
    action's advantage as they are (with `none`: on-policy distillation, the reverse KL of arXiv 2306.13649 and 2306.08543 token by token, which
    looks no further ahead), else from the rewards. Raises ValueError on rewards that cannot be used.
    """
    if penalties is not None and algorithm.kl_in is KlPlace.advantage:
        made = make_advantages(groups, algorithm, None)
        return [[own - taken for own, taken in zip(*rows, strict=True)] for rows in zip(made, penalties, strict=True)]
    if algorithm.advantage is Advantage.none:
        return [[np.zeros(len(response), np.float32) for response in group.responses] for group in groups]
    if algorithm.advantage is Advantage.reinforce_pp:
        actions = Actions(groups)
        return actions.spread(estimators.whiten(rewards_to_go(actions.rewards(penalties), actions.lengths, algorithm.gamma), over_copies))
    episodes = [torch.arange(group.num_samples) if group.episodes is None else torch.from_numpy(group.episodes.astype(np.int64)) for group in groups]
    rewards = [_penalized(group, of_group, None if penalties is None else penalties[number])
               for number, (group, of_group) in enumerate(zip(groups, episodes, strict=True))]
    if (estimator := OF_GROUPS.get(algorithm.advantage)) is not None:
        rewards = [estimators.by_episode(estimator, values, of_group) for values, of_group in zip(rewards, episodes, strict=True)]
    if algorithm.advantage in (Advantage.batch_norm, Advantage.reinforce_pp_baseline):
        rewards = _batch_norm(rewards, episodes)
    return per_token([values.numpy() for values in rewards], groups)


def _penalized(group: TrainGroup, episodes: Tensor, penalties: list[np.ndarray] | None) -> Tensor:
    """The rewards of a group's responses, float32 [n], less the penalties of all responses of their episodes."""
    rewards = torch.from_numpy(group.rewards.copy())
    if penalties is None:
        return rewards
    of_responses = torch.tensor([float(row.sum(dtype=np.float64)) for row in penalties], dtype=torch.float64)
    of_episodes = torch.zeros(int(episodes[-1]) + 1, dtype=torch.float64).index_add_(0, episodes, of_responses)
    return (rewards.double() - of_episodes[episodes]).float()


def _batch_norm(values: list[Tensor], episodes: list[Tensor]) -> list[Tensor]:
    """`values` of responses, by group, normalised over the episodes of all copies."""
    firsts = [row[estimators.first_of_episodes(of_group)] for row, of_group in zip(values, episodes, strict=True)]
    own = torch.cat([torch.zeros(0), *firsts])
    start = int(collectives.gather_over_copies(np.array([len(own)]))[:process_group.copy_index()].sum())
    whole = torch.from_numpy(collectives.gather_over_copies(own.numpy()))
    normed = iter(estimators.batch_norm(whole)[start:start + len(own)].split([len(row) for row in firsts]))
    return [next(normed)[of_group] for of_group in episodes]


def second_moment_mask(groups: list[TrainGroup], proximal: TokenValues, advantages: TokenValues, limit: float) -> TokenMasks:
    """The tokens of this share that M2PO keeps, by the proximal and behaviour log-probs of all actions of the step, wherever they are."""
    actions = Actions(groups)
    log_ratio = actions.take(proximal) - actions.take([group.behavior_logprobs for group in groups])
    concerned = trust_region_tokens(log_ratio, actions.take(advantages))
    squares = log_ratio.square()
    cut = second_moment_cut(torch.from_numpy(collectives.gather_over_copies(squares[concerned].numpy())), limit)
    dropped = actions.spread((concerned & (squares > cut)).float())
    return [[row == 0 for row in rows] for rows in dropped]
