"""Rewards in a job array of their own (reward.placement=array): what is submitted, what keeps it going, and what the coordinator says of it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from launcher.config.cluster import ROLES
from launcher.config.sbatch_options import check_options
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import JobSpec, job_specs
from launcher.jobs.sbatch_script import sbatch_options
from launcher.jobs.submit import describe
from launcher.memory.fit import _rewards
from launcher.monitoring.observation import Observation
from launcher.monitoring.supervisor_policy import HELD_S, SETTLE_S, Release, Situation, Submit, SupervisorPolicy
from launcher.views.run_view import panel
from tests.unit.launcher.monitoring.test_supervisor_policy import entry
from tests.unit.workers.coordinator.test_core import ROLLOUT, TRAINER, Play, only
from workers.config import AllocationConfig, ClusterKind, ConfigError, Placement, RunKind
from workers.coordinator.monitoring.reporting import status
from workers.coordinator.monitoring.waiting_reasons import waiting
from workers.entry import Element
from workers.messages.from_coordinator import RewardElements
from workers.messages.from_worker import BatchRequest, Draining, Goodbye, Heartbeat, Register, WorkerFailed
from workers.messages.parts import Role, WorkerStatus
from workers.run.folder import RunFolder

RUN = RunFolder(Path("/runs/x"))
REWARDS = (b"reward 0", b"reward 1")


def config(kind: ClusterKind = ClusterKind.slurm, **reward: object) -> FullConfig:
    full = FullConfig(allocation=AllocationConfig(num_devices=4))
    full.model.path = "/model"
    full.cluster.kind = kind
    for role in ROLES:
        full.cluster.role(role).time = "60"
    full.reward.placement, full.reward.num_elements, full.reward.num_processes = Placement.array, 3, 5
    for name, value in reward.items():
        setattr(full.reward, name, value)
    full.settle()
    full.check()
    return full


def reward_spec(full: FullConfig) -> JobSpec:
    return next(spec for spec in job_specs(full.plan(), full, RUN) if spec.role == "reward")


# -- what is submitted -----------------------------------------------------------------------------------------------------

def test_the_array_has_its_own_shape() -> None:
    full = config()
    assert [spec.role for spec in job_specs(full.plan(), full, RUN)] == list(full.roles) == ["inference", "reward", "train"]
    spec = reward_spec(full)
    assert (spec.throttle, spec.nodes_per_element, spec.tasks_per_node, spec.devices_per_element) == (3, 1, 1, 0)
    assert spec.num_elements == 3 * spec.num_chunks and spec.element == Element("reward", "/runs/x")
    options = sbatch_options(spec, full.cluster.reward)
    assert options["cpus-per-task"] == "5" and not {"gres", "gpus-per-node", "gpus-per-task"} & options.keys()
    assert f"{spec.num_elements} element(s) x 5 process(es), 3 at a time" in spec.describe()


@pytest.mark.parametrize("changes", [{"placement": Placement.node}, {}])
def test_without_it_there_is_no_such_array(changes: dict) -> None:
    full = config(**changes)
    if not changes:
        full.run.kind = RunKind.supervised
    assert "reward" not in full.roles
    assert "reward" not in [spec.role for spec in job_specs(full.plan(), full, RUN)]


def test_a_dry_run_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    full = config()
    full.cluster.reward.partition, full.cluster.reward.mem = "cpu", "8G"
    told = describe(reward_spec(full), full, RUN)
    for line in ("#SBATCH --partition=cpu", "#SBATCH --mem=8G", "#SBATCH --cpus-per-task=5", "#SBATCH --requeue", "%3"):
        assert line in told
    assert "gres" not in told
    here = config(ClusterKind.local)
    assert describe(reward_spec(here), here, RUN).count("submitit.core._submit") == 3


@pytest.mark.parametrize(("key", "value", "words"), [
    ("gpus", "gres", "cluster.reward.gpus='gres': must be none"), ("time", "", "cluster.reward.time=''"),
    ("devices_per_node", 8, "cluster.reward.devices_per_node=8: must be 0")])
def test_what_cannot_be_submitted_is_refused(key: str, value: object, words: str) -> None:
    full = config()
    setattr(full.cluster.reward, key, type(getattr(full.cluster.reward, key))(value))
    with pytest.raises(ConfigError, match=words):
        full.check()
    full.reward.placement = Placement.node
    full.check()


def test_jobs_that_would_judge_nothing_are_refused() -> None:
    full = config()
    full.workflow.name = "shell_agent"
    with pytest.raises(ConfigError, match="reward.placement='array': must be node with workflow=shell_agent"):
        full.check()
    full.reward.placement = Placement.node
    full.check()


def test_options_that_are_not_its_own_are_refused() -> None:
    full = config()
    full.cluster.reward.sbatch["array"] = "0-3"
    with pytest.raises(ConfigError, match="cluster.reward.sbatch.array"):
        check_options(full.cluster, roles=full.roles)


def test_processes_that_may_take_more_than_the_job_has_are_refused() -> None:
    full = config(memory_mb=1024)
    full.cluster.reward.mem = "5G"
    with pytest.raises(ConfigError, match="cluster.reward.mem='5G': must be at least"):
        _rewards(full)
    full.cluster.reward.mem = "5500M"
    with pytest.raises(ConfigError, match=r"each with a server of 128 MiB"):
        _rewards(full)
    full.cluster.reward.mem = "6G"
    assert "5 processes of up to 1152 MiB" in _rewards(full)[0]
    assert _rewards(config(placement=Placement.node)) == []


# -- what keeps it going ---------------------------------------------------------------------------------------------------

def decided(one: SupervisorPolicy, until: int, **queue: list) -> list:
    queue = {"train": [entry(0)], "inference": [entry(0, array="2")], "reward": [], **queue}
    facts = [Observation(float(now), queue, {role: [] for role in ROLES}, "", [], None) for now in range(0, until + 1, 5)]
    return [decision for now in facts for decision in one.decide(Situation(now, False, False, (1, 0), 0.0, {}))]


def policy() -> SupervisorPolicy:
    return SupervisorPolicy(24.0, dict.fromkeys(ROLES, 1), {})


def test_a_used_up_array_is_followed_by_another_while_training_runs() -> None:
    assert decided(policy(), int(SETTLE_S)) == [Submit("reward")]
    assert decided(policy(), 1000, reward=[entry(0, array="3")]) == []
    assert decided(policy(), int(SETTLE_S), train=[entry(0, entry(0).state.PENDING)]) == []
    held = [entry(0, entry(0).state.REQUEUE_HOLD, array="3")]
    assert decided(policy(), int(HELD_S), reward=held) == [Release("reward")]


# -- the coordinator ---------------------------------------------------------------------------------------------------------

def play(kind: ClusterKind = ClusterKind.local) -> Play:
    return Play(reward__placement=Placement.array, cluster__kind=kind, evaluation__enabled=False)


def come(one: Play, *peers: bytes) -> None:
    for number, peer in enumerate(peers):
        one.tell(peer, Register(Role.reward, "node", number, serves=f"tcp://{peer.decode()}"))


def listed(one: Play) -> list[str]:
    (said,) = only(one.beat(), RewardElements)
    return said.endpoints


def test_rollout_workers_hear_of_elements_with_each_heartbeat() -> None:
    one = play()
    one.begin()
    assert listed(one) == []
    come(one, *REWARDS)
    assert listed(one) == ["tcp://reward 0", "tcp://reward 1"]
    assert only(one.tell(REWARDS[0], Heartbeat()), RewardElements) == [], "they are no business of each other's"
    one.tell(REWARDS[0], Draining("time limit"))
    assert listed(one) == ["tcp://reward 1"]
    one.tell(REWARDS[0], Goodbye("time limit"))
    assert listed(one) == ["tcp://reward 1"] and one.core.ended is None
    assert only(Play().begin(), RewardElements) == [], "not where each worker judges for itself"


def test_training_waits_for_an_element_and_says_so() -> None:
    one = play()
    one.begin()
    one.tell(TRAINER, BatchRequest(0))
    assert waiting(one.core)["trainer"] == "a reward element to start (reward.placement=array)"


@pytest.mark.parametrize("kind", list(ClusterKind))
def test_without_any_element_a_run_on_one_machine_ends(kind: ClusterKind) -> None:
    one = play(kind)
    one.begin()
    come(one, *REWARDS)
    one.tell(REWARDS[0], WorkerFailed("no module x"))
    assert one.core.ended is None and one.core.left is None
    one.tell(REWARDS[1], WorkerFailed("no module x"))
    if kind is ClusterKind.slurm:
        assert one.core.ended is None and one.core.lacking == {Role.reward}, "others come"
    else:
        assert one.core.ended is not None and "no module x" in one.core.ended and "No reward element is left" in one.core.ended
    assert one.core.left is None, "training itself has lost nothing"


def test_elements_that_all_fail_end_a_run_on_slurm() -> None:
    one = play(ClusterKind.slurm)
    one.begin()
    for number in range(20):
        come(one, peer := b"%d" % number)
        one.tell(peer, WorkerFailed("no module x"))
    assert "rollout workers or reward elements in a row have failed" in (one.core.ended or "")


def test_what_elements_do_is_counted_and_shown() -> None:
    one = play()
    one.begin()
    come(one, *REWARDS)
    one.tell(ROLLOUT, Heartbeat(status=WorkerStatus(rewards_waiting=1, rewards_wait_s=0.5)))
    for peer in REWARDS:
        one.tell(peer, Heartbeat(status=WorkerStatus(num_running=2, reward_busy_s=60.0, rewards_waiting=3, rewards_wait_s=30.0, rewards_killed=1,
                                                     rewards_done=10)))
    total = one.core.registry.totals()
    assert (total.rewards_waiting, total.rewards_wait_s, total.reward_busy_s) == (7, 60.5, 120.0)
    shown = status(one.core, one.now, 1.0, 2.0, 0, 0)
    assert shown["rewards"] == {"placement": "array", "num_elements": 2, "waiting": 7, "wait_s": 60.5, "busy_s": 120.0, "num_killed": 2,
                                "num_failed": 0, "num_done": 20, "num_late": 0}
    assert [worker["name"] for worker in shown["workers"]] == ["rollout 0", "trainer 0", "reward 0", "reward 1"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(panel("x", shown, [], [], 2.0, None))
    assert "2 elements   7 waiting   a request takes 6 s and waits 3 s (means of 20)   2 processes replaced" in console.export_text()
