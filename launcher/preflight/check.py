"""What is checked on a SLURM cluster before anything is queued, so that a mistake is told in a second and not after a day in the queue.

    options      cluster.*.sbatch against `sbatch --help`
    partitions   there, UP, long enough, open to the account and qos, with nodes that have the GPUs, CPUs and memory
    scripts      sbatch --test-only on the very script of each role: SLURM's own word
    arrays       fewer chunks where submit limits do not let all of them in

Then node_probe.py looks at the run folder, at this code and at SGLang from a node of each partition. All that is wrong is told at once;
nothing is submitted and no folder is left. On one machine `check_here` looks at what a node would be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.config.cluster import GpuRequest, RoleConfig
from launcher.config.sbatch_options import check_options
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import JobSpec, fit
from launcher.jobs.submit import outside_any_job, scripts
from launcher.slurm import queries
from launcher.slurm.parsing import seconds
from launcher.slurm.queries import NodeKind
from launcher.slurm.site import Site, look, of_type
from launcher.slurm.submit_limits import asked, leading, rooms
from workers import node_look
from workers.config import ConfigError, Server
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError

NOT_UP = {
    "DOWN": "jobs wait there and none starts", "DRAIN": "no new jobs are taken", "INACTIVE": "no jobs are taken and none starts",
}
NO_NODES = ("Requested node configuration is not available", "Required node not available", "Requested nodes are busy")
_HINTS = (
    ("policy", ("qos", "account", "partition", "time", "gpus", "mem")),
    ("account", ("account", "partition")), ("qos", ("qos",)), ("feature", ("constraint",)), ("partition", ("partition",)),
    ("reservation", ("reservation",)), ("node name", ("nodelist", "exclude")), ("time", ("time",)),
    ("node configuration", ("gpus", "gpu_type", "mem", "mem_per_gpu", "cpus_per_task", "cpus_per_gpu", "constraint")),
)


def check(specs: tuple[JobSpec, ...], config: FullConfig, run: RunFolder, say: Callable[[str], Any]) -> tuple[JobSpec, ...]:
    """Check all but the nodes; returns the specifications with as many chunks as may be queued. Raises `ConfigError`, `SlurmError`."""
    site = look(config.cluster, config.roles)
    check_options(config.cluster, site.options, config.roles)
    found = [problem for spec in specs for problem in problems(site, spec, config.cluster.role(spec.role))]
    refuse(found)
    fitting = fit(specs, rooms(site.limits, config.cluster, config.roles))
    refuse(_objections(fitting, config, run, site, say))
    for full, cut in zip(specs, fitting, strict=True):
        if cut.num_chunks < full.num_chunks:
            say(f"{cut.role}: {cut.num_chunks} of {full.num_chunks} chunks are submitted now, as submit limits allow; "
                "headway watch (or headway resume) submits more when these are used up")
    return fitting


def check_here(config: FullConfig) -> None:
    """Check what a run on this machine needs besides its own packages. Raises `ConfigError`."""
    if config.engine.server is Server.sglang and not config.supervised:
        refuse(node_look.look_at_sglang(config.engine.python))


def refuse(found: list[str]) -> None:
    """Raise one `ConfigError` with all problems; each is told once."""
    found = list(dict.fromkeys(found))
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError("\n".join([f"{len(found)} things stand against this run:", *(f"  - {problem}" for problem in found)]))


def problems(site: Site, spec: JobSpec, part: RoleConfig) -> list[str]:
    """What stands against the jobs of one role, by what the cluster says about itself. Pure."""
    key = f"cluster.{spec.role}"
    names = (part.partition or site.default_partition).split(",")
    if names == [""]:
        return [f"{key}.partition='': the cluster has no default partition. Use one of {sorted(site.partitions)}"]
    unknown = [name for name in names if name not in site.partitions]
    found = [f"{key}.partition={name!r}: there is no such partition. Use one of {sorted(site.partitions)}" for name in unknown]
    each = [_partition_problems(site, spec, part, key, name) for name in names if name not in unknown]
    if each and all(each):  # of several partitions one that fits is enough
        found += each[0]
    known = site.qualities or {}
    return found + [f"{key}.qos={name!r}: there is no such quality of service. Use one of {sorted(known)}"
                    for name in part.qos.split(",") if name and site.qualities is not None and name.lower() not in known]


def _wall_problems(site: Site, spec: JobSpec, part: RoleConfig, key: str, partition: str) -> list[str]:
    """Of several QOS, as newer SLURM takes them, one with time enough will do."""
    names = asked(site.limits, part)
    leads = {leading(site.limits, name, partition, "max_wall") for name in names}
    walls = {name: seconds(site.limits.qualities[name].max_wall or "") if name else None for name in leads}
    if any(wall is None or spec.time_limit_s <= wall for wall in walls.values()):
        return []
    longest = max(walls, key=lambda name: walls[name] or 0)
    whose = "" if longest in names else f", which partition {partition} has"
    return [f"{key}.time={part.time!r}: must be at most MaxWall={site.limits.qualities[longest].max_wall} of qos {longest}{whose}. "
            "Shorten it: a run goes on from job to job"]


def _partition_problems(site: Site, spec: JobSpec, part: RoleConfig, key: str, name: str) -> list[str]:
    limits, found = site.partitions[name], []
    state = limits.get("State", "UP")
    if state != "UP":
        found.append(f"{key}.partition={name!r}: it is {state}: {NOT_UP.get(state, 'it does not run jobs')}. Use another one, or wait until it is UP")
    longest = seconds(limits.get("MaxTime", "UNLIMITED"))
    if longest is not None and spec.time_limit_s > longest:
        found.append(f"{key}.time={part.time!r}: must be at most MaxTime={limits['MaxTime']} of partition {name}. "
                     "Shorten it: a run goes on from job to job")
    most = limits.get("MaxNodes", "UNLIMITED")
    if most.isdecimal() and spec.nodes_per_element > int(most):
        what = "training" if spec.role == "train" else f"a replica of {spec.role}"
        found.append(f"allocation: {what} takes {spec.nodes_per_element} nodes, and a job in partition {name} at most {most}. Use fewer devices")
    allowed, denied = limits.get("AllowQos", "ALL"), limits.get("DenyQos", "")  # of accounts only SLURM knows which are part of which
    values = part.qos.lower().split(",") if part.qos else []
    if values and allowed != "ALL" and not set(values) & set(allowed.lower().split(",")):
        found.append(f"{key}.qos={part.qos!r}: partition {name} is open to {allowed} only. Use one of them, or another partition")
    if values and set(values) <= set(denied.lower().split(",")):
        found.append(f"{key}.qos={part.qos!r}: partition {name} is closed to it. Use another one, or another partition")
    return found + _wall_problems(site, spec, part, key, name) + _node_problems(site, spec, part, key, name)


def _needs(spec: JobSpec, part: RoleConfig) -> tuple[int, int]:
    """The CPUs and GPUs that an element takes of each node."""
    return (max(part.cpus_per_task * spec.tasks_per_node, part.cpus_per_gpu * spec.devices_per_node),
            0 if part.gpus is GpuRequest.none else spec.devices_per_node)


def _fits(kind: NodeKind, spec: JobSpec, part: RoleConfig) -> bool:
    cpus, gpus = _needs(spec, part)
    return kind.num_cpus >= cpus and kind.gpus_of(part.gpu_type) >= gpus


def waits_for_nodes(site: Site, spec: JobSpec, part: RoleConfig) -> str:
    """For which nodes the jobs of a role wait that are there, but take no jobs now; '' if enough are up in some partition. Pure."""
    names = [name for name in (part.partition or site.default_partition).split(",") if name in site.nodes]
    for name in names:
        here = [kind for kind in of_type(site.nodes[name], part.gpu_type) if not kind.away and _fits(kind, spec, part)]
        if sum(kind.num_nodes for kind in here) >= spec.nodes_per_element:
            return ""
    away = all(kind.away for name in names for kind in of_type(site.nodes[name], part.gpu_type))
    which = "all nodes" if away else "too many of the nodes that fit"
    return f"{which} of partition {','.join(names)} are drained or down: the run waits until they are back"


def _node_problems(site: Site, spec: JobSpec, part: RoleConfig, key: str, name: str) -> list[str]:
    nodes, found = of_type(site.nodes.get(name, []), part.gpu_type), []
    cpus, gpus = _needs(spec, part)
    most_gpus = max((kind.gpus_of(part.gpu_type) for kind in nodes), default=0)
    most_cpus = max((kind.num_cpus for kind in nodes), default=0)
    if gpus > most_gpus:
        whole = "allocation.replica_size" if spec.role == "inference" and spec.nodes_per_element == 1 else ""
        per_node = f"{key if part.devices_per_node else 'allocation'}.devices_per_node"  # the role's own counts before that of all
        spread = f", or give {per_node}={most_gpus} for servers over several nodes" if whole else ""
        remedy = f"Use {whole or per_node}={most_gpus} or less{spread}" if most_gpus else f"Use another partition, or {key}.gpus=none"
        found.append(f"{whole or per_node}: {spec.role} takes {gpus} GPUs of a node, and the nodes of partition {name} have "
                     f"{most_gpus or 'none'}. {remedy}")
    if cpus > most_cpus:
        which = "cpus_per_task" if part.cpus_per_task else "cpus_per_gpu"
        found.append(f"{key}.{which}={getattr(part, which)}: {spec.role} takes {cpus} CPUs of a node, and the nodes of partition {name} have "
                     f"{most_cpus}. Use fewer")
    fitting = sum(kind.num_nodes for kind in nodes if _fits(kind, spec, part))
    if not found and fitting < spec.nodes_per_element:
        found.append(f"allocation: {spec.role} takes {spec.nodes_per_element} nodes at once, and partition {name} has {fitting} such nodes. "
                     "Use fewer devices")
    return found


def _objections(specs: tuple[JobSpec, ...], config: FullConfig, run: RunFolder, site: Site, say: Callable[[str], Any]) -> list[str]:
    """SLURM's own word on the scripts of what is submitted now; not on nodes that are away for now: --test-only refuses what sbatch queues then."""
    found = []
    for spec in specs:
        part = config.cluster.role(spec.role)
        with outside_any_job():
            try:
                queries.test_only(scripts(spec, config, run, site.max_array_size)[0])
            except SlurmError as error:
                words = str(error).split("exit status", 1)[-1].split(":", 1)[-1].strip()
                if any(complaint in words for complaint in NO_NODES) and (waits := waits_for_nodes(site, spec, part)):
                    say(f"cluster.{spec.role}: {waits}")
                else:
                    found.append(f"cluster.{spec.role}: SLURM does not accept its jobs: {words}. {_remedy(words, f'cluster.{spec.role}', part)}")
    return found


def _remedy(words: str, key: str, part: RoleConfig) -> str:
    """What to look at, from SLURM's words. All limits of accounts and QOS have one text; a line before it says which it is."""
    if "SubmitJob" in words:
        return ("So many of your jobs, or your group's, may not be queued at once: wait for others to end, or give cluster.max_submit=N, how many "
                "of yours may be")
    for hint, names in _HINTS:
        if hint in words.lower():
            given = {name: getattr(part, name) for name in names}
            said = ", ".join(f"{key}.{name}={str(getattr(value, 'value', value))!r}" for name, value in given.items() if value or name == names[0])
            return f"It was asked for {said}: correct that, or {key}.sbatch"
    return f"Correct {key}; --dry-run shows the script"
