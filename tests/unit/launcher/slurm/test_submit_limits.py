"""How many jobs may still be queued."""

from __future__ import annotations

import pytest

from launcher.config.cluster import ClusterConfig, RoleConfig
from launcher.slurm.submit_limits import Association, Limits, Quality, Queued, Room, associations_in, qualities_in, queued_in, rooms

BOTH = frozenset(["inference", "train"])
QUALITIES = {"normal": Quality(None, None), "gpu": Quality("1-00:00:00", 4), "scavenger": Quality(None, 1000),
             "urgent": Quality(None, 9, first=True), "unbounded": Quality(None, None, first=True)}


def limits(*mine: Queued, partition_qos: dict[str, str] | None = None, associations: tuple[Association, ...] = ()) -> Limits:
    return Limits(10_000, QUALITIES, partition_qos or {}, associations, "lab", "cpu", mine)


def jobs(number: int, account: str = "lab", qos: str = "normal", partition: str = "cpu") -> list[Queued]:
    return [Queued(account, qos, frozenset([partition]))] * number


def of(found: tuple[Room, ...]) -> dict[str, tuple[int, frozenset[str]]]:
    return {room.limit: (room.left, room.roles) for room in found if not room.limit.startswith("MaxJobCount")}


def cluster(**train: str) -> ClusterConfig:
    return ClusterConfig(inference=RoleConfig(qos="scavenger"), train=RoleConfig(**train))  # type: ignore[arg-type]


def test_what_sacctmgr_and_squeue_say_is_read() -> None:
    assert qualities_in("normal|||\nDay|1-00:00:00|50|DenyOnLimit,OverPartQOS\n") == {
        "normal": Quality(None, None), "day": Quality("1-00:00:00", 50, first=True)}
    assert associations_in("root||||\nLab|gpu|100|80|Day\n") == (Association("root", "", None, ""), Association("lab", "gpu", 80, "day"))
    assert queued_in("Lab|Normal|gpu\nlab|day|a,b\n") == (*jobs(1, partition="gpu"), Queued("lab", "day", frozenset("ab")))
    assert (associations_in(""), queued_in(""), qualities_in("")) == ((), (), {})


def test_each_role_has_the_limit_of_its_qos_less_the_jobs_in_it() -> None:
    said = limits(*jobs(300), *jobs(1, qos="gpu"), *jobs(10, qos="scavenger"))
    found = rooms(said, cluster(qos="gpu"), ["inference", "train"])
    assert found[0] == Room("MaxJobCount=10000 of the cluster", 10_000 - 311, BOTH, "ask its administrators for more")
    assert of(found) == {"MaxSubmitJobsPerUser=1000 of qos scavenger": (990, frozenset(["inference"])),
                         "MaxSubmitJobsPerUser=4 of qos gpu": (3, frozenset(["train"]))}


@pytest.mark.parametrize(("train", "left"), [
    ({}, {"MaxSubmitJobs=100 of account lab": (96, BOTH)}),
    ({"account": "closed"}, {"MaxSubmitJobs=100 of account lab": (96, frozenset(["inference"])),
                             "MaxSubmitJobs=0 of account closed": (0, frozenset(["train"]))}),
    ({"partition": "fast"}, {"MaxSubmitJobs=100 of account lab": (96, frozenset(["inference"])),
                             "MaxSubmitJobs=7 of account lab in partition fast": (6, frozenset(["train"])),
                             "MaxSubmitJobsPerUser=4 of qos gpu": (3, frozenset(["train"]))})])
def test_a_limit_is_that_of_the_account_which_is_charged(train: dict[str, str], left: dict) -> None:
    said = limits(*jobs(4), *jobs(1, partition="fast", qos="gpu"), *jobs(50, account="other"), associations=(
        Association("lab", "", 100, ""), Association("lab", "fast", 7, "gpu"), Association("closed", "", 0, "")))
    found = of(rooms(said, cluster(**train), ["inference", "train"]))
    assert {limit: room for limit, room in found.items() if "scavenger" not in limit} == left


def test_a_partitions_qos_goes_before_the_jobs() -> None:
    said = limits(*jobs(3, partition="fast"), *jobs(2, partition="faster"), *jobs(9, qos="gpu"),
                  partition_qos={"fast": "gpu", "faster": "gpu", "cpu": "normal"})
    found = of(rooms(said, cluster(partition="fast", qos="scavenger"), ["train"]))
    assert found == {"MaxSubmitJobsPerUser=4 of qos gpu": (4 - 3 - 2 - 9, frozenset(["train"]))}, "jobs in its partitions count, and of this QOS"
    both = cluster(partition="fast")
    both.inference.partition = "faster"
    assert of(rooms(said, both, ["inference", "train"])) == {"MaxSubmitJobsPerUser=4 of qos gpu": (-10, BOTH)}, "one limit for both"
    assert set(of(rooms(said, cluster(partition="fast,none", qos="scavenger"), ["train"]))) == {
        "MaxSubmitJobsPerUser=4 of qos gpu", "MaxSubmitJobsPerUser=1000 of qos scavenger"}, "as it may run in either"
    assert of(rooms(said, cluster(qos="scavenger"), ["train"])) == {"MaxSubmitJobsPerUser=1000 of qos scavenger": (1000, frozenset(["train"]))}


def test_a_jobs_qos_may_go_before_the_partitions() -> None:
    said = limits(*jobs(3, partition="fast"), *jobs(1, qos="urgent"), partition_qos={"fast": "gpu"})
    assert of(rooms(said, cluster(partition="fast", qos="urgent"), ["train"])) == {"MaxSubmitJobsPerUser=9 of qos urgent": (8, frozenset(["train"]))}
    assert of(rooms(said, cluster(partition="fast", qos="unbounded"), ["train"])) == {
        "MaxSubmitJobsPerUser=4 of qos gpu": (1, frozenset(["train"]))}, "it sets none"


def test_what_is_given_stands_for_slurms_limits() -> None:
    given = cluster(qos="gpu")
    given.max_submit = 500
    assert of(rooms(limits(*jobs(1, qos="gpu")), cluster(qos="GPU", account="LAB"), ["train"])) == {
        "MaxSubmitJobsPerUser=4 of qos gpu": (3, frozenset(["train"]))}, "in any case"
    assert of(rooms(limits(*jobs(300)), given, ["inference", "train"])) == {"cluster.max_submit=500": (200, BOTH)}
