"""Which tokens' keys and values stand in which row of the KV cache, and who owns the row. Pure: no torch, no clock.

A row holds the KV of one token sequence. Rows [0, num_decoding) are decoded in every step and stay compact, so that
attention reads one contiguous slice; the rows behind them are being prefilled, or are idle and keep what their last
owner left, for prefix reuse. Moving a row's content is a `Copy`, which the engine carries out before the next forward.

Invariant: after the copies so far are carried out, row i's first len(rows[i].tokens) positions hold the KV of exactly
rows[i].tokens. A row that is not `shareable` holds KV of older weights as well, and is never a copy's source for another
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.rollout.engines.servers.embedded.requests import Copy, Request


@dataclass(eq=False)
class Row:
    """One row of the KV cache. `used` orders idle rows by age; 0 means empty. `routing`: the experts chosen for each of `tokens`, where the model
    records them, else none."""

    tokens: list[int] = field(default_factory=list)
    routing: list[bytes] = field(default_factory=list)
    owner: Request | None = None
    shareable: bool = True
    used: int = 0


def common_prefix(first: Sequence[int], second: Sequence[int], at_least: int = 0) -> int:
    """Length of the common prefix, or 0 if it is not longer than `at_least`. Both are lists (slices are compared)."""
    low, high = at_least + 1, min(len(first), len(second))
    if low > high or first[:low] != second[:low]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class RowTable:
    """`num_rows` rows; row index `num_rows` is scratch space for exchanges."""

    def __init__(self, num_rows: int) -> None:
        self.rows = [Row() for _ in range(num_rows)]
        self.num_decoding = 0
        self.copies: list[Copy] = []
        self._tick = 0

    def num_idle(self) -> int:
        """Rows without an owner."""
        return sum(row.owner is None for row in self.rows)

    def best_match(self, tokens: list[int]) -> tuple[int, int]:
        """(row, length) of the longest prefix of `tokens` whose KV stands in a row; length 0 if there is none."""
        best, best_length = 0, 0
        for index, row in enumerate(self.rows):
            if row.shareable and len(row.tokens) > best_length:
                length = common_prefix(row.tokens, tokens, best_length)
                if length:
                    best, best_length = index, length
        return best, best_length

    def acquire(self, request: Request, tokens: list[int]) -> int:
        """Give `request` an idle row holding the longest known prefix of `tokens`; returns that prefix's length.

        There must be an idle row. The source row itself is taken over where that loses nothing.
        """
        source, length = self.best_match(tokens)
        idle = [index for index, row in enumerate(self.rows) if row.owner is None]
        assert idle, "acquire needs an idle row"
        if length and self.rows[source].owner is None and length == len(self.rows[source].tokens):
            target = source
        else:
            target = min(idle, key=lambda index: self.rows[index].used)
            if length and target != source:
                self.copies.append(Copy(source, target, length))
        row = self.rows[target]
        row.routing = self.rows[source].routing[:length]
        row.tokens, row.owner, row.shareable = tokens[:length], request, True
        request.row = target
        return length

    def promote(self, index: int) -> None:
        """Move row `index`, whose prefill is complete, into the decoded range."""
        self._exchange(index, self.num_decoding)
        self.num_decoding += 1

    def release(self, index: int) -> None:
        """Take the row from its owner. Its KV stays for prefix reuse unless it is stale."""
        if index < self.num_decoding:
            self.num_decoding -= 1
            self._exchange(index, self.num_decoding)
            index = self.num_decoding
        row = self.rows[index]
        assert row.owner is not None, "released twice"
        row.owner.row = None
        row.owner = None
        self._tick += 1
        row.used = self._tick
        if not row.shareable:
            self._clear(row)

    def invalidate(self) -> None:
        """Forget every reusable prefix. Rows in use keep their KV for their owner only."""
        for row in self.rows:
            if row.owner is None:
                self._clear(row)
            else:
                row.shareable = False

    def truncate_idle(self, capacity: int) -> None:
        """The cache now holds `capacity` positions a row: idle rows lose what stood behind."""
        for row in self.rows:
            if row.owner is None:
                del row.tokens[capacity:], row.routing[capacity:]

    def _clear(self, row: Row) -> None:
        row.tokens, row.routing, row.shareable, row.used = [], [], True, 0

    def _exchange(self, first: int, second: int) -> None:
        if first == second:
            return
        rows, scratch = self.rows, len(self.rows)
        moves = [Copy(first, scratch, len(rows[first].tokens)), Copy(second, first, len(rows[second].tokens)),
                 Copy(scratch, second, len(rows[first].tokens))]
        if not rows[second].tokens:
            moves = [Copy(first, second, len(rows[first].tokens))]
        self.copies.extend(move for move in moves if move.length)
        rows[first], rows[second] = rows[second], rows[first]
        for index in (first, second):
            owner = rows[index].owner
            if owner is not None:
                owner.row = index
