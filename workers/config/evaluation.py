"""Config of evaluation: within a run, of what it has learned so far; and alone (run.kind=evaluation), of any model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from workers.config.rules import require


@dataclass
class EvaluationConfig:
    """Evaluation on the held-out prompts. In a run through the same fleet: before, every `every_steps`, after; never unless `enabled`.

    `num_samples` answers are sampled for each prompt, at `temperature` (0: greedy), `top_p` and `top_k`. `pass_at`: for which k pass@k is
    told ([]: the powers of two up to num_samples, and num_samples). `confidence`: of all intervals.

    With run.kind=evaluation (docs/evaluation.md): `run` is the folder of a run whose model is evaluated, on its data and with its settings
    unless others are given; '' evaluates model.path. `checkpoint` says which model of it: final, best, newest, a step, or EPOCH.STEP.
    """

    enabled: bool = True  # whether held-out prompts are judged: before, every so many steps, after
    every_steps: int = 0  # [training steps] between evaluations; 0: only before and after
    num_samples: int = 1  # answers to each held-out prompt
    temperature: float = 0.0  # of these answers; 0: greedy
    top_p: float = 1.0  # nucleus cut of these answers; 1: none
    top_k: int = -1  # cut to the likeliest tokens; -1: none
    pass_at: list[int] = field(default_factory=list)  # for which k pass@k is told; []: powers of two
    confidence: float = 0.95  # of all intervals
    run: str = ""  # headway eval: the folder of the run whose model is evaluated
    checkpoint: str = "final"  # headway eval: which of its models: final, best, newest, a step, or EPOCH.STEP

    @property
    def ks(self) -> list[int]:
        """The k of pass@k, ascending."""
        if self.pass_at:
            return sorted(set(self.pass_at))
        powers = [1 << power for power in range(self.num_samples.bit_length())]
        return sorted({*powers, self.num_samples})

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.every_steps >= 0, "evaluation.every_steps", self.every_steps, "must not be negative", "0 evaluates only before and after")
        require(self.enabled or not self.every_steps, "evaluation.every_steps", self.every_steps, "must be 0 with evaluation.enabled=false",
                "Leave one of them out")
        require(self.num_samples >= 1, "evaluation.num_samples", self.num_samples, "must be at least 1", "1 is one answer for each prompt")
        require(self.temperature >= 0, "evaluation.temperature", self.temperature, "must not be negative", "0 is greedy")
        require(self.num_samples == 1 or self.temperature > 0, "evaluation.temperature", self.temperature,
                f"must be greater than 0 with evaluation.num_samples={self.num_samples}", "Greedy answers are all the same: use 1 sample, or for "
                "example evaluation.temperature=0.6")
        require(0 < self.top_p <= 1, "evaluation.top_p", self.top_p, "must be in (0, 1]", "Use 1 for no nucleus cut")
        require(self.top_k == -1 or self.top_k >= 1, "evaluation.top_k", self.top_k, "must be -1 or at least 1", "Use -1 for no cut")
        for k in self.pass_at:
            require(1 <= k <= self.num_samples, "evaluation.pass_at", k, f"must be from 1 to evaluation.num_samples={self.num_samples}",
                    "pass@k is estimated from k samples or more: raise evaluation.num_samples, or leave it out")
        require(0.5 <= self.confidence < 1, "evaluation.confidence", self.confidence, "must be from 0.5 to less than 1", "0.95 is usual")
        require(re.fullmatch(r"final|best|newest|\d+(\.\d+)?", self.checkpoint) is not None, "evaluation.checkpoint", self.checkpoint,
                "must be final, best, newest, a step, or EPOCH.STEP", "final is the run's final_model; checkpoints/ and exports/ show the others")
