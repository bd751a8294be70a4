"""What a run folder holds, read for a report: whatever is missing, cut off or broken is left out, and `trouble` says so.

A report must be had of runs that failed, that have just begun, and that an older version of Headway has written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launcher.jobs.run_state import TO_COME, state
from launcher.slurm.accounting import last_sign, newest_checkpoint
from workers.run import incarnations
from workers.run.folder import RunFolder, RunFolderError
from workers.run.incarnations import Incarnation


@dataclass(frozen=True)
class Record:
    """One run. `config` is flat ('a.b': 1); `steps` ascend; `result`: of an evaluation alone; `seen_at`: when a run that is gone last gave a sign;
    `trouble`: what could not be read, a line each."""

    path: Path
    config: dict[str, object]
    config_text: str
    steps: list[dict]
    evaluations: list[dict]
    samples: list[dict]
    result: dict
    summary: dict
    lives: list[Incarnation]
    state: str
    cause: str
    ended_at: float | None
    seen_at: float | None
    trouble: tuple[str, ...]

    @property
    def supervised(self) -> bool:
        """Whether the run learns from answers, and its held-out figure is a loss."""
        return self.config.get("run.kind") == "supervised"

    @property
    def figure(self) -> str:
        """The key of the held-out figure in `evaluations`."""
        return "heldout_loss" if self.supervised else "accuracy"

    @property
    def figure_name(self) -> str:
        """What it is called: an accuracy where every score is 0 or 1."""
        if self.supervised:
            return "held-out loss"
        return "held-out score" if any(evaluation.get("graded") for evaluation in self.evaluations) else "held-out accuracy"

    @property
    def more_to_come(self) -> bool:
        """Whether it goes on by itself."""
        return self.state in TO_COME

    def wall_s(self, now: float) -> float | None:
        """Seconds from its beginning to its end, to its last sign if it is gone, else to `now` (since 1970); None before it has begun."""
        end = self.ended_at if self.ended_at is not None else self.seen_at if self.seen_at is not None else now
        return max(0.0, end - self.lives[0].claim.time) if self.lives else None

    def text(self, key: str) -> str:
        """The value of a config key, for people; '' without one."""
        value = self.config.get(key)
        return "" if value is None else str(value)


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 else None


def flat(config: dict, prefix: str = "") -> dict[str, object]:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    result: dict[str, object] = {}
    for key, value in config.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result


def read(run: RunFolder, samples: bool = True) -> Record:
    """The run as it stands in its folder, with or without the `samples` of its evaluations. Raises `RunFolderError` where there is no config to
    go by."""
    trouble: list[str] = []
    config = _object(run.config, trouble)
    if config is None:
        why = "; ".join(trouble) or "there is none"
        raise RunFolderError(f"{run.config}: not a readable run config ({why}). Give the folder that the launcher printed")
    outcome, summary = _object(run.outcome, trouble) or {}, _object(run.summary, trouble) or {}
    stands = _state(run, outcome, trouble)
    steps = {step: line for line in _lines(run.metrics, trouble) if (step := number(line.get("step"))) is not None}
    return Record(
        path=run.path, config=flat(config), config_text=_config_text(run), steps=[steps[step] for step in sorted(steps)],
        evaluations=_lines(run.evaluations, trouble), samples=_lines(run.heldout_samples, trouble) if samples else [],
        result=_object(run.evaluation_result, trouble) or {}, summary=summary,
        lives=_lives(run, trouble), state=stands, cause=_cause(outcome, summary), ended_at=number(outcome.get("time")),
        seen_at=_seen_at(run, trouble) if stands == "gone" else None, trouble=tuple(trouble))


def _object(path: Path, trouble: list[str]) -> dict | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        trouble.append(f"{path.name}: cannot be read ({error})")
        return None
    if not isinstance(found, dict):
        trouble.append(f"{path.name}: is no JSON object")
        return None
    return found


def _lines(path: Path, trouble: list[str]) -> list[dict]:
    """The JSON objects of a file, a line each. A last line without its end is just being written, or was cut off, and does not count."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        trouble.append(f"{path.name}: cannot be read ({error})")
        return []
    found, num_broken = [], 0
    for line in content.split(b"\n")[:-1]:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            found.append(entry)
        else:
            num_broken += 1
    if num_broken:
        trouble.append(f"{path.name}: {num_broken} line(s) cannot be read, and are left out")
    return found


def _lives(run: RunFolder, trouble: list[str]) -> list[Incarnation]:
    try:
        return incarnations.history(run)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        trouble.append(f"epochs/: cannot be read ({error})")
        return []


def _state(run: RunFolder, outcome: dict, trouble: list[str]) -> str:
    try:
        return state(run, outcome)
    except (OSError, ValueError, KeyError, TypeError) as error:
        trouble.append(f"what of it lives cannot be told ({error})")
        return "?"


def _seen_at(run: RunFolder, trouble: list[str]) -> float | None:
    try:
        return last_sign(run, newest_checkpoint(run)) or None
    except (OSError, ValueError, KeyError) as error:
        trouble.append(f"when it was last seen cannot be told ({error})")
        return None


def _cause(outcome: dict, summary: dict) -> str:
    """Why it ended: the outcome's cause, or of a complete run the summary's word."""
    return str(outcome.get("cause") or summary.get("ended") or "all steps done") if outcome else ""


def _config_text(run: RunFolder) -> str:
    path = run.config_yaml if run.config_yaml.is_file() else run.config
    return path.read_text(errors="replace")
