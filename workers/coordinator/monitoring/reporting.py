"""What the coordinator shows: records of steps and evaluations, the live status, the summary. Pure: state in, dicts out."""

from __future__ import annotations

from collections import Counter

from workers.coordinator.core import Coordinator
from workers.coordinator.groups.heldout_evaluation import EvaluationResult
from workers.coordinator.monitoring.waiting_reasons import waiting
from workers.coordinator.training.step_records import HeldoutLoss, StepRecord
from workers.coordinator.weights.broadcast_group import Phase
from workers.evaluation.statistics import Judged, figures
from workers.messages.parts import Role, WorkerStatus

MAX_PROMPT, MAX_REFERENCE, MAX_RESPONSE = 1000, 200, 2000
"""Characters of heldout_samples.jsonl: the end of a prompt, the beginnings of the others."""
JUDGE = ("asked", "cached", "calls", "failed", "waiting", "s")


def step_record(coordinator: Coordinator, record: StepRecord, seconds: float, refused: int) -> dict:
    """One line of metrics.jsonl. `seconds` since the run began; counters of tokens are totals so far; `refused`: connections and messages, by the
    coordinator itself."""
    own = {"step": record.step, "seconds": round(seconds, 3)}  # whatever the trainer's metrics are called
    if coordinator.config.supervised:
        return {**own, "response_tokens": record.ages.mean_length,
                "num_samples": record.ages.num_samples, **record.metrics, "tokens_trained": coordinator.totals.tokens_trained,
                "num_set_aside": len(coordinator.ledger.set_aside), "refused": refused} | own
    ages, rollouts = record.ages, coordinator.registry.totals()
    histogram = Counter(ages.head_ages)
    return {
        **own, "reward": ages.mean_reward, "accuracy": ages.mean_score,
        "response_tokens": ages.mean_length, "share_truncated": ages.share_truncated, "num_samples": ages.num_samples,
        "share_no_spread": ages.share_no_spread,
        "lead": round(coordinator.policy.ahead(record.step), 3), "lead_reason": coordinator.lead.reason,
        "held_back": round(record.held_back, 4),
        "staleness_mean": sum(ages.head_ages) / len(ages.head_ages), "staleness_max": max(ages.head_ages),
        "staleness_histogram": {str(age): histogram[age] for age in sorted(histogram)},
        "token_age_mean": ages.mean_token_age, "token_age_max": ages.max_token_age, "share_mixed_versions": ages.share_mixed,
        "groups_rejected": record.sampled.num_rejected, "share_rejected": record.sampled.share_rejected, "accuracy_sampled": record.sampled.accuracy,
        **record.metrics,
        "tokens_trained": coordinator.totals.tokens_trained, "tokens_generated": coordinator.totals.tokens_generated,
        "tokens_interrupted": coordinator.totals.tokens_interrupted, "buffer": len(coordinator.ledger.finished),
        "running": len(coordinator.ledger.running), "concurrency": coordinator.concurrency.limit, "num_set_aside": len(coordinator.ledger.set_aside),
        "num_retries": coordinator.totals.num_retries, "replicas": coordinator.registry.num_ready, "rollout_idle_s": round(rollouts.idle_s, 3),
        "rollout_sample_s": round(rollouts.sample_s, 3), "weight_updates": rollouts.num_updates, "weight_update_s": round(rollouts.update_s, 3),
        **{f"weight_{name}": round(getattr(rollouts, name), 3) for name in ("pause_s", "load_s", "fetch_s")},
        "weight_fetch_bytes": rollouts.fetch_bytes, "weight_fallbacks": rollouts.num_fallbacks, "weight_chunks_refetched": rollouts.num_refetched,
        "engine_restarts": rollouts.num_restarts,
        "reward_busy_s": round(rollouts.reward_busy_s, 3), "reward_wait_s": round(rollouts.rewards_wait_s, 3),
        "refused": refused + rollouts.num_refused + rollouts.num_malformed,
        "rewards_waiting": rollouts.rewards_waiting, "rewards_killed": rollouts.rewards_killed, "rewards_failed": rollouts.rewards_failed,
        **{f"score_{name}": round(score, 6) for name, score in sorted(ages.part_scores.items())},
        **({f"judge_{name}": round(getattr(rollouts, f"judge_{name}"), 3) for name in JUDGE} if rollouts.judge_asked else {}),
    } | own


def evaluation_record(coordinator: Coordinator, result: EvaluationResult, seconds: float) -> dict:
    """One line of evaluations.jsonl; `accuracy` is the mean score (avg@k), `graded` whether some score is neither 0 nor 1; 'avg', 'pass' and 'maj'
    are those of `statistics.figures`."""
    config = coordinator.config.evaluation
    told = figures([Judged(*samples) for samples in result.samples], config.ks, config.confidence) if result.samples else {}
    return {"step": result.step, "seconds": round(seconds, 3), "accuracy": result.accuracy, "reward": result.mean_reward,
            "graded": result.graded,
            "num_prompts": result.num_prompts, "num_failed": result.num_failed, "first_step": result.first_step,
            "last_step": result.last_step, "example": result.example, "temperature": config.temperature, **told}


def samples_record(coordinator: Coordinator, result: EvaluationResult) -> dict:
    """One line of heldout_samples.jsonl: the first held-out prompts with the beginnings of their answers, bounded in size."""
    prompts = coordinator.office.heldout
    return {"step": result.step, "samples": [
        {"prompt_id": prompts[index].id, "prompt": prompts[index].text[-MAX_PROMPT:], "reference": prompts[index].reference[:MAX_REFERENCE],
         "response": text[:MAX_RESPONSE], "score": score} for index, (text, score) in result.shown.items()]}


def heldout_record(coordinator: Coordinator, result: HeldoutLoss, seconds: float) -> dict:
    """One line of a supervised run's evaluations.jsonl."""
    return {"step": result.step, "seconds": round(seconds, 3), "heldout_loss": result.loss, "num_prompts": len(coordinator.office.heldout),
            "num_tokens": result.num_tokens}


def status(coordinator: Coordinator, now: float, seconds: float, wall: float, refused: int, malformed: int) -> dict:
    """status.json: what every part is doing. `seconds` since the run began, pauses left out; `wall`: the time of writing, since 1970;
    `refused`, `malformed`: connections to the coordinator without the run's keys, and messages that cannot be read."""
    state, rollouts = coordinator, coordinator.registry.totals()
    return {
        "time": wall, "kind": state.config.run.kind.value, "epoch": state.epoch, "seconds": round(seconds, 1), "step": max(0, state.training.step),
        "complete": state.ended == "", "num_steps": state.config.run.num_steps, "eta": state.policy.eta, "bound": state.policy.bound.value,
        "lead": round(state.policy.ahead(max(0, state.training.step)), 3), "lead_reason": state.lead.reason,
        "waiting": waiting(state), "buffer": len(state.ledger.finished), "running": len(state.ledger.running),
        "concurrency": state.concurrency.limit, "admitted": state.ledger.admitted, "set_aside": len(state.ledger.set_aside),
        "rejected": state.ledger.num_rejected, "share_rejected": round(state.rejections.share, 4),
        "parked": len(state.ledger.parked), "suspended": state.left or state.drain_reason or ("saving" if state.suspending else ""),
        "replicas_ready": state.registry.num_ready, "min_replicas": state.config.allocation.min_replicas,
        "evaluating": _evaluating(state),
        "tokens_generated": state.totals.tokens_generated, "tokens_trained": state.totals.tokens_trained,
        "tokens_interrupted": state.totals.tokens_interrupted,
        "refused_peers": refused + rollouts.num_refused, "malformed_messages": malformed + rollouts.num_malformed,
        "suspects": [f"{worker.name} on {worker.host}" for worker in map(state.registry.workers.__getitem__, state.registry.suspects)],
        "staleness": {str(age): count for age, count in sorted(state.totals.head_ages.items())},
        "weights": _weights(state, rollouts), "rewards": _rewards(state, rollouts),
        "workers": [
            {"name": worker.name, "host": worker.host, "pid": worker.pid, "version": str(worker.held) if worker.held else "",
             "fetching": str(worker.fetching) if worker.fetching else "", "waiting_for": worker.status.waiting_for,
             "via": worker.status.weights_via, "fallbacks": worker.status.num_fallbacks, "restarts": worker.status.num_restarts,
             "running": worker.status.num_running, "rewards_waiting": worker.status.rewards_waiting,
             "tokens_in_flight": worker.tokens_in_flight, "tokens_generated": worker.status.tokens_generated,
             "silent_s": round(now - worker.last_heard, 1), "job": worker.job, "draining": bool(worker.draining),
             "refused": worker.num_refused}
            for role in Role for worker in state.registry.of(role)
        ],
    }


def _weights(state: Coordinator, rollouts: WorkerStatus) -> dict:
    """How new weights travel: means of the rollout workers' updates in seconds and bytes; what has failed, and why; who loads now."""
    permits, workers = state.delivery.permits, state.registry.workers
    each = {name: getattr(rollouts, name) / max(1, rollouts.num_updates) for name in ("fetch_s", "fetch_bytes", "pause_s", "load_s")}
    return {
        "transport": state.config.weights.transport.value, "failed": dict(state.delivery.fallbacks), "num_updates": rollouts.num_updates,
        "broadcast_to": len(state.broadcasts.group.members.ranks) if state.broadcasts.group.phase is Phase.standing else 0,
        **{name: round(value, 3) for name, value in each.items()}, "num_fallbacks": rollouts.num_fallbacks,
        "num_refetched": rollouts.num_refetched,
        "loading": [workers[peer].name for peer in permits.loading if peer in workers],
        "waiting_to_load": [workers[peer].name for peer in permits.waiting if peer in workers],
    }


def _rewards(state: Coordinator, total: WorkerStatus) -> dict:
    """What judging takes: requests that wait now; seconds that all requests together have waited, and that processes have worked; how many
    requests have their answer, and how many attempts had none in time."""
    return {"placement": state.config.reward.placement.value, "num_elements": len(state.registry.reward_endpoints()),
            "waiting": total.rewards_waiting, "wait_s": round(total.rewards_wait_s, 3), "busy_s": round(total.reward_busy_s, 3),
            "num_killed": total.rewards_killed, "num_failed": total.rewards_failed, "num_late": total.rewards_late, "num_done": total.rewards_done,
            **({"judge": _judge(state, total)} if total.judge_asked else {})}


def _judge(state: Coordinator, total: WorkerStatus) -> dict:
    """What judges were asked, and the last error of one of them."""
    errors = [worker.status.judge_error for worker in state.registry.of(Role.rollout) if worker.status.judge_error]
    return {**{name: getattr(total, f"judge_{name}") for name in JUDGE}, "error": errors[0] if errors else ""}


def _evaluating(state: Coordinator) -> str:
    evaluation = state.evaluation
    return f"{evaluation.num_done}/{evaluation.num_prompts} at step {evaluation.step}" if evaluation.active else ""


def summary(coordinator: Coordinator, evaluations: list[dict], seconds: float) -> dict:
    """summary.json: the figures of the whole run."""
    state = coordinator
    figure = "heldout_loss" if state.config.supervised else "accuracy"
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    before = first[figure] if first and first["step"] == 0 else None
    after = last[figure] if last and last["step"] == state.training.step else None
    common = {
        "name": state.config.run.name, "kind": state.config.run.kind.value, "num_steps": state.totals.num_steps, "seconds": round(seconds, 1),
        "heldout_before": before, "heldout_after": after, "heldout_prompts": len(state.office.heldout),
        "graded": any(record.get("graded", False) for record in evaluations),
        "tokens_trained": state.totals.tokens_trained, "num_set_aside": len(state.ledger.set_aside),
        "ended": state.ended or state.training.early_reason or "all steps done",
        "num_incarnations": state.epoch, "state": "failed" if state.ended else "finished",
    }
    return common if state.config.supervised else common | _rollout_figures(state)


def _rollout_figures(state: Coordinator) -> dict:
    return {
        "eta": state.policy.eta, "bound": state.policy.bound.value, "max_staleness": state.totals.max_staleness,
        "share_stale": round(state.totals.share_stale, 4),
        "staleness_histogram": {str(age): count for age, count in sorted(state.totals.head_ages.items())},
        "tokens_generated": state.totals.tokens_generated, "num_rejected": state.ledger.num_rejected, "num_retries": state.totals.num_retries,
        "num_duplicates": state.totals.num_duplicates,
    }
