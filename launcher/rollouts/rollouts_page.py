"""RUN/rollouts.html: samples side by side, step by step, with tokens coloured by version or by importance weight; the page searches itself.

    wanted rows, evenly over the steps, as many as fit --JSON--> templates/rollouts.html, which templates/rollouts.js draws

What models have said is hostile text. It stands in the page as JSON that cannot end its element, is put in place as text alone, never as markup,
with what cannot be seen shown by its number; and by the page's own policy nothing runs but its one script, known by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.rollouts.kept_rows import Part, Row, Wanted, parts, pieces, read, weights
from launcher.views.visible_text import visible_text
from workers.run.files import write_atomic
from workers.run.folder import RunFolder

TEMPLATES = Path(__file__).parent / "templates"
MOST_BYTES = 8 << 20
HELDOUT_PROMPTS = 32
"""Of an evaluation, so many prompts are shown where none is asked for: the same ones each time."""


def spread(steps: Sequence[int]) -> Iterator[int]:
    """The steps in such an order that the first so many lie evenly: the last, the first, then what halves the gaps."""
    waiting = [(0, len(steps) - 1)]
    yield from dict.fromkeys([*steps[-1:], *steps[:1]])
    for low, high in waiting:
        middle = (low + high) // 2
        if low < middle:
            yield steps[middle]
            waiting += [(low, middle), (middle, high)]


def chosen(found: Sequence[Part], wanted: Wanted, most_bytes: int) -> list[dict[str, Any]]:
    """What the page shows of the files, in order of steps: either kind in half of the bytes, or more where the other needs less. Raises as
    `kept_rows.read`."""
    shown: list[dict[str, Any]] = []
    left, waiting = most_bytes, {kind: _step_by_step(found, kind, wanted) for kind in ("heldout", "train")}
    spent = dict.fromkeys(waiting, 0)
    while waiting:
        kind = min(waiting, key=spent.__getitem__)
        entries = next(waiting[kind], None)
        size = 0 if entries is None else len(json.dumps(entries))
        if entries is None or (spent[kind] and size > left):
            del waiting[kind]
        else:
            shown, left, spent[kind] = shown + entries, left - size, spent[kind] + size
    return sorted(shown, key=lambda entry: entry["step"])


def _step_by_step(found: Sequence[Part], kind: str, wanted: Wanted) -> Iterator[list[dict[str, Any]]]:
    of_step: dict[int, list[Part]] = {}
    for part in found:
        if part.kind == kind and wanted.file(part):
            of_step.setdefault(part.step, []).append(part)
    for step in spread(sorted(of_step)):
        yield [_entry(row) for part in of_step[step] for row in read(part, wanted) if kind == "train" or wanted.prompt_id or _among_first(row)]


def _among_first(row: Row) -> bool:
    return int(row["group"].partition(".")[2]) < HELDOUT_PROMPTS


def _entry(row: Row) -> dict[str, Any]:
    known = [None if weight is None else round(weight, 2) for weight in weights(row)]
    return {
        **{name: row[name] for name in ("step", "kind", "sample", "reward", "score", "num_tokens", "age", "versions")},
        **{name: visible_text(row[name]) for name in ("prompt_id", "prompt", "reference")},
        "pieces": [visible_text(piece) for piece in pieces(row)], "weights": known if any(weight is not None for weight in known) else []}


def render(name: str, entries: list[dict[str, Any]], steps: Sequence[int]) -> str:
    """The page of a run called `name`; `steps`: all that have been kept."""
    script = (TEMPLATES / "rollouts.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    kept = {"name": visible_text(name), "first": min(steps, default=0), "last": max(steps, default=0), "samples": entries}
    data = json.dumps(kept).replace("<", "\\u003c").replace("&", "\\u0026")
    page = (TEMPLATES / "rollouts.html").read_text("utf-8")
    for mark, text in (("@DIGEST@", digest), ("@SCRIPT@", script), ("@DATA@", data)):  # the data last: no mark in it counts
        page = page.replace(mark, text)
    return page


def write(run: RunFolder, wanted: Wanted) -> Path:
    """Write the page, and return where. Raises as `kept_rows.read`; `OSError` where it cannot be written."""
    found = parts(run.rollouts)
    write_atomic(run.rollouts_page, render(run.path.name, chosen(found, wanted, MOST_BYTES), [part.step for part in found]).encode())
    return run.rollouts_page
