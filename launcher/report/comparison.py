"""The same held-out prompts answered before training and after it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.report.record import Record, number

NUM_SHOWN = 8


@dataclass(frozen=True)
class Answer:
    """A response and its score; None where there is none."""

    text: str
    score: float | None


@dataclass(frozen=True)
class Pair:
    """One prompt's answers."""

    prompt: str
    reference: str
    before: Answer | None
    after: Answer | None


@dataclass(frozen=True)
class Comparison:
    """What was answered at the first and at the last evaluation on record; `last` is None where there was only one."""

    first: float
    last: float | None
    pairs: list[Pair]


def compare(record: Record) -> Comparison | None:
    """The answers to the first held-out prompts; None where none are on record."""
    found = [(step, answers) for line in record.samples if (step := number(line.get("step"))) is not None and (answers := _answers(line))]
    if not found:
        return None
    (first, before), (last, after) = found[0], found[-1]
    ids = list(dict.fromkeys([*after, *before]))[:NUM_SHOWN]
    again = len(found) > 1
    pairs = [Pair(_text(after.get(name) or before[name], "prompt"), _text(after.get(name) or before[name], "reference"),
                  _answer(before.get(name)), _answer(after.get(name)) if again else None) for name in ids]
    return Comparison(first, last if again else None, pairs)


def _answers(line: dict) -> dict[str, dict]:
    samples = line.get("samples")
    entries = [entry for entry in samples if isinstance(entry, dict)] if isinstance(samples, list) else []
    return {str(entry.get("prompt_id", number)): entry for number, entry in enumerate(entries)}


def _answer(entry: dict | None) -> Answer | None:
    return None if entry is None else Answer(_text(entry, "response"), number(entry.get("score")))


def _text(entry: dict, key: str) -> str:
    value = entry.get(key)
    return "" if value is None else str(value)
