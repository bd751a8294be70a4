"""From a score to the reward that is trained on: pure functions.

    score in [0, 1] --scale--> wrong .. correct --length--> minus overlong_penalty x how far the sample ran into the buffer
"""

from __future__ import annotations

from workers.config.reward import RewardConfig


def scale(score: float, config: RewardConfig) -> float:
    """The reward for `score` in [0, 1]: linear from `config.wrong` at 0 to `config.correct` at 1."""
    return config.wrong + score * (config.correct - config.wrong)


def overlong(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), in [-1, 0], for a sample of `num_tokens` tokens.

    0 up to `max_tokens - buffer` tokens, then falling linearly, -1 from `max_tokens` on. With a buffer of 0 only samples of
    more than `max_tokens` tokens get -1.
    """
    over = num_tokens - (max_tokens - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if over >= buffer else -over / buffer


def reward(score: float, num_tokens: int, config: RewardConfig, max_tokens: int) -> float:
    """The reward of a sample: its score, scaled, less `config.overlong_penalty` (in units of reward) for running long.

    `num_tokens`: what the model sampled; `max_tokens`: what it was allowed to sample (workflow.max_new_tokens).
    """
    return scale(score, config) + config.overlong_penalty * overlong(num_tokens, max_tokens, config.overlong_buffer)
