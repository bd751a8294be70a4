"""Where a rollout worker has completions judged: by processes of its own, or by reward elements. Both are used in the same way."""

from __future__ import annotations

from typing import Protocol

from workers.config import Config
from workers.reward.judges.judge_client import Judge
from workers.reward.pool.pool import RewardPool
from workers.reward.remote.client import RemoteRewards
from workers.run.folder import RunFolder


class Rewards(Protocol):
    """The calls and counters that `RewardPool` and `RemoteRewards` have in common; see there."""

    judge: Judge
    num_scored: int
    num_executed: int
    num_failed: int
    num_late: int
    num_killed: int
    num_waiting: int
    busy_s: float
    wait_s: float

    @property
    def waiting_for(self) -> str:
        """What requests wait for beyond processes that are busy; '' if they do not."""

    async def score(self, prompt: str, completion: str, reference: str, verifier: str) -> float:
        """The score in [0, 1]. Raises `ConfigError`, `VerifierError`."""

    async def execute(self, code: str) -> str:
        """What a program prints. Raises `VerifierError`."""

    async def load(self, function: str) -> None:
        """Have this node tried for a verifier, where it runs here. Raises `ConfigError`, `VerifierError`."""


def open_rewards(run: RunFolder, config: Config) -> RewardPool | RemoteRewards:
    """What `reward.placement` says, to be entered with `async with`."""
    return RemoteRewards(run, config.transport, config.reward) if config.rewards_apart else RewardPool(config.reward, config.sandbox)
