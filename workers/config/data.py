"""Config of the data: where prompts come from."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field

from workers.config.choices import DataFilter, DataKind
from workers.config.rules import require

FILE_KINDS = (DataKind.jsonl, DataKind.parquet, DataKind.hf)
FIELDS = ("prompt", "answer", "id", "verifier", "response")
"""What `data.columns` may say of a row."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


@dataclass
class StageConfig:
    """A stage of a curriculum: other options of the task for the training prompts in front of number `until`."""

    until: int = 0
    options: dict[str, str | int | float | bool] = field(default_factory=dict)


@dataclass
class DataConfig:
    """Prompts. Training and held-out prompts are disjoint; order depends on `run.seed` only.

    Files: `path` with training prompts, `heldout_path` with others (of hf, also `heldout_split` of `path`); without, `num_heldout` of the
    training prompts are held out. `adapter` and `columns` say how a row becomes a prompt (docs/data.md); `response_field`: the column with the
    answers that a supervised run learns, unless `columns` names it. `verifier`: what judges these prompts, '' for `reward.verifier`.
    Limits: `max_prompt_tokens` of the rendered prompt (0: none) and `max_reference_kb` of what goes to the verifier; `filter` says what is done
    with prompts over them. `stages`: a curriculum of a reasoning-gym task; after the last stage `options` hold.
    `parts`: what a mixture is made of; `num_heldout` is shared out evenly among them.
    """

    kind: DataKind = DataKind.arithmetic
    num_heldout: int = 200
    digits: int = 2
    num_examples: int = 2
    task: str = "chain_sum"
    options: dict[str, str | int | float | bool] = field(default_factory=dict)
    stages: list[StageConfig] = field(default_factory=list)
    path: str = ""
    heldout_path: str = ""
    split: str = "train"
    heldout_split: str = ""
    subset: str = ""
    adapter: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    response_field: str = "response"
    verifier: str = ""
    chat_template: bool = False
    max_prompt_tokens: int = 0
    max_reference_kb: int = 1024
    filter: DataFilter = DataFilter.refuse
    parts: dict[str, PartConfig] = field(default_factory=dict)

    def check(self, key: str = "data") -> None:
        """Raise `ConfigError` on a value that cannot work; `key` is where this stands in the config."""
        require(self.num_heldout >= 1, f"{key}.num_heldout", self.num_heldout, "must be at least 1", "200 or more give a useful figure")
        require(1 <= self.digits <= 6, f"{key}.digits", self.digits, "must be from 1 to 6", "It is the number of digits of each summand")
        require(0 <= self.num_examples <= 16, f"{key}.num_examples", self.num_examples, "must be from 0 to 16",
                "It is the number of worked examples in front of each question")
        require(self.max_prompt_tokens >= 0, f"{key}.max_prompt_tokens", self.max_prompt_tokens, "must not be negative", "0 sets no limit")
        require(1 <= self.max_reference_kb <= 16 << 10, f"{key}.max_reference_kb", self.max_reference_kb, "must be from 1 to 16384", "Give KiB")
        require(self.response_field not in ("", "prompt", "id", "verifier"), f"{key}.response_field", self.response_field,
                "must name a column, and not one that has another meaning", "Use response, or answer where that is the whole answer")
        self._check_files(key)
        self._check_stages(key)
        self._check_parts(key)

    def verifiers(self, default: str) -> list[str]:
        """The verifiers of these prompts, each once, where `default` is `reward.verifier`. Rows of files may name others."""
        own = self.verifier or default
        return list(dict.fromkeys(part.verifier or own for part in self.parts.values())) or [own]

    def paths(self) -> list[str]:
        """The files and folders that are read."""
        return [path for part in (self, *self.parts.values()) for path in (part.path, part.heldout_path) if path]

    def _check_files(self, key: str) -> None:
        if self.kind in FILE_KINDS:
            require(bool(self.path), f"{key}.path", self.path, f"must name a file or folder when {key}.kind={self.kind.value}", "See docs/data.md")
        if self.kind is DataKind.hf:
            require(bool(self.split), f"{key}.split", self.split, "must name a split", "It is the part that is trained on, often train")
        for name in ("adapter", "columns"):
            require(not getattr(self, name) or self.kind in FILE_KINDS, f"{key}.{name}", getattr(self, name),
                    f"must be empty with {key}.kind={self.kind.value}", "It says how rows of files become prompts")
        for name, column in self.columns.items():
            near = difflib.get_close_matches(name, FIELDS, n=1)
            require(name in FIELDS, f"{key}.columns.{name}", column, f"there is no such field{f'; did you mean {near[0]!r}?' if near else ''}",
                    f"Use {', '.join(FIELDS)}")
            require(bool(column), f"{key}.columns.{name}", column, "must name a column, or be a template with columns in {braces}", "Leave it out")

    def _check_stages(self, key: str) -> None:
        require(not self.stages or self.kind is DataKind.reasoning_gym, f"{key}.stages", self.stages, "only data.kind=reasoning_gym has stages",
                "Leave them out")
        last = 0
        for number, stage in enumerate(self.stages):
            require(stage.until > last, f"{key}.stages[{number}].until", stage.until, f"must be greater than {last}, where the stage begins",
                    "It is the number of the first training prompt after the stage")
            last = stage.until

    def _check_parts(self, key: str) -> None:
        require(bool(self.parts) == (self.kind is DataKind.mixture), f"{key}.parts", sorted(self.parts),
                f"must {'name the parts' if self.kind is DataKind.mixture else 'be empty'} with {key}.kind={self.kind.value}",
                "data.kind=mixture mixes them: see conf/data/mixture.yaml")
        require(self.num_heldout >= len(self.parts), f"{key}.num_heldout", self.num_heldout,
                f"must be at least the number of parts, {len(self.parts)}", "Every part holds some out")
        for name, part in self.parts.items():
            own = f"{key}.parts.{name}"
            require(bool(_NAME.fullmatch(name)), own, name, "must be 1 to 40 letters, digits, _ or -", "It begins the ids of prompts")
            require(part.kind is not DataKind.mixture, f"{own}.kind", part.kind.value, "must not be a mixture itself", "List its parts here")
            require(part.weight > 0 and math.isfinite(part.weight), f"{own}.weight", part.weight, "must be greater than 0",
                    "Parts are mixed in proportion to their weights")
            part.check(own)


@dataclass
class PartConfig(DataConfig):
    """One part of a mixture: a data config of its own, drawn from in proportion to `weight`."""

    weight: float = 1.0
