"""Config of rewards: the verifier and the processes that run it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from workers.config.choices import Placement
from workers.config.judge import JUDGE, JudgeConfig
from workers.config.rules import ConfigError, require

MAX_PARTS = 64
REWARD_MODEL = "reward_model"
"""The verifier that is a sequence classifier."""


def names(verifier: str, part: str) -> bool:
    """Whether a verifier, or a part of a weighted sum, is `part`."""
    return any(term.rpartition("*")[2] == part for term in verifier.split("+"))


@dataclass
class RewardModelConfig:
    """A Hugging Face sequence classifier: of one output the score is sigmoid((output - `center`) / `scale`), of several the softmax's `label`."""

    path: str = ""  # folder of the model, with its tokenizer
    center: float = 0.0  # the output that is a score of 0.5, of a model with one output
    scale: float = 1.0  # by how much more the output is at a score of 0.73
    label: int = 0  # whose probability is the score, of a model with several outputs
    max_tokens: int = 4096  # of prompt and answer; of longer ones the end is scored

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(math.isfinite(self.center), "reward.model.center", self.center, "must be finite", "It is the output that scores 0.5")
        require(0 < self.scale < math.inf, "reward.model.scale", self.scale, "must be positive and finite", "Outputs are divided by it")
        require(self.label >= 0, "reward.model.label", self.label, "must not be negative", "It counts the model's outputs from 0 on")
        require(self.max_tokens >= 1, "reward.model.max_tokens", self.max_tokens, "must be at least 1", "Longer texts are cut")

    def settle(self) -> None:
        """Look at the folder, and make its path absolute. Raises `ConfigError`."""
        folder = Path(self.path).expanduser().absolute()
        try:
            found = json.loads((folder / "config.json").read_text("utf-8"))
            kinds, outputs = found.get("architectures") or ["none"], len(found.get("id2label") or ("LABEL_0", "LABEL_1"))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"reward.model.path={self.path!r}: holds no readable config.json ({error}). "
                              "Give the folder of a sequence classifier") from error
        require(kinds[0].endswith("ForSequenceClassification"), "reward.model.path", self.path, f"must be a sequence classifier, not {kinds[0]}",
                "Give the folder of one")
        require(self.label < outputs, "reward.model.label", self.label, f"must be below the {outputs} outputs of reward.model.path", "Correct it")
        require(outputs == 1 or (self.center, self.scale) == (0.0, 1.0), "reward.model.center", self.center,
                f"must be left at 0, and reward.model.scale at 1, with {outputs} outputs", "The softmax of reward.model.label is the score")
        self.path = str(folder)


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
    model: RewardModelConfig = field(default_factory=RewardModelConfig)  # the classifier that verifier 'reward_model' is
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
        self.model.check()
        require(self.num_processes >= 1, "reward.num_processes", self.num_processes, "must be at least 1", "Give 1 or more")
        require(self.timeout_s > 0, "reward.timeout_s", self.timeout_s, "must be positive", "A verifier is killed after this time")
        require(self.memory_mb >= 128, "reward.memory_mb", self.memory_mb, "must be at least 128", "It bounds each verifier process")
        require(self.max_retries >= 0, "reward.max_retries", self.max_retries, "must not be negative", "Give 0 or more")
        require(self.num_elements >= 1, "reward.num_elements", self.num_elements, "must be at least 1",
                "It is how many elements of the reward array run at once, with reward.placement=array")

    def settle(self) -> None:
        """Read what the config names: the judge's template, the classifier's config. Raises `ConfigError`."""
        self.judge.settle()
        if self.model.path:
            self.model.settle()

    def check_named(self, verifier: str, place: str = "") -> None:
        """Raise `ConfigError` where a verifier, or a part of a weighted sum, lacks what it asks; `place`: what names it beside the config."""
        for part, key, value, what, page in ((JUDGE, "judge.url", self.judge.url, "an endpoint", "judges"),
                                             (REWARD_MODEL, "model.path", self.model.path, "a sequence classifier", "reward_models")):
            said = f": {place} has verifier {verifier!r}" if place else f" with verifier {part!r}"
            require(bool(value) or not names(verifier, part), f"reward.{key}", value, f"must name {what}{said}", f"See docs/{page}.md")

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
