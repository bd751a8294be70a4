"""Run folders for tests of reports: files as a run leaves them, without the run; and a page as a browser's parser takes it."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec

from workers.config import Config, RunKind
from workers.run import incarnations
from workers.run.folder import RunFolder

VOID = {"meta"}
"""Elements that have no content here."""


def make(folder: Path, config: dict[str, Any] | None = None, accuracies: tuple[float, ...] = (), num_steps: int = 0, outcome: str | None = None,
         *, kind: RunKind = RunKind.rl) -> RunFolder:
    """A run folder; `config` is put over the default config, part by part."""
    run = RunFolder.create(folder)
    full = msgspec.to_builtins(Config())
    full["run"] |= {"dir": str(folder), "kind": kind.value, "name": "small", "num_steps": max(1, num_steps)}
    full["model"]["path"] = str(run.model)
    for part, values in (config or {}).items():
        full[part] |= values
    run.config.write_text(json.dumps(full))
    supervised = kind is RunKind.supervised
    evaluations = [{"step": 10 * number, "seconds": number, "num_prompts": 50, "heldout_loss" if supervised else "accuracy": value}
                   for number, value in enumerate(accuracies)]
    write_lines(run.evaluations, evaluations)
    write_lines(run.metrics, [(supervised_step if supervised else step)(number + 1) for number in range(num_steps)])
    if num_steps:
        incarnations.claim(run, "", "", 0, "here", 1, 0)
    if outcome is not None:
        run.end("" if outcome == "finished" else "broken", "test", outcome)
    return run


def write_lines(path: Path, lines: list[dict]) -> None:
    """JSON lines, as a run writes them."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def step(number: int) -> dict[str, Any]:
    """A line of metrics.jsonl with the fields that a small run has."""
    return {
        "step": number, "seconds": 2.0 * number, "reward": number - 1.0, "accuracy": 1 - 1 / (number + 1), "accuracy_sampled": None,
        "response_tokens": 4.0, "share_no_spread": 0.25, "share_rejected": 0.0, "staleness_mean": 1.0, "staleness_max": number % 4,
        "staleness_histogram": {"0": 2, "2": 6},
        "token_age_mean": 1.0, "loss": 0.1 * math.sin(number), "entropy": 1.0, "grad_norm": 1.0 + number % 3, "lr": 1e-3, "clip_share": 0.1,
        "behavior_weight_mean": 1.0, "behavior_weight_max": 10.0 ** (number % 5), "behavior_ess": 0.9, "kl_proximal": 0.0,
        "gap_proximal_behavior": 0.02, "gap_proximal_behavior_p99": 0.2,
        "tokens_generated": 120 * number, "tokens_trained": 100 * (number - 1), "wait_batch_s": 0.5, "train_s": 1.0, "publish_s": 0.25,
        "checkpoint_s": 0.0, "export_s": 0.0,
        "replicas": 2, "rollout_idle_s": 1.0 * number, "rollout_sample_s": 24.0 * number,
        "weight_updates": number, "weight_update_s": 0.5 * number, "weight_fetch_s": 0.1 * number,
        "reward_wait_s": 0.0, "reward_busy_s": 0.2 * number, "lead": 1.5, "lead_reason": "", "buffer": 3, "running": 5, "num_microbatches": 4}


def supervised_step(number: int) -> dict[str, Any]:
    """A line of a supervised run's metrics.jsonl."""
    return {"step": number, "seconds": 2.0 * number, "loss": 3 / number, "perplexity": math.exp(3 / number), "grad_norm": 1.0, "lr": 1e-3,
            "entropy": 2.0, "response_tokens": 3.0, "tokens_trained": 50 * number, "train_s": 1.5, "wait_batch_s": 0.1, "heldout_s": 0.1}


class Page(HTMLParser):
    """A page taken apart: its elements with their attributes, ids, texts, and texts by the element that they stand in."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.declarations: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing that is open"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def handle_decl(self, decl: str) -> None:
        self.declarations.append(decl)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")

    @property
    def ids(self) -> set[str]:
        """All of them."""
        return {attributes["id"] for _, attributes in self.elements if "id" in attributes}

    @property
    def tags(self) -> set[str]:
        """The names of all elements."""
        return {tag for tag, _ in self.elements}

    def within(self, tag: str) -> list[str]:
        """The texts that stand directly in elements `tag`."""
        return [text for inside, text in self.texts if inside == tag]

    @property
    def text(self) -> str:
        """Everything that a reader sees."""
        return " ".join(" ".join(text.split()) for inside, text in self.texts if inside not in ("style", "title"))
