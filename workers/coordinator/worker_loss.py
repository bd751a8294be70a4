"""What follows when a worker is gone, or brings back what nobody can take. Pure.

    rollout worker   its leases go to others. On one machine the run ends where too few are left; on SLURM others come, and it
                     ends where they all fail
    reward element   what it was asked goes to others; on one machine the run ends where none is left
    trainer, leader  on SLURM this incarnation goes and another one comes; on one machine the run ends
"""

from __future__ import annotations

from workers.coordinator.state import State
from workers.coordinator.worker_registry import SUSPECT_AFTER, Worker
from workers.messages.parts import Role


def follow_up(state: State, worker: Worker, cause: str = "", in_order: bool = False) -> None:
    """`worker` has been taken out of the registry; `cause`: why, '' where it said Goodbye without a reason; `in_order`: it gave one."""
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
        _count_failures(state, cause)
    elif worker.role is Role.reward:
        if not state.registry.number(Role.reward):
            state.end(f"{cause}. No reward element is left (reward.placement=array)")
    elif state.registry.number(Role.rollout) < state.config.allocation.min_replicas:
        state.end(f"{cause}. Fewer rollout workers are left than allocation.min_replicas={state.config.allocation.min_replicas}")


def refused(state: State, worker: Worker, why: str) -> None:
    """A result of `worker` was refused. Who brings back such results again and again has all leases taken away, as long as there are others: too many
    failures in a row would end the run."""
    state.registry.changed[worker.peer] = None
    if notice := worker.refused(why):
        state.delivery.notices.append(notice)
    if worker.refused_in_a_row == SUSPECT_AFTER and not all(other.suspect for other in state.registry.ready()):
        state.totals.num_retries += state.ledger.release(worker.peer) + state.evaluation.release(worker.peer)


def _trainer_departed(state: State, cause: str, in_order: bool) -> None:
    if in_order or state.replaceable:
        state.left, state.left_in_order = cause, in_order
    else:
        state.end(cause)


def _count_failures(state: State, cause: str) -> None:
    others = state.registry.number(Role.rollout) + state.registry.number(Role.reward)
    limit = state.config.cluster.max_consecutive_crashes * (1 + others)
    if state.failed_workers >= limit:
        who = "rollout workers or reward elements" if state.config.rewards_apart else "rollout workers"
        state.end(f"{state.failed_workers} {who} in a row have failed without a finished group; the last one: {cause}")
