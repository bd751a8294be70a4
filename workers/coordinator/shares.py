"""A formed batch as the messages that the copies of the model get: the groups of each, and their PPO minibatches. Pure."""

from __future__ import annotations

from workers.config import Config
from workers.coordinator.division import divide_batch
from workers.messages.types import Batch, Group


def make_shares(config: Config, step: int, groups: list[Group], num_shares: int, formed_at: float) -> list[Batch]:
    """The batch of `step` for `num_shares` copies, balanced by tokens; the same for the same groups, seed and step."""
    lengths = [_num_tokens(group, config.trainer.share_prompts) for group in groups]
    divided = divide_batch(lengths, config.trainer.num_minibatches, num_shares, [config.run.seed, step])
    shares = []
    for share in range(num_shares):
        own = sorted(index for minibatch in divided for index in minibatch[share])
        place = {index: position for position, index in enumerate(own)}
        shares.append(Batch(step, share, num_shares, [groups[index] for index in own],
                            [[place[index] for index in minibatch[share]] for minibatch in divided], formed_at))
    return shares


def _num_tokens(group: Group, share_prompts: bool) -> int:
    """Tokens that the trainer passes through the model for `group`."""
    return int(group.lengths.sum()) + group.prompt.size * (1 if share_prompts else group.lengths.size)
