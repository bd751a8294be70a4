"""The figures of a rollout worker that go with its heartbeats."""

from __future__ import annotations

from workers.messages.parts import WorkerStatus
from workers.reward.rewards import Rewards
from workers.rollout.engines.engine_pool import Engines
from workers.rollout.leases.lease_runner import LeaseRunner
from workers.rollout.weights.fetch import WeightFetch
from workers.rollout.weights.updates import WeightHolder


def worker_status(leaving: bool, leases: LeaseRunner, engines: Engines, holder: WeightHolder, fetch: WeightFetch,
                  rewards: Rewards) -> WorkerStatus:
    """What the parts of a worker count, as the coordinator is told it; `leaving`: it has been told to go."""
    waits = engines.waiting_for or fetch.waiting_for or rewards.waiting_for
    idle = "weights" if engines.held is None else "" if leases.num_running else "leases"
    judge = rewards.judge
    return WorkerStatus(
        waiting_for="its results to be taken" if leaving else waits or idle,
        num_running=leases.num_running, tokens_generated=leases.tokens_generated, idle_s=leases.idle_s, sample_s=leases.count_sample_s(),
        num_updates=holder.num_updates, update_s=engines.mean("update_s"), pause_s=engines.mean("pause_s"), load_s=engines.mean("load_s"),
        num_restarts=sum(engine.num_restarts for engine in engines.engines), fetch_s=fetch.fetch_s,
        weights_via="nccl" if holder.by_broadcast else fetch.via,
        fetch_bytes=fetch.fetch_bytes, num_fallbacks=fetch.num_fallbacks, num_refetched=fetch.num_refetched,
        reward_busy_s=rewards.busy_s, rewards_killed=rewards.num_killed, rewards_failed=rewards.num_failed,
        rewards_late=rewards.num_late, rewards_done=rewards.num_scored + rewards.num_executed,
        rewards_waiting=rewards.num_waiting, rewards_wait_s=rewards.wait_s,
        judge_asked=judge.num_asked, judge_cached=judge.num_cached, judge_calls=judge.num_calls, judge_failed=judge.num_failed,
        judge_waiting=judge.num_waiting, judge_s=judge.asked_s, judge_error=judge.error[:1000],
        num_refused=fetch.refused[0], num_malformed=fetch.refused[1])
