"""`python -m workers.coordinator.process.replay_run RUN`, which `headway replay` starts: the journal of a run through the same code; prints JSON.

    {"inputs", "points", "parts", "incarnations", "notes", "difference", "findings", "status", "place", "moved"}

`difference`: the first one, '' where all is as it was. `findings`: of the audit, null without --check. `status`: as in status.json, at the place
asked for, or at the end; `moved`: the input after which nothing moved any more.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from workers.coordinator.core import Coordinator
from workers.coordinator.monitoring import reporting
from workers.coordinator.process import journal_files
from workers.coordinator.recording.auditing import Auditor
from workers.coordinator.recording.journal import JournalError
from workers.coordinator.recording.replaying import Difference, Replay, Step, describe
from workers.run.folder import RunFolder


@dataclass
class Replayed:
    """What a replay has shown; see above."""

    replay: Replay
    parts: int = 0
    incarnations: list[int] = field(default_factory=list)
    difference: str = ""
    findings: list[str] | None = None
    status: dict | None = None
    place: str = ""
    moved: dict | None = None

    @property
    def sound(self) -> bool:
        """Whether all is as it was, and every invariant holds."""
        return not self.difference and not self.findings

    def as_dict(self) -> dict:
        """For JSON."""
        return {name: getattr(self, name) for name in ("parts", "incarnations", "difference", "findings", "status", "place", "moved")} | {
            "inputs": self.replay.num_inputs, "points": self.replay.num_points, "notes": self.replay.notes}


def replay(run: RunFolder, at_step: int | None = None, until: float | None = None, stall: bool = False, check: bool = False) -> Replayed:
    """The whole journal of a run, or as far as `until` (seconds since 1970), or with the state when `at_step` was finished (the last time).
    `stall`: find what moved last. `check`: audit on the way. Raises `OSError`."""
    played = Replay(journal_files.code()) if until is None else Replay(journal_files.code(), until)
    told, auditor, last, shown = Replayed(played), Auditor() if check else None, None, None
    try:
        for part in journal_files.parts(run):
            told.parts += 1
            for step in played.play(journal_files.records_of(part)):
                if auditor is not None:
                    auditor.look(step)
                if at_step is not None and step.core.training.step == at_step and shown != (shown := (step.core.epoch, at_step)):
                    _show(told)
                elif step.core.training.step != at_step:
                    shown = None
                if stall and last != (last := _progress(step.core)):
                    told.moved = _moved(told, step)
                if step.core.epoch not in told.incarnations:
                    told.incarnations.append(step.core.epoch)
    except (Difference, JournalError) as error:
        told.difference = str(error)
    if at_step is None and played.core is not None:
        _show(told)
    if auditor is not None:
        told.findings = auditor.findings
        played.notes += auditor.notes
    return told


def audit(run: RunFolder) -> Replayed:
    """Whether a run's journal, over all its incarnations, is replayed to the same states, and every invariant holds. Raises `OSError`."""
    return replay(run, check=True)


def _show(told: Replayed) -> None:
    played, core = told.replay, told.replay.core
    assert core is not None
    told.place = played.place
    told.status = reporting.status(core, played.now, played.seconds(played.now), played.wall(played.now), 0, 0)


def _progress(core: Coordinator) -> tuple[int, ...]:
    ledger = core.ledger
    return core.epoch, core.training.step, ledger.num_finished, ledger.num_rejected, core.evaluation.num_done, core.totals.num_evaluations


def _moved(told: Replayed, step: Step) -> dict:
    return {"place": told.replay.place, "input": "the beginning" if step.given is None else describe(step.given), "wall": step.wall}


def main() -> int:
    """Exit status 0 if all is as it was, 1 where it is not, 2 where there is nothing to replay."""
    parser = argparse.ArgumentParser(prog="python -m workers.coordinator.process.replay_run")
    parser.add_argument("run", type=Path)
    parser.add_argument("--at-step", type=int)
    parser.add_argument("--until", type=float)
    parser.add_argument("--until-stall", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    told = replay(RunFolder(options.run), options.at_step, options.until, options.until_stall, options.check)
    print(json.dumps(told.as_dict()))
    return 2 if not told.parts else 0 if told.sound else 1


if __name__ == "__main__":
    sys.exit(main())
