"""A run with evaluation.enabled=false: no held-out prompt is ever leased, nothing waits for an evaluation, and the last step ends it."""

from __future__ import annotations

from tests.unit.workers.coordinator.test_core import TRAINER, Play, leases, only
from workers.coordinator.monitoring import reporting
from workers.coordinator.training.step_records import StepRecord
from workers.messages.from_coordinator import Batch
from workers.messages.from_worker import BatchRequest
from workers.messages.parts import Purpose


def test_a_run_without_evaluation_is_over_with_its_last_step() -> None:
    play = Play(evaluation__enabled=False, staleness__eta=0)
    granted = play.begin()
    assert [lease.purpose for lease in granted] == [Purpose.training] * 2
    for step in range(2):
        play.tell(TRAINER, BatchRequest(step))
        sent = [message for lease in granted for message in play.finish(lease, step)]
        assert len(only(sent, Batch)) == 1, "no evaluation holds it back"
        assert play.core.ended is None
        granted = leases(play.publish(step + 1))
        assert all(lease.purpose is Purpose.training for lease in granted)
    assert play.core.ended == "" and not play.core.evaluation.active
    assert [type(record) for record in play.core.training.records] == [StepRecord] * 2
    summary = reporting.summary(play.core, [], 1.0)
    assert (summary["state"], summary["heldout_before"], summary["heldout_after"]) == ("finished", None, None)
