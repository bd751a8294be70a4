"""Config of the data: where prompts come from."""

from __future__ import annotations

import datetime
import difflib
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from workers.config.choices import DataFilter, DataKind
from workers.config.rules import require

FILE_KINDS = (DataKind.jsonl, DataKind.parquet, DataKind.hf)
FIELDS = ("prompt", "answer", "id", "verifier", "response")
"""What `data.columns` may say of a row."""
AUTO = "auto"
"""`bos` until a run is prepared."""
TAKEN_OVER = ("chat_template", "chat_template_kwargs", "chat_template_date", "bos", "max_prompt_tokens", "max_reference_kb", "filter")
"""What parts of a mixture take from it unless they say it themselves."""
_UNSAID = {"chat_template": False, "chat_template_kwargs": {}, "chat_template_date": "", "max_prompt_tokens": 0, "filter": "refuse"}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


@dataclass
class StageConfig:
    """A stage of a curriculum: other options of the task for the training prompts in front of number `until`."""

    until: int = 0  # [prompts] that have been trained on when the stage ends
    options: dict[str, str | int | float | bool] = field(default_factory=dict)  # options of the task in this stage


@dataclass
class SourceConfig:
    """Where prompts come from: what a run's data and each part of a mixture have in common.

    Files: `path` with training prompts, `heldout_path` with others (of hf, also `heldout_split` of `path`); without, `num_heldout` of the
    training prompts are held out. `adapter` and `columns` say how a row becomes a prompt (docs/data.md); `response_field`: the column with the
    answers that a supervised run learns, unless `columns` or the adapter names it. `verifier`: what judges these prompts, '' for `reward.verifier`.
    `stages`: a curriculum of a reasoning-gym task; after the last stage `options` hold.
    """

    kind: DataKind = DataKind.arithmetic  # where prompts come from; docs/data.md
    num_heldout: int = 200  # prompts that are never trained on, for evaluation
    digits: int = 2  # of each summand, of kind=arithmetic
    num_examples: int = 2  # worked examples in front of each sum, of kind=arithmetic
    task: str = "chain_sum"  # name of the reasoning-gym task
    options: dict[str, str | int | float | bool] = field(default_factory=dict)  # options of that task, as OPTION: VALUE
    stages: list[StageConfig] = field(default_factory=list)  # a curriculum of that task: other options for its first prompts
    path: str = ""  # file or folder with the training prompts
    heldout_path: str = ""  # file or folder with other prompts, for evaluation; empty: some of path are held out
    split: str = "train"  # the part of a Hugging Face data set that is trained on
    heldout_split: str = ""  # the part of it for evaluation
    subset: str = ""  # its configuration (folder), where it has several
    adapter: str = ""  # how rows become prompts: a built-in one, or package.module:function
    columns: dict[str, str] = field(default_factory=dict)  # which columns, or templates of {columns}, are prompt, answer, id, verifier, response
    response_field: str = "response"  # the column with the answers that a supervised run learns
    verifier: str = ""  # what judges these prompts; empty: reward.verifier


@dataclass
class PartConfig(SourceConfig):
    """One part of a mixture, drawn from in proportion to `weight`. What is null is as the mixture says."""

    chat_template: bool | None = None  # prompts are rendered with the model's chat template
    chat_template_kwargs: dict[str, str | int | float | bool] | None = None  # what the template is given besides
    chat_template_date: str | None = None  # the day of templates that ask for one, as 2026-03-01
    bos: str | None = None  # what stands before prompts without a chat template
    max_prompt_tokens: int | None = None  # [tokens] of a rendered prompt; 0: no limit
    max_reference_kb: int | None = None  # of what goes to the verifier with a prompt
    filter: DataFilter | None = None  # what is done with prompts over these limits
    weight: float = 1.0  # this part's share of the mixture, in proportion to the others'


@dataclass
class DataConfig(SourceConfig):
    """Prompts. Training and held-out prompts are disjoint; order depends on `run.seed` only.

    Limits: `max_prompt_tokens` of the rendered prompt (0: none) and `max_reference_kb` of what goes to the verifier; `filter` says what is done
    with prompts over them.
    `chat_template`: prompts are rendered by the model's template, which is given `chat_template_kwargs` ({enable_thinking: false} for Qwen3).
    `chat_template_date`: some templates name the day: one for the whole run, so that a prompt is the same whenever it is rendered.
    `bos`: base models of some families (Llama 3, Gemma, Mistral) are only themselves behind the token that begins a text.
    `parts`: what a mixture is made of; `num_heldout` is shared out evenly among them.
    """

    chat_template: bool = False  # prompts are rendered with the model's chat template
    chat_template_kwargs: dict[str, str | int | float | bool] = field(default_factory=dict)  # what the template is given besides
    chat_template_date: str = ""  # the day of templates that ask for one, as 2026-03-01; empty: that on which the run is begun
    bos: str = AUTO  # what stands before prompts without a chat template; auto: what the model's tokenizer puts before a text, if anything
    max_prompt_tokens: int = 0  # [tokens] of a rendered prompt; 0: no limit
    max_reference_kb: int = 1024  # of what goes to the verifier with a prompt
    filter: DataFilter = DataFilter.refuse  # what is done with prompts over these limits
    parts: dict[str, PartConfig] = field(default_factory=dict)  # the parts of a mixture by name, each with the keys of data and a weight

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
        require(not self.chat_template_date or _is_day(self.chat_template_date), f"{key}.chat_template_date",
                self.chat_template_date, "must be a day", "Write it as 2026-03-01")
        require(self.chat_template or not self.chat_template_kwargs, f"{key}.chat_template_kwargs", self.chat_template_kwargs,
                f"must be empty with {key}.chat_template=false", "It is given to the model's chat template")
        self._check_files(key)
        self._check_stages(key)
        self._check_parts(key)

    def settled_parts(self) -> dict[str, DataConfig]:
        """The parts of a mixture, with what it says where they do not say it themselves; `num_heldout` is shared out evenly."""
        share, rest = divmod(self.num_heldout, max(1, len(self.parts)))
        own = [part.name for part in fields(SourceConfig)]
        result = {}
        for number, (name, part) in enumerate(self.parts.items()):
            said = {key: given if (given := getattr(part, key)) is not None else getattr(self, key) for key in TAKEN_OVER}
            if part.chat_template_kwargs is None and not said["chat_template"]:
                said["chat_template_kwargs"] = {}
            source = {key: getattr(part, key) for key in own} | {
                "num_heldout": min(part.num_heldout, share + (number < rest)), "verifier": part.verifier or self.verifier}
            result[name] = DataConfig(**source, **said)
        return result

    @property
    def text_before(self) -> str:
        """What stands before each prompt, beside what a chat template puts there; '' as long as that is not settled."""
        return "" if self.chat_template or self.bos == AUTO else self.bos

    def settle_bos(self, text: str) -> None:
        """`text` is what the model's tokenizer puts before a text."""
        if self.bos == AUTO:
            self.bos = text
        for part in self.parts.values():
            if part.bos == AUTO:
                part.bos = text

    def sources(self) -> list[DataConfig]:
        """What prompts really come from: this, or the parts of a mixture."""
        return list(self.settled_parts().values()) or [self]

    def verifiers(self, default: str) -> list[str]:
        """The verifiers of these prompts, each once, where `default` is `reward.verifier`. Rows of files may name others."""
        own = self.verifier or default
        return list(dict.fromkeys(part.verifier or own for part in self.parts.values())) or [own]

    def make_absolute(self) -> None:
        """Write the paths as they are seen from here: workers start elsewhere."""
        for part in (self, *self.parts.values()):
            part.path, part.heldout_path = (str(Path(path).expanduser().absolute()) if path else "" for path in (part.path, part.heldout_path))

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
        settled = self.settled_parts()
        for name, part in self.parts.items():
            own = f"{key}.parts.{name}"
            require(bool(_NAME.fullmatch(name)), own, name, "must be 1 to 40 letters, digits, _ or -", "It begins the ids of prompts")
            require(part.kind not in (DataKind.mixture, DataKind.verifiers), f"{own}.kind", part.kind.value,
                    "must not be a mixture itself, nor an environment's", "List parts of other kinds here")
            require(part.weight > 0 and math.isfinite(part.weight), f"{own}.weight", part.weight, "must be greater than 0",
                    "Parts are mixed in proportion to their weights")
            settled[name].check(own)


def _is_day(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


def bring_up(stored: object) -> None:
    """Make `data` of a run's config, as an earlier version has written it, say what it meant then: parts of a mixture had values of their own for
    all, which counted where they were not the defaults, and nothing stood before prompts."""
    if not isinstance(stored, dict):
        return
    stored.setdefault("bos", "")
    parts = stored.get("parts")
    for part in parts.values() if isinstance(parts, dict) else ():
        if isinstance(part, dict) and part.pop("parts", None) is not None:
            part.update({key: None for key, unsaid in _UNSAID.items() if part.get(key) == unsaid})
