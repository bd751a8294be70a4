"""What a SLURM cluster offers and allows, asked before anything is submitted. The questions go through launcher/slurm.py."""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass

from launcher import slurm
from launcher.cluster import ClusterConfig
from launcher.options import KNOWN, names_in_help
from launcher.slurm import NodeKind
from workers.slurm_command import SlurmError, run


@dataclass(frozen=True)
class Quality:
    """A QOS: its longest wall time and how many jobs a user may have in it; None: no limit."""

    max_wall: str
    max_submit: int | None


@dataclass(frozen=True)
class Site:
    """A cluster as the preflight sees it. `qualities`: None where there is no accounting to ask; `num_mine`: your jobs now."""

    max_array_size: int
    max_job_count: int
    partitions: dict[str, dict[str, str]]
    nodes: dict[str, list[NodeKind]]
    qualities: dict[str, Quality] | None
    max_submit: int | None
    num_mine: int
    options: frozenset[str]

    @property
    def default_partition(self) -> str:
        """Where jobs go that name none; '' if there is no such partition."""
        return next((name for name, limits in self.partitions.items() if limits.get("Default") == "YES"), "")


def partitions_in(text: str) -> dict[str, dict[str, str]]:
    """`scontrol show partition --oneliner`."""
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines()]
    return {line["PartitionName"]: line for line in lines if "PartitionName" in line}


def number(text: str) -> int | None:
    """A limit in sacctmgr's spelling: '' is none."""
    return int(text) if text.strip().isdecimal() else None


def qualities_in(text: str) -> dict[str, Quality]:
    """`sacctmgr show qos format=Name,MaxWall,MaxSubmitJobsPerUser`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    return {name: Quality(wall, number(submit)) for name, wall, submit in rows}


def submit_limit_in(text: str, account: str) -> int | None:
    """`sacctmgr show assoc format=Account,MaxSubmitJobs,GrpSubmitJobs` of one user: the smallest limit, of `account` if one is given."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    limits = [number(field) for name, *fields in rows if not account or name == account for field in fields]
    return min((limit for limit in limits if limit is not None), default=None)


def _ask(*command: str) -> str | None:
    try:
        return run(*command).stdout
    except SlurmError:
        return None


def look(cluster: ClusterConfig) -> Site:
    """Ask. Raises `SlurmError` where the cluster's controller cannot be reached."""
    config = slurm.show_config()
    partitions = partitions_in(run("scontrol", "show", "partition", "--oneliner", "--all").stdout)
    default = next((name for name, limits in partitions.items() if limits.get("Default") == "YES"), "")
    wanted = [name for role in ("inference", "train") for name in (cluster.role(role).partition or default).split(",")]
    qualities = _ask("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,MaxWall,MaxSubmitJobsPerUser")
    limits = [_association_limit(config, cluster.role(role).account) for role in ("inference", "train")]
    help_text = _ask("sbatch", "--help")
    return Site(
        max_array_size=int(config.get("MaxArraySize", "1001")), max_job_count=int(config.get("MaxJobCount", "10000")),
        partitions=partitions, nodes={name: slurm.node_kinds(name) for name in wanted if name in partitions},
        qualities=None if qualities is None else qualities_in(qualities),
        max_submit=min((limit for limit in limits if limit is not None), default=None),
        num_mine=len((_ask("squeue", "--me", "--noheader", "--array", "--format=%i") or "").split()),
        options=names_in_help(help_text) if help_text else KNOWN)


def _association_limit(config: dict[str, str], account: str) -> int | None:
    if not re.search("limits|safe", config.get("AccountingStorageEnforce", "")):
        return None
    text = _ask("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}", f"cluster={config.get('ClusterName', '')}",
                "format=Account,MaxSubmitJobs,GrpSubmitJobs")
    return submit_limit_in(text or "", account)
