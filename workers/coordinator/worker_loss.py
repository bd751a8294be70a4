"""What follows when a worker is gone, fails, or brings back what nobody can take. Pure.

    rollout worker   its leases go to others. On one machine the run ends where too few are left; on SLURM others come, and it
                     ends where they all fail
    failing groups   others get its leases, and what failed there is tried again by others; the run ends where groups fail in a
                     row at workers that are not suspect, or at all of them
    reward element   what it was asked goes to others; on one machine the run ends where none is left
    trainer, leader  on SLURM this incarnation goes and another one comes; on one machine the run ends
"""

from __future__ import annotations

from workers.coordinator.groups.group_states import index_of
from workers.coordinator.groups.results import Answer
from workers.coordinator.registered_worker import Worker
from workers.coordinator.state import State
from workers.messages.from_worker import GroupFailed
from workers.messages.parts import Role

NUM_SAID = 8
"""So many groups that are set aside are named in the log each; of more, every one that doubles their number."""


def follow_up(state: State, worker: Worker, cause: str = "", in_order: bool = False, failed: bool = False) -> None:
    """`worker` has been taken out of the registry; `cause`: why, '' where it said Goodbye without a reason; `in_order`: it gave one; `failed`: it has
    said itself that it cannot work."""
    state.totals.num_retries += state.ledger.release(worker.peer) + state.evaluation.release(worker.peer)
    state.delivery.lost(worker)
    state.outbox += state.broadcasts.lost(worker)
    if state.ended == "" and cause and worker.role is Role.trainer:
        state.ended = cause  # complete, but the trained model could not be exported
    if state.ended is not None or state.left is not None:
        return
    if worker.role is Role.trainer_shard and (in_order or state.training.num_shares == 1):
        return  # the trainer has told it to, and goes itself when it is done; or there is only one copy of the model, and it was none of it
    cause = cause or f"{worker.name} left before the run was over"
    if worker.role in (Role.trainer, Role.trainer_shard):  # training needs all its ranks
        _trainer_departed(state, cause, in_order)
    elif state.drain_reason:
        if not state.registry.number(Role.rollout):
            state.drain_trainer()
    elif state.replaceable:
        if not in_order:
            state.notices.append(cause)
        if failed:
            _count_failures(state, cause)
    elif worker.role is Role.reward:
        if not state.registry.number(Role.reward):
            state.end(f"{cause}. No reward element is left (reward.placement=array)")
    elif state.registry.number(Role.rollout) < state.config.allocation.min_replicas:
        state.end(f"{cause}. Fewer rollout workers are left than allocation.min_replicas={state.config.allocation.min_replicas}")


def went_wrong(state: State, worker: Worker, answer: Answer, now: float) -> None:
    """A group failed at `worker`, or its result was refused. Who is suspect by that gets no leases, as long as there are others, and whose
    results are refused has all taken away. What it says of the run is then nothing: too many failures in a row would end that."""
    failure, refused = answer.failure, answer.refused
    worker.num_refused += bool(refused)
    why = refused or (failure.cause if failure is not None and not failure.fatal else "")
    if why:
        if notice := state.registry.failed(worker, why, now):
            state.notices.append(notice)
        if refused and worker.suspect and state.registry.has_others(worker):
            state.totals.num_retries += state.ledger.release(worker.peer) + state.evaluation.release(worker.peer)
    if failure is None:
        return
    _tell_set_aside(state, failure)
    others = state.registry.has_others(worker)
    if not (worker.suspect and others) and (cause := state.results.count(failure, again=worker.failed_in_a_row > 1 and others)):
        state.end(cause)


def _tell_set_aside(state: State, failure: GroupFailed) -> None:
    number = len(state.ledger.set_aside)
    if not failure.group_id.startswith("g") or (index := index_of(failure.group_id)) not in state.ledger.set_aside:
        return
    if number <= NUM_SAID or not number & (number - 1):
        state.notices.append(f"group {failure.group_id} (prompt {state.office.prompts.train(index).id!r}) is set aside, the {number}. of the run, "
                             f"because: {failure.cause}")


def _trainer_departed(state: State, cause: str, in_order: bool) -> None:
    if in_order or state.replaceable:
        state.left, state.left_in_order = cause, in_order
    else:
        state.end(cause)


def _count_failures(state: State, cause: str) -> None:
    state.failed_workers += 1
    others = state.registry.number(Role.rollout) + state.registry.number(Role.reward)
    limit = state.config.cluster.max_consecutive_crashes * (1 + others)
    if state.failed_workers >= limit:
        who = "rollout workers or reward elements" if state.config.rewards_apart else "rollout workers"
        state.end(f"{state.failed_workers} {who} in a row have failed without a finished group; the last one: {cause}")
