"""Whether all ranks call the same collectives in the same order, and every message that is sent is received. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from workers.trainer.fake_device.operators import ALL_TO_ALL, Call


def mismatches(calls: Sequence[Sequence[Call]]) -> list[str]:
    """What does not match in the calls of all ranks, in order of rank; nothing where a step of all of them would come to its end.

    For every group: its ranks' collectives have the same kinds, shapes and dtypes in the same order. For every pair of ranks: what the one sends
    is, in order, what the other receives.
    """
    by_group: dict[tuple[int, ...], dict[int, list]] = defaultdict(lambda: defaultdict(list))
    sent: dict[tuple[int, int], dict[str, list]] = defaultdict(lambda: {"send": [], "receive": []})
    for rank, row in enumerate(calls):
        for kind, ranks, what in row:
            if kind in ("send", "receive"):
                pair = (rank, ranks[1]) if kind == "send" else (ranks[1], rank)
                sent[pair][kind].append(what)
            else:
                by_group[ranks][rank].append((kind, what))
    found = [problem for ranks, rows in sorted(by_group.items()) if (problem := _of_group(ranks, rows))]
    return found + [f"from rank {source} to {target}: {len(both['send'])} messages sent, {len(both['receive'])} received, or of other shapes"
                    for (source, target), both in sorted(sent.items()) if both["send"] != both["receive"]]


def _of_group(ranks: tuple[int, ...], rows: dict[int, list]) -> str:
    """How the first rank that differs from the group's first one does."""
    rows = _dealt_out(ranks, rows)
    expected = rows[ranks[0]]
    for rank in ranks[1:]:
        if rows[rank] != expected:
            at = next((place for place, both in enumerate(zip(rows[rank], expected, strict=False)) if both[0] != both[1]),
                      min(len(rows[rank]), len(expected)))
            return (f"ranks {ranks}: call {at} of rank {rank} is {_at(rows[rank], at)}, of rank {ranks[0]} {_at(expected, at)} "
                    f"({len(rows[rank])} and {len(expected)} calls)")
    return ""


def _dealt_out(ranks: tuple[int, ...], rows: dict[int, list]) -> dict[int, list]:
    """Each all-to-all as everybody ought to see it: with all that is sent, by sender and receiver. A rank that expects something else has that."""
    seen: dict[int, list] = {}
    for place, rank in enumerate(ranks):
        seen[rank] = []
        for number, (kind, what) in enumerate(rows[rank]):
            others = [rows[other][number] for other in ranks if len(rows[other]) > number]
            if kind == ALL_TO_ALL and len(others) == len(ranks) and all(other[0] == kind for other in others):
                sent = [other[1][0][0] for other in others]
                fits = what[1][0] == tuple(row[place] for row in sent)
                what = (*map(tuple, sent), what[2]) if fits else what
            seen[rank].append((kind, what))
    return seen


def _at(calls: list, place: int) -> str:
    return str(calls[place]) if place < len(calls) else "not there"
