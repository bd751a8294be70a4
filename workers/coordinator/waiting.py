"""What each part of a run waits for, in words for people. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.messages.types import Role

if TYPE_CHECKING:
    from workers.coordinator.core import Coordinator


def waiting(state: Coordinator) -> dict[str, str]:
    """What rollout workers and trainer wait for; '' where they work."""
    rollouts, trainers = state.registry.of(Role.rollout), state.registry.of(Role.trainer)
    if state.announcement is None:
        return {"rollout": "the starting weights", "trainer": "" if trainers else "its start"}
    if not rollouts:
        return {"rollout": "a rollout worker to start", "trainer": "rollouts"}
    return {"rollout": _rollout(state), "trainer": _trainer(state)}


def _trainer(state: Coordinator) -> str:
    finished, needed = len(state.ledger.finished), state.policy.batch_groups
    if state.training_is_over:
        return "the last evaluation"
    if state.asking is None:
        return ""
    if state.first_evaluation_runs:
        return "the first evaluation"
    if finished >= needed:
        return "stragglers with an earlier deadline (staleness.bound=hard)"
    return f"a batch: {finished} of {needed} groups finished"


def _rollout(state: Coordinator) -> str:
    if state.evaluation.active or state.ledger.running or (not state.training_is_over and state.office.may_train(state.step)):
        return ""
    return "the end of the run" if state.training_is_over else f"the trainer: the staleness limit (eta={state.policy.eta}) is reached"
