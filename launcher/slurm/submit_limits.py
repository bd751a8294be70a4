"""How many jobs may still be queued: SLURM's submit limits, each over the jobs that it counts. Pure.

    associations of the user   MaxSubmitJobs, GrpSubmitJobs    jobs of one account (and partition)
    the partition's QOS,       MaxSubmitJobsPerUser            jobs of this QOS, and those in partitions that have it
    else the job's             MaxSubmitJobsPerUser            the same         (the job's first, where that has the flag OverPartQOS)
    the cluster                MaxJobCount                     all jobs
                                       less one's own jobs there now --> `rooms`

An array counts as its elements. Names of accounts and QOS are read in any case; here they are in lower case. Of a partition's QOS
and the job's the first one that sets a limit is the one whose limit holds, but a job counts in both.
Source: "Limits" of SLURM's page on resource limits, and its acct_policy.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.config.cluster import ClusterConfig, RoleConfig


@dataclass(frozen=True)
class Quality:
    """A QOS: its longest wall time and how many jobs a user may have in it; None: no limit. `first`: before a partition's (OverPartQOS)."""

    max_wall: str | None
    max_submit: int | None
    first: bool = False


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
    """`left` more elements of `roles` together may be queued, by `limit`, in words; `remedy`: how there may be more."""

    limit: str
    left: int
    roles: frozenset[str]
    remedy: str = "ask for a higher limit (cluster.max_submit=N stands for those of accounts and QOS)"


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
    """`sacctmgr show qos format=Name,MaxWall,MaxSubmitJobsPerUser,Flags`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    return {name.lower(): Quality(wall or None, number(submit), "overpartqos" in flags.lower().split(",")) for name, wall, submit, flags in rows}


def associations_in(text: str) -> tuple[Association, ...]:
    """`sacctmgr show assoc format=Account,Partition,MaxSubmitJobs,GrpSubmitJobs,DefaultQOS` of one user."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 4]
    def smaller(limits: list[str]) -> int | None:
        return min((limit for limit in map(number, limits) if limit is not None), default=None)

    return tuple(Association(account.lower(), partition, smaller(limits), qos.lower()) for account, partition, *limits, qos in rows)


def queued_in(text: str) -> tuple[Queued, ...]:
    """`squeue --me --array --format=%a|%q|%P`."""
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 2]
    return tuple(Queued(account.lower(), qos.lower(), frozenset(partitions.split(","))) for account, qos, partitions in rows)


def rooms(limits: Limits, cluster: ClusterConfig, roles: Sequence[str]) -> tuple[Room, ...]:
    """What is left by each limit that bears on jobs of `roles`; `cluster.max_submit` stands for all of SLURM's but the cluster's own."""
    mine, everybody = len(limits.mine), frozenset(roles)
    found = [Room(f"MaxJobCount={limits.max_job_count} of the cluster", limits.max_job_count - mine, everybody, "ask its administrators for more")]
    if cluster.max_submit:
        return (*found, Room(f"cluster.max_submit={cluster.max_submit}", cluster.max_submit - mine, everybody, "raise it, where SLURM lets more in"))
    shared: dict[tuple[str, int], set[str]] = {}
    for role in roles:
        for limit, left in _of(limits, cluster.role(role)):
            shared.setdefault((limit, left), set()).add(role)
    return (*found, *(Room(limit, left, frozenset(concerned)) for (limit, left), concerned in shared.items()))


def _partitions(limits: Limits, part: RoleConfig) -> frozenset[str]:
    return frozenset((part.partition or limits.default_partition).split(","))


def _associations(limits: Limits, part: RoleConfig) -> tuple[str, list[Association], list[Association]]:
    """The account of a role's jobs, what the user has in it, and what of that bears on these jobs."""
    account = (part.account or limits.default_account).lower()
    there = [one for one in limits.associations if one.account == account]
    return account, there, [one for one in there if one.partition in _partitions(limits, part)] or [one for one in there if not one.partition]


def asked(limits: Limits, part: RoleConfig) -> list[str]:
    """The QOS of a role's jobs, several where any of them will do: what is given, or the account's."""
    _, _, own = _associations(limits, part)
    return (part.qos.lower() or next((one.default_qos for one in own if one.default_qos), "normal")).split(",")


def _of(limits: Limits, part: RoleConfig) -> Iterator[tuple[str, int]]:
    """The limits of one role's jobs, in words, and what is left of each."""
    account, there, own = _associations(limits, part)
    apart = {one.partition for one in there if one.partition}
    for one in own:
        if one.max_submit is not None:
            taken = sum(job.account == account and (one.partition in job.partitions if one.partition else not job.partitions & apart)
                        for job in limits.mine)
            where = f" in partition {one.partition}" if one.partition else ""
            yield f"MaxSubmitJobs={one.max_submit} of account {account}{where}", one.max_submit - taken
    names = {leading(limits, job, partition, "max_submit") for job in asked(limits, part) for partition in _partitions(limits, part)}
    for name in sorted(names - {""}):
        if (most := limits.qualities[name].max_submit) is not None:
            same = {partition for partition, qos in limits.partition_qos.items() if qos == name}
            taken = sum(name in job.qos.split(",") or bool(job.partitions & same) for job in limits.mine)
            yield f"MaxSubmitJobsPerUser={most} of qos {name}", most - taken


def leading(limits: Limits, job: str, partition: str, limit: Literal["max_submit", "max_wall"]) -> str:
    """Whose `limit` holds for a job of the QOS `job` in `partition`: that QOS, or the partition's; '' if neither sets one."""
    own, above = limits.qualities.get(job), limits.partition_qos.get(partition, "")
    order = (job, above) if own is not None and own.first else (above, job)
    return next((name for name in order if name in limits.qualities and getattr(limits.qualities[name], limit) is not None), "")
