"""`python -m workers.coordinator.process.trace_run RUN FILE`, which `headway trace` starts: the journal of a run as a trace, in Chrome's format.

    journal parts --replay--> recording/tracing.py --trace_events--> FILE (gzip where it ends in .gz); what is in it, as JSON, on standard output
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workers.coordinator.process import journal_files
from workers.coordinator.recording.journal import JournalError
from workers.coordinator.recording.replaying import Difference, Replay
from workers.coordinator.recording.tracing import LEASES, Span, Tracer, trace_events
from workers.run.folder import RunFolder


def traced(run: RunFolder, first: int, last: float, share: float) -> tuple[Tracer, dict[str, Any]]:
    """What happened from the finishing of step `first` to that of step `last`, with a `share` of the leases; and what there is to say of it."""
    replay, tracer, trouble = Replay(journal_files.code()), Tracer(), ""
    parts, steps, before, began, ended = 0, list[int](), math.inf, math.inf, -math.inf
    try:
        for part in journal_files.parts(run):
            parts += 1
            for step in replay.play(journal_files.records_of(part)):
                tracer.look(step)
                now = step.core.training.step
                steps = [min([*steps, now]), now]
                if now >= first and (now < last or before < last):  # the finishing of `last` itself belongs to it, what follows does not
                    began, ended = min(began, step.wall), max(ended, step.wall)
                before = now
    except (Difference, JournalError, OSError) as error:
        trouble = str(error)
    tracer.end(ended)
    within = [span for span in tracer.spans if span.end > began and span.begin < ended and _sampled(span, share)]
    tracer.spans, tracer.counts = within, [count for count in tracer.counts if began <= count.at <= ended]
    return tracer, {"parts": parts, "steps": steps, "trouble": trouble, "notes": replay.notes, "spans": len(within),
                    "seconds": max(0.0, ended - began) if parts else 0.0}


def _sampled(span: Span, share: float) -> bool:
    return span.kind != LEASES or zlib.crc32(span.name.encode()) < share * 2**32


def write(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write a trace file, an event a line. Raises OSError."""
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write("\n]}\n")


def main() -> int:
    """Exit status 0 if the trace was written, 1 if the journal could not be replayed to its end (what came before is), 2 without any journal."""
    parser = argparse.ArgumentParser(prog="python -m workers.coordinator.process.trace_run")
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--first", type=int, default=-1)
    parser.add_argument("--last", type=float, default=math.inf)
    parser.add_argument("--share", type=float, default=1.0)
    options = parser.parse_args()
    tracer, told = traced(RunFolder(options.run), options.first, options.last, options.share)
    if told["spans"]:
        aside = options.file.with_name(f".{options.file.name}")
        try:
            write(aside, trace_events(tracer.spans, tracer.counts))
            aside.replace(options.file)
        except OSError as error:
            aside.unlink(missing_ok=True)
            print(f"headway: {options.file}: cannot be written ({error.strerror}). Give another file with --out", file=sys.stderr)
            return 1
    print(json.dumps(told))
    return 2 if not told["parts"] else 1 if told["trouble"] else 0


if __name__ == "__main__":
    sys.exit(main())
