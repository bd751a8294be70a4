"""Config of rewards: the verifier and the processes that run it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from workers.config.choices import Placement
from workers.config.judge import JudgeConfig
from workers.config.rules import require

MAX_PARTS = 64


@dataclass
class RewardConfig:
    """The verifier, how a reward comes of its score, and the pool of processes that runs it beside generation.

    `parts`: verifiers that judge training samples beside `verifier`, and their weights; `verifier` has the rest up to 1.
    `overlong_penalty`: what is taken off the reward of a sample as long as workflow.max_new_tokens, growing from 0 over the last
    `overlong_buffer` tokens (DAPO, arXiv 2503.14476, equation 13); in units of reward, 0 for none.
    """

    verifier: str = "numeric"  # what judges an answer: a built-in one, or package.module:function; docs/rewards.md
    parts: dict[str, float] = field(default_factory=dict)  # verifiers that judge training samples besides, as NAME: WEIGHT
    judge: JudgeConfig = field(default_factory=JudgeConfig)  # the endpoint that verifier 'judge' asks
    correct: float = 5.0  # [reward] of a score of 1
    wrong: float = -5.0  # [reward] of a score of 0
    overlong_penalty: float = 0.0  # [reward] taken off the longest answers; 0: none
    overlong_buffer: int = 0  # [tokens] below workflow.max_new_tokens over which that grows
    num_processes: int = 1  # verifiers that run side by side
    timeout_s: float = 10.0  # after which a verifier is killed
    memory_mb: int = 1024  # of one verifier
    max_retries: int = 2  # when a verifier's process dies
    placement: Placement = Placement.node  # on the inference nodes, or in jobs of their own
    num_elements: int = 1  # jobs at once, of placement=array

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.correct > self.wrong, "reward.correct", self.correct, f"must be greater than reward.wrong={self.wrong}",
                "The paper uses +5 and -5")
        require(math.isfinite(self.correct - self.wrong), "reward.correct", self.correct, "must be finite, and reward.wrong too",
                "The paper uses +5 and -5")
        self._check_shaping()
        self.judge.check()
        require(self.num_processes >= 1, "reward.num_processes", self.num_processes, "must be at least 1", "Give 1 or more")
        require(self.timeout_s > 0, "reward.timeout_s", self.timeout_s, "must be positive", "A verifier is killed after this time")
        require(self.memory_mb >= 128, "reward.memory_mb", self.memory_mb, "must be at least 128", "It bounds each verifier process")
        require(self.max_retries >= 0, "reward.max_retries", self.max_retries, "must not be negative", "Give 0 or more")
        require(self.num_elements >= 1, "reward.num_elements", self.num_elements, "must be at least 1",
                "It is how many elements of the reward array run at once, with reward.placement=array")

    def _check_shaping(self) -> None:
        require(len(self.parts) < MAX_PARTS, "reward.parts", sorted(self.parts), f"must be fewer than {MAX_PARTS}", "Each is a metric of its own")
        for name, weight in self.parts.items():
            require(0 < weight < 1, f"reward.parts.{name}", weight, "must be between 0 and 1", "It is the share of this verifier in the score")
        total = math.fsum(self.parts.values())
        require(total < 1, "reward.parts", self.parts, f"must add up to less than 1, not {total:g}", "reward.verifier has the rest")
        require(self.verifier not in self.parts, "reward.parts", self.parts, f"must not name reward.verifier={self.verifier!r}",
                "It has the weight that the parts leave")
        require("*" not in self.verifier or not self.parts, "reward.parts", self.parts, f"must be empty with reward.verifier={self.verifier!r}",
                "A weighted sum names all its parts itself")
        require(0 <= self.overlong_penalty < math.inf, "reward.overlong_penalty", self.overlong_penalty, "must be finite and not negative",
                "It is taken off the reward of a sample that runs long; 0 for none")
        require(self.overlong_buffer >= 0, "reward.overlong_buffer", self.overlong_buffer, "must not be negative", "Give 0 or more tokens")
        require(not self.overlong_penalty or self.overlong_buffer > 0, "reward.overlong_buffer", self.overlong_buffer,
                f"must be positive with reward.overlong_penalty={self.overlong_penalty}", "Give the tokens over which the penalty grows")
