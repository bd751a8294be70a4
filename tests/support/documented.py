"""The commands that stand in the documentation and in recipes, and what a reader of them would have: models, data, a site file, a finished run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.__main__ import CONF

ROOT = CONF.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
         *(ROOT / "slurm" / name / "README.md" for name in ("local", "containers"))]
NEEDS = "# needs:"
"""Marks a command that cannot be tried where tests run; what follows says what it needs."""
BEGINNINGS = ("headway", "make", "python", "sbatch")
_FENCE, _BLOCK, _SPAN = re.compile(r"\s*```"), re.compile(r" {4}\S"), re.compile(r"(?<!`)`([^`\n]+)`(?!`)")

PLACEHOLDERS = {"NAME": "demo", "KIND": "supervised", "COMMAND": "status", "SWEEP": "runs"}
"""What stands for a name of the reader's, and one that will do."""

COMMON = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "head_dim": 128,
          "rope_theta": 1000000, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None}
DISTILLED = COMMON | {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 131072, "rope_theta": 10000, "num_hidden_layers": 28,
                      "sliding_window": 4096}
MODELS = {
    "Qwen3-0.6B": COMMON | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                            "num_key_value_heads": 8, "tie_word_embeddings": True},
    "Qwen3-8B": COMMON | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                          "num_key_value_heads": 8},
    "Qwen3-32B": COMMON | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
                           "num_key_value_heads": 8},
    "Qwen3-30B-A3B": COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "DeepSeek-R1-Distill-Qwen-1.5B": DISTILLED | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
                                                  "num_key_value_heads": 2, "head_dim": 128},
    "DeepSeek-R1-Distill-Qwen-7B": DISTILLED | {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                                                "num_key_value_heads": 4, "head_dim": 128},
}
"""config.json of the models that commands name, as their makers publish them."""


@dataclass(frozen=True)
class Command:
    """One command of a page; `needs`: what the marker beside it says that is missing here."""

    page: str
    line: int
    words: tuple[str, ...]
    needs: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


def commands() -> list[Command]:
    """All commands of the pages, and those in the heads of conf/'s files."""
    found = [command for page in PAGES for command in of_page(page)]
    for path in sorted(CONF.rglob("*.yaml")):
        text = re.sub(r"\\\n#\s*", " ", path.read_text())  # what goes on in the next line
        lines = [(number, line[1:]) for number, line in enumerate(text.splitlines(), 1) if line.startswith("#   ")]
        found += [command for number, line in lines for command in _of_line(str(path.relative_to(ROOT)), number, line)]
    return found


def of_page(page: Path) -> Iterator[Command]:
    """The commands in a page's blocks and `spans`."""
    name, fenced, begun = str(page.relative_to(ROOT)), False, ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif fenced or _BLOCK.match(line) or begun:
            whole = begun + line.strip()
            begun = whole[:-1] if whole.endswith("\\") else ""
            if not begun:
                yield from _of_line(name, number, whole)
        else:
            for span in _SPAN.findall(line):
                yield from _of_line(name, number, span)


def _of_line(page: str, number: int, line: str) -> Iterator[Command]:
    text, _, needs = line.strip().removeprefix("$ ").partition(NEEDS)
    if text.partition(" ")[0] not in BEGINNINGS:
        return
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ValueError(f"{page}:{number}: {error}: {text}") from error
    for some in _split(words):
        if some[0] in BEGINNINGS and (len(some) > 1 or some == ["make"]):
            yield Command(page, number, tuple(some), needs.strip())


def _split(words: list[str]) -> Iterator[list[str]]:
    """What stands between &&, | and ;."""
    begun: list[str] = []
    for word in [*words, ";"]:
        if word in ("&&", "|", ";") or word.endswith(";"):
            begun += [word[:-1]] if len(word) > 1 and word.endswith(";") else []
            if begun:
                yield begun
            begun = []
        else:
            begun.append(word)


def spans(page: Path) -> Iterator[tuple[int, str]]:
    """The `spans` of a page outside of its blocks, with their lines."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced and not _BLOCK.match(line):
            yield from ((number, span) for span in _SPAN.findall(line))


def files() -> dict[str, str]:
    """The files of conf/ that pages show whole: by their path, which stands in the first line behind a `#`, or in the one after its package."""
    shown = "\n".join(page.read_text() for page in PAGES)
    return {match[1]: textwrap.dedent(match[0])
            for match in re.finditer(r"^(?: {4}# @package .*\n)? {4}# (conf/\w+/\w+\.yaml)\b.*\n(?: {4}.*\n)+", shown, re.MULTILINE)}


class World:
    """What commands name, below `folder`: /models, /datasets and /shared there, and conf/, with a site file `cluster=mysite` that is a shipped
    example and the files that pages show."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, config in MODELS.items():
            model = folder / "models" / name
            model.mkdir(parents=True)
            (model / "config.json").write_text(json.dumps(config))
        (folder / "conf" / "cluster").mkdir(parents=True)
        shutil.copy(CONF / "cluster" / "site_modules.yaml", folder / "conf" / "cluster" / "mysite.yaml")
        for path, text in files().items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)

    def here(self, word: str) -> str:
        """A word of a command with the paths that it names below this folder, and without placeholders."""
        for name, value in PLACEHOLDERS.items():
            word = re.sub(rf"\b{name}\b", value, word)
        return re.sub(r"(?<![\w.])/(models|datasets|shared|home)(?=/)", lambda match: f"{self.folder}/{match[1]}", word)
