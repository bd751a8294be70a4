"""What each part of a run waits for, in words for people. Pure."""

from __future__ import annotations

from workers.coordinator.state import State
from workers.messages.parts import Role


def waiting(state: State) -> dict[str, str]:
    """What rollout workers and trainer wait for; '' where they work."""
    rollouts, trainers = state.registry.of(Role.rollout), state.registry.of(Role.trainer)
    if state.config.supervised:
        started = trainers and state.training.announcement is not None
        return {"trainer": "" if started else "its start"}
    if state.training.announcement is None:
        return {"rollout": "the starting weights", "trainer": "" if trainers else "its start"}
    if state.suspending or state.drain_reason:
        saves = "its state to be saved" if state.trainer_told else "rollout workers to give back their leases"
        return {"rollout": "the pause of the run", "trainer": "" if state.suspending else saves}
    if not rollouts:
        idle = state.training.trainer_waits or state.training.is_over
        return {"rollout": f"a rollout worker to start{_gone(state, Role.rollout)}", "trainer": "rollouts" if idle else ""}
    return {"rollout": _rollout(state), "trainer": _trainer(state)}


def stalled(state: State) -> str:
    """What a run waits for in which nothing moves, and what to do if it is only slow."""
    waits = "; ".join(f"{part} waits for {what}" for part, what in waiting(state).items() if what)
    return f"{waits or f'the trainer is in step {state.training.step + 1}'}. If it is slow and not stuck: headway resume RUN run.stall_minutes=..."


def _trainer(state: State) -> str:
    finished, needed = len(state.ledger.finished), state.policy.batch_groups
    if state.training.is_over:
        return f"the last evaluation{_late(state)}"
    if not state.training.trainer_waits:
        return ""
    if state.training.first_evaluation_runs:
        return f"the first evaluation{_late(state)}"
    ready, minimum = state.registry.num_ready, state.config.allocation.min_replicas
    if not state.training.enough_replicas:
        return f"rollout workers: {ready} of {minimum} are ready (allocation.min_replicas){_gone(state, Role.rollout)}"
    if Role.reward in state.lacking:
        return f"a reward element to start (reward.placement=array){_gone(state, Role.reward)}"
    if finished >= needed:
        return "stragglers with an earlier deadline (staleness.bound=hard)"
    return f"a batch: {finished} of {needed} groups finished" + _rejected(state) + _late(state)


def _gone(state: State, role: Role) -> str:
    """Why no element of the role is to come, where SLURM has said that none is."""
    return f"; {state.gone[role]}" if role in state.gone and role in state.lacking else ""


def _late(state: State) -> str:
    """That verifiers hang, or take too long; how often stands with the rewards."""
    late = any(worker.status.rewards_late for role in (Role.rollout, Role.reward) for worker in state.registry.of(role))
    return f"; verifiers have given no answer within reward.timeout_s={state.config.reward.timeout_s:g}" if late else ""


def _rejected(state: State) -> str:
    share, keep = state.rejections.share, state.config.workflow.keep
    return f"; {share:.0%} of the last {len(state.rejections.window)} were rejected (workflow.keep={keep})" if share else ""


def _rollout(state: State) -> str:
    training, registry = state.training, state.registry
    if registry.suspects and registry.num_ready <= len(registry.suspects) and not (state.ledger.running or state.evaluation.running):
        return "another rollout worker, as groups fail one after the other where weights are loaded (see jobs/coordinator.log)"
    if state.evaluation.active or state.ledger.running or (not training.is_over and state.office.may_train(training.step)):
        return ""
    if training.is_over:
        return "the end of the run"
    policy, grows = state.policy, training.step < state.policy.warmup_steps
    allowed = f", {policy.ahead(training.step):.2g} allowed by divergence" if state.lead.controlled else ""
    return f"the trainer: the staleness limit (eta={policy.eta}{f', growing until step {policy.warmup_steps}' if grows else ''}{allowed}) is reached"
