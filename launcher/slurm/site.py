"""What a SLURM cluster offers and allows, asked before anything is submitted. The questions go through queries.py."""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.config.cluster import ClusterConfig, GpuRequest
from launcher.config.sbatch_options import KNOWN, names_in_help
from launcher.config.schema import FullConfig
from launcher.slurm import queries
from launcher.slurm.parsing import gpus, max_array_size
from launcher.slurm.queries import NodeKind
from launcher.slurm.submit_limits import Limits, Quality, associations_in, qualities_in, queued_in
from workers.slurm.command import SlurmError, run


@dataclass(frozen=True)
class Site:
    """A cluster as the preflight sees it. `qualities`: None where there is no accounting to ask; `limits`: of how many jobs may be queued."""

    max_array_size: int
    partitions: dict[str, dict[str, str]]
    nodes: dict[str, list[NodeKind]]
    qualities: dict[str, Quality] | None
    limits: Limits
    options: frozenset[str]

    @property
    def default_partition(self) -> str:
        """Where jobs go that name none; '' if there is no such partition."""
        return default_of(self.partitions)


def partitions_in(text: str) -> dict[str, dict[str, str]]:
    """`scontrol show partition --oneliner`."""
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines()]
    return {line["PartitionName"]: line for line in lines if "PartitionName" in line}


def default_of(partitions: dict[str, dict[str, str]]) -> str:
    """The default partition's name; '' if there is none."""
    return next((name for name, limits in partitions.items() if limits.get("Default") == "YES"), "")


def of_type(kinds: list[NodeKind], gpu_type: str) -> list[NodeKind]:
    """The nodes that name GPUs of this type; all of them where none does, or none is asked for. Pure."""
    return [kind for kind in kinds if gpu_type and gpus(kind.gres, gpu_type)] or kinds


def gpus_per_node(kinds: list[NodeKind], gpu_type: str, num_devices: int) -> int:
    """So many GPUs of a node (of this type, where there are such) that most of the partition's can be used; 0 where `num_devices` fit on one such
    node, or no node has any. Pure."""
    there = [(number, kind.num_nodes) for kind in of_type(kinds, gpu_type) if (number := kind.gpus_of(gpu_type)) and not kind.away]
    usable = {number: number * sum(nodes for other, nodes in there if other >= number) for number, _ in there}
    best = max(sorted(usable), key=usable.__getitem__, default=0)
    return best if num_devices > best else 0


def settle_nodes(config: FullConfig, patience_s: float | None = None) -> str:
    """Where devices_per_node is not given and training does not fit on a node, take what its partition's nodes have (for training only).

    Returns what to tell of it, '' where nothing was done. Raises `SlurmError` where the cluster cannot be asked, `ConfigError`.
    """
    part, num_devices = config.cluster.train, config.plan().num_train_devices
    if config.devices_per_node("train") or part.gpus is GpuRequest.none or num_devices == 1:
        return ""
    name = part.partition or default_of(_partitions(patience_s))
    number = gpus_per_node(queries.node_kinds(name, patience_s), part.gpu_type, num_devices) if name else 0
    if not number:
        return ""
    part.devices_per_node = number
    return f"cluster.train.devices_per_node={number}, as the nodes of partition {name} have: training takes {num_devices} devices"


def _partitions(patience_s: float | None = None) -> dict[str, dict[str, str]]:
    return partitions_in(run("scontrol", "show", "partition", "--oneliner", "--all", patience_s=patience_s).stdout)


def _ask(*command: str, patience_s: float | None = 0) -> str | None:
    try:
        return run(*command, patience_s=patience_s).stdout
    except SlurmError:
        return None


def look(cluster: ClusterConfig, roles: Sequence[str] = ("inference", "train")) -> Site:
    """Ask about what jobs of `roles` need. Raises `SlurmError` where the cluster's controller cannot be reached."""
    config = queries.show_config(patience_s=None)
    partitions = _partitions()
    default = default_of(partitions)
    wanted = [name for role in roles for name in (cluster.role(role).partition or default).split(",")]
    told = _ask("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,MaxWall,MaxSubmitJobsPerUser,Flags")
    qualities = None if told is None else qualities_in(told)
    help_text = _ask("sbatch", "--help")
    return Site(
        max_array_size=max_array_size(config),
        partitions=partitions, nodes={name: queries.node_kinds(name) for name in wanted if name in partitions},
        qualities=qualities, limits=_limits(config, partitions, qualities or {}), options=names_in_help(help_text) if help_text else KNOWN)


def _limits(config: dict[str, str], partitions: dict[str, dict[str, str]], qualities: dict[str, Quality]) -> Limits:
    """Submit limits; of accounts and QOS where the cluster enforces them."""
    enforced, user = re.search("limits|safe", config.get("AccountingStorageEnforce", "")) is not None, getpass.getuser()
    show = ("sacctmgr", "--noheader", "--parsable2", "show")
    associations = _ask(*show, "assoc", f"user={user}", f"cluster={config.get('ClusterName', '')}",
                        "format=Account,Partition,MaxSubmitJobs,GrpSubmitJobs,DefaultQOS") if enforced else None
    account = _ask(*show, "user", user, "format=DefaultAccount") if enforced else None
    return Limits(
        int(config.get("MaxJobCount", "10000")), qualities if enforced else {},
        {name: quality.lower() for name, limits in partitions.items() if (quality := limits.get("QoS", "N/A")) != "N/A"},
        associations_in(associations or ""), (account or "").strip().lower(), default_of(partitions),
        queued_in(_ask("squeue", "--me", "--noheader", "--array", "--format=%a|%q|%P", patience_s=None) or ""))
