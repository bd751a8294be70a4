"""How many jobs may still be queued: SLURM's submit limits, each over the jobs that it counts. Pure.

    associations of the user   MaxSubmitJobs, GrpSubmitJobs    jobs of one account (and partition)
    the partition's QOS,       MaxSubmitJobsPerUser            jobs in its partitions
    else the job's             MaxSubmitJobsPerUser            jobs of this QOS
    the cluster                MaxJobCount                     all jobs
                                       less one's own jobs there now --> `rooms`

An array counts as its elements. Names of accounts and QOS are read in any case, and kept in lower case. A partition's QOS
goes before the job's. Source: "Limits" of SLURM's page on resource limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.config.cluster import ClusterConfig, RoleConfig


@dataclass(frozen=True)
class Quality:
    """A QOS: its longest wall time and how many jobs a user may have in it; None: no limit."""

    max_wall: str
    max_submit: int | None


@dataclass(frozen=True)
class Association:
    """What a user may do in an account; `partition`: '' for all. `max_submit`: the smaller of his and his group's limit; None: no limit."""

    account: str
    partition: str
    max_submit: int | None
    default_qos: str


@dataclass(frozen=True)
class Queued:
    """One's own job, or array element, that has not ended. `partitions`: where it may run."""

    account: str
    qos: str
    partitions: frozenset[str]


@dataclass(frozen=True)
class Room:
    """`left` more elements of `roles` together may be queued, by `limit`, in words."""

    limit: str
    left: int
    roles: frozenset[str]


@dataclass(frozen=True)
class Limits:
    """What the cluster says. `partition_qos`: of the partitions that have one; `default_account`: of jobs that name none."""

    max_job_count: int
    qualities: dict[str, Quality]
    partition_qos: dict[str, str]
    associations: tuple[Association, ...]
    default_account: str
    default_partition: str
    mine: tuple[Queued, ...]


def number(text: str) -> int | None:
    """A limit in sacctmgr's spelling: '' is none."""
    return int(text) if text.strip().isdecimal() else None


def qualities_in(text: str) -> dict[str, Quality]:
    """`sacctmgr show qos format=Name,MaxWall,MaxSubmitJobsPerUser`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    return {name.lower(): Quality(wall, number(submit)) for name, wall, submit in rows}


def associations_in(text: str) -> tuple[Association, ...]:
    """`sacctmgr show assoc format=Account,Partition,MaxSubmitJobs,GrpSubmitJobs,DefaultQOS` of one user."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 4]
    return tuple(Association(account, partition, min((limit for limit in map(number, limits) if limit is not None), default=None), qos)
                 for account, partition, *limits, qos in rows)


def queued_in(text: str) -> tuple[Queued, ...]:
    """`squeue --me --array --format=%a|%q|%P`."""
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 2]
    return tuple(Queued(account, qos, frozenset(partitions.split(","))) for account, qos, partitions in rows)


def rooms(limits: Limits, cluster: ClusterConfig, roles: Sequence[str]) -> tuple[Room, ...]:
    """What is left by each limit that bears on jobs of `roles`; `cluster.max_submit` stands for all of SLURM's but the cluster's own."""
    mine, everybody = len(limits.mine), frozenset(roles)
    found = [Room(f"MaxJobCount={limits.max_job_count} of the cluster", limits.max_job_count - mine, everybody)]
    if cluster.max_submit:
        return (*found, Room(f"cluster.max_submit={cluster.max_submit}", cluster.max_submit - mine, everybody))
    shared: dict[tuple[str, int], set[str]] = {}
    for role in roles:
        for limit, left in _of(limits, cluster.role(role)):
            shared.setdefault((limit, left), set()).add(role)
    return (*found, *(Room(limit, left, frozenset(concerned)) for (limit, left), concerned in shared.items()))


def _of(limits: Limits, part: RoleConfig) -> Iterator[tuple[str, int]]:
    """The limits of one role's jobs, in words, and what is left of each."""
    partitions = frozenset((part.partition or limits.default_partition).split(","))
    account = (part.account or limits.default_account).lower()
    of_account = [one for one in limits.associations if one.account == account and one.partition in ("", *partitions)]
    own = [one for one in of_account if one.partition] or of_account
    for one in own:
        if one.max_submit is not None:
            there = sum(job.account == account and (not one.partition or one.partition in job.partitions) for job in limits.mine)
            where = f" in partition {one.partition}" if one.partition else ""
            yield f"MaxSubmitJobs={one.max_submit} of account {account}{where}", one.max_submit - there
    asked = part.qos.lower() or next((one.default_qos for one in own if one.default_qos), "")
    for partition in sorted(partitions):
        leading = limits.partition_qos.get(partition, "")
        if (most := _most(limits, leading)) is not None:
            same = {name for name, qos in limits.partition_qos.items() if qos == leading}
            there = sum(bool(job.partitions & same) for job in limits.mine)
            yield f"MaxSubmitJobsPerUser={most} of qos {leading} of partition {partition}", most - there
            continue
        for name in asked.split(","):
            if (most := _most(limits, name)) is not None:
                yield f"MaxSubmitJobsPerUser={most} of qos {name}", most - sum(name in job.qos.split(",") for job in limits.mine)


def _most(limits: Limits, qos: str) -> int | None:
    quality = limits.qualities.get(qos)
    return None if quality is None else quality.max_submit
