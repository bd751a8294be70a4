"""Writes what has been finished: steps to metrics.jsonl and TensorBoard, with what they mean for the alarms; evaluations; consumed prompts; the
groups that are kept to be read."""

from __future__ import annotations

from workers.coordinator.groups.heldout_evaluation import EvaluationResult
from workers.coordinator.monitoring import reporting
from workers.coordinator.monitoring.alarm_state import Health
from workers.coordinator.process.kept_rollouts import KeptRollouts
from workers.coordinator.process.machine import Machine
from workers.coordinator.snapshot import Snapshot
from workers.coordinator.training.step_records import HeldoutLoss, Record, StepRecord
from workers.metrics.recorder import Recorder
from workers.run.files import read_lines
from workers.run.folder import RunFolder


class RunRecords:
    """The records of `run` from `snapshot` on, or from its beginning; `evaluations`: all lines of evaluations.jsonl."""

    def __init__(self, run: RunFolder, machine: Machine, snapshot: Snapshot | None) -> None:
        self._run, self._machine, self._core = run, machine, machine.core
        self._recorder = Recorder(run, snapshot.positions, snapshot.step) if snapshot else Recorder(run)
        self.evaluations = read_lines(run.evaluations)
        self.health = Health(machine.core.config)
        self.health.resume(read_lines(run.metrics))
        self.rollouts = KeptRollouts(run, machine.core, snapshot.step if snapshot else None, {line["step"] for line in self.evaluations})

    @property
    def num_held(self) -> int:
        """Lines that are not on disk yet."""
        return self._recorder.num_held

    def positions(self) -> dict[str, int]:
        """What a checkpoint notes: the length of each file, in bytes. Raises OSError where they do not hold everything."""
        self.rollouts.flush()
        return self._recorder.positions()

    def write(self, seconds: float, refused: int) -> None:
        """Write finished steps and evaluations, unless another incarnation has taken over. `seconds`: since the run began; `refused`: connections and
        messages, by this coordinator. Raises OSError; what is not written is held until the next call."""
        for group in self._machine.take_heldout():
            self.rollouts.take(group)
        if not (self._machine.records or self._recorder.num_held):
            return
        ours = self._run.newest_epoch() == self._core.epoch
        records = self._machine.take_records()
        if ours:
            self._take(records, seconds, refused)
            self._recorder.write()

    def close(self) -> None:
        """Write what is held, if that can be, and close."""
        self._recorder.close()
        self.rollouts.close()

    def _take(self, records: list[Record], seconds: float, refused: int) -> None:
        for record in records:
            match record:
                case StepRecord():
                    self._write_step(reporting.step_record(self._core, record, seconds, refused))
                    self._recorder.consumed(record.step - 1, record.consumed)
                case HeldoutLoss():
                    self._evaluated(reporting.heldout_record(self._core, record, seconds))
                case EvaluationResult():
                    self._evaluated(reporting.evaluation_record(self._core, record, seconds))
                    self._recorder.samples(reporting.samples_record(self._core, record))
            self.rollouts.take(record)

    def _evaluated(self, line: dict) -> None:
        self.evaluations.append(line)
        self._recorder.evaluation(line)

    def _write_step(self, record: dict) -> None:
        """Write a step with what it means for the alarms; one that is to end the run does."""
        changes = self.health.step(record)
        for change in changes:
            print(change, flush=True)
        self._recorder.step(record | self.health.metrics | ({"alarm_changes": changes} if changes else {}))
        if cause := self.health.cause:
            self._machine.end(cause)
