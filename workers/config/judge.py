"""Config of judges: a chat endpoint that scores answers (docs/judges.md)."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workers.config.rules import ConfigError, require

JUDGE = "judge"
"""The verifier that asks the endpoint."""
DROP = "drop"
FIELDS = ("prompt", "completion", "reference", "rubric", "scale_min", "scale_max")
"""What a template may ask for, in {braces}."""
MAX_TEMPLATE = 32_000


@dataclass
class JudgeConfig:
    """The endpoint, how it is asked, and what is read out of its answer. Its key stays in the environment: the config only names the variable.

    A question makes at most 1 + `max_retries` calls, one after the other. `max_calls` counts calls of one rollout worker since it started.
    `failed`: `drop`, no score, so that the group is tried again and set aside after rollout.max_attempts; or the score of what has none.
    """

    url: str = ""  # of an OpenAI-compatible endpoint, without /chat/completions: what OPENAI_BASE_URL holds
    model: str = ""  # the model's name there
    api_key_env: str = ""  # the environment variable that holds the endpoint's key; empty: no key is sent
    template: str = ""  # the question, with {prompt}, {completion}, {reference}, {rubric}, {scale_min}, {scale_max}; empty: the built-in one
    template_file: str = ""  # a file with the template, which is read once, before anything starts
    rubric: str = ""  # what the judge is to look at; it stands in the template
    pattern: str = r'(?i)score(?: ?\([^()]{0,20}\))?(?: is)?[\s:=*"`]{0,10}(-?\d+(?:\.\d+)?)'  # its first group: the number; the last match counts
    scale_min: float = 0.0  # the number that is a score of 0
    scale_max: float = 10.0  # the number that is a score of 1
    temperature: float = 0.0  # of the judge's answer
    max_tokens: int = 512  # [tokens] of the judge's answer
    body: dict[str, Any] = field(default_factory=dict)  # of the request besides, as KEY: VALUE; they win over the two above; null: not sent
    max_answer_kb: int = 256  # of what the endpoint sends; more is a failure
    timeout_s: float = 60.0  # of one call, from the connection to the last byte
    max_retries: int = 3  # calls beside the first, where the endpoint is busy, gone, or says nothing that can be read
    backoff_s: float = 1.0  # before the first retry; doubled with each
    concurrency: int = 16  # calls at once, of one rollout worker
    cache_size: int = 10_000  # scores that are kept, of one rollout worker; 0: none
    max_calls: int = 0  # of one rollout worker, retries included; after these every question fails; 0: no limit
    failed: str = DROP  # what becomes of an answer that has no score: drop, or a score from 0 to 1

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        if self.url:
            self._check_endpoint()
        self._check_template()
        self._check_reading()
        require(not {"model", "messages", "stream"} & self.body.keys(), "reward.judge.body", self.body, "must not say model, messages or stream",
                "They are what Headway asks")
        for name, least in (("max_tokens", 1), ("max_answer_kb", 1), ("concurrency", 1), ("max_retries", 0), ("cache_size", 0), ("max_calls", 0)):
            require(getattr(self, name) >= least, f"reward.judge.{name}", getattr(self, name), f"must be at least {least}", f"Give {least} or more")
        require(0 < self.timeout_s <= 3600, "reward.judge.timeout_s", self.timeout_s, "must be positive, and at most 3600",
                "A call is given up after this time")
        for name in ("backoff_s", "temperature"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"reward.judge.{name}", value, "must be finite and not negative", "Give 0 or more")
        require(self.failed == DROP or self.stand_in is not None, "reward.judge.failed", self.failed, "must be drop, or a score from 0 to 1",
                "drop takes no group that could not be judged")

    def settle(self) -> None:
        """Read the template's file, and look for the key. Raises `ConfigError`."""
        if self.template_file:
            try:
                self.template, self.template_file = Path(self.template_file).expanduser().read_text("utf-8"), ""
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"reward.judge.template_file={self.template_file!r}: cannot be read ({error}). Correct the path") from error
            self._check_template()
        require(not (self.url and self.api_key_env) or bool(os.environ.get(self.api_key_env)), "reward.judge.api_key_env", self.api_key_env,
                "there is no such environment variable", "Set it to the endpoint's key")

    @property
    def stand_in(self) -> float | None:
        """The score of what has none; None where there is none."""
        try:
            value = float(self.failed)
        except ValueError:
            return None
        return value if 0 <= value <= 1 else None

    def _check_endpoint(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # an address or a port that is none
            usable = False
        require("@" not in self.url and "?" not in self.url, "reward.judge.url", "...", "must hold neither a user nor a query",
                "Its key is read from the environment: reward.judge.api_key_env")
        require(usable, "reward.judge.url", self.url, "must be http://HOST:PORT/PATH, or https", "Give what comes before /chat/completions")
        require(bool(self.model), "reward.judge.model", self.model, "must name a model of reward.judge.url", "GET /models there lists them")
        require(re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]{0,99})?", self.api_key_env) is not None, "reward.judge.api_key_env", "...",
                "must be the name of an environment variable, never the key itself", "Set the variable where the run is started")

    def _check_template(self) -> None:
        require(not (self.template and self.template_file), "reward.judge.template_file", self.template_file,
                "must be empty with reward.judge.template", "Give one of them")
        asked = set(re.findall(r"\{([a-z_]+)\}", self.template)) if self.template else set(FIELDS)
        require(asked <= set(FIELDS), "reward.judge.template", sorted(asked - set(FIELDS)), f"may ask for {', '.join(FIELDS)}", "Correct it")
        require("completion" in asked, "reward.judge.template", self.template[:100], "must have {completion}", "That is what is judged")
        require(not self.rubric or "rubric" in asked, "reward.judge.rubric", self.rubric[:100], "has no {rubric} in the template", "Write it there")
        require(max(len(self.template), len(self.rubric)) <= MAX_TEMPLATE, "reward.judge.template", "...",
                f"must have at most {MAX_TEMPLATE} characters, as the rubric", "Shorten it")

    def _check_reading(self) -> None:
        try:
            groups, rule = re.compile(self.pattern).groups, "must have a group, which is the number"
        except re.error as error:
            groups, rule = 0, f"is no regular expression ({error})"
        require(groups >= 1, "reward.judge.pattern", self.pattern, rule, r"An example: Score: (\d+)")
        require(re.search(r"\([^()]*[+*][^()]*\)[+*{]", self.pattern) is None, "reward.judge.pattern", self.pattern,
                "must not repeat a group that repeats something itself", "Some answers would be searched for ever")
        require(-math.inf < self.scale_min < self.scale_max < math.inf, "reward.judge.scale_max", self.scale_max,
                f"must be finite and greater than reward.judge.scale_min={self.scale_min}", "They are the numbers that are scores of 0 and 1")
