"""The rows of RUN/rollouts (workers/metrics/rollout_table.py says what is in them) that somebody asks for.

    train-STEP.parquet, heldout-STEP.PART.parquet --Wanted--> rows, file by file
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
BATCH_ROWS = 64
"""So many rows are unpacked at a time: a token takes some 200 bytes then."""
MISSING = "pyarrow, which reads Parquet files, is not installed here. Install it: pip install pyarrow"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both counting."""

    low: float = float("-inf")
    high: float = float("inf")

    @staticmethod
    def of(text: str) -> Range:
        """Of A:B, A:, :B, or a single number. Raises ValueError."""
        first, colon, last = text.partition(":")
        if not colon:
            return Range(float(first), float(first))
        return Range(float(first or "-inf"), float(last or "inf"))

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Wanted:
    """Which samples: `kind` ('': both), their `text` in prompt or response, everything else by numbers."""

    steps: Range = Range()
    rewards: Range = Range()
    tokens: Range = Range()
    kind: str = ""
    prompt_id: str = ""
    text: re.Pattern[str] | None = None

    def file(self, part: Part) -> bool:
        """Whether some of a file may be wanted."""
        return part.step in self.steps and self.kind in ("", part.kind)

    def row(self, row: Row) -> bool:
        """Whether a row is."""
        return (row["reward"] in self.rewards and row["num_tokens"] in self.tokens and self.prompt_id in ("", row["prompt_id"])
                and (self.text is None or bool(self.text.search(row["response"]) or self.text.search(row["prompt"]))))


class Part(NamedTuple):
    """A file. In order of their steps."""

    step: int
    kind: str
    path: Path


def parts(folder: Path) -> list[Part]:
    """The files that there are, from the first step on."""
    found = (re.fullmatch(r"(train|heldout)-(\d{8})(?:\.\d{3})?\.parquet", path.name) for path in folder.glob("*.parquet"))
    return sorted(Part(int(match[2]), match[1], folder / match[0]) for match in found if match)


def read(part: Part, wanted: Wanted = Wanted()) -> Iterator[Row]:
    """The wanted rows of a file; none of one that the run has removed meanwhile. Raises ImportError without pyarrow, `OSError`, and
    ValueError on a file that is damaged."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(part.path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                yield from filter(wanted.row, batch.to_pylist())
    except FileNotFoundError:
        return
    except (pyarrow.ArrowException, OSError) as error:  # what is damaged is one or the other
        raise ValueError(f"{part.path}: cannot be read ({error})") from error


def pieces(row: Row) -> list[str]:
    """The response token by token; in one piece where its tokenizer could not say where each ends."""
    ends, text = row["token_ends"], row["response"]
    if not ends:
        return [text]
    cuts = [0, *ends[:-1], len(text)]  # what is left of a character that was cut off goes with the last token
    return [text[begin:end] for begin, end in itertools.pairwise(cuts)]


def weights(row: Row) -> list[float | None]:
    """The importance weight of each token, e**(log-prob before the step - when it was sampled); None where it is not known, or not trained on."""
    proximal = row["proximal_logprobs"] or [None] * len(row["logprobs"])
    return [math.exp(min(50.0, after - before)) if after is not None and counts else None
            for before, after, counts in zip(row["logprobs"], proximal, row["trained_on"], strict=True)]
