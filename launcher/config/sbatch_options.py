"""Which options of sbatch and srun may be set by hand (`cluster.*.sbatch`, `cluster.*.srun_args`): a typo fails, and so does what
Headway sets itself. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from launcher.config.cluster import GPU_OPTIONS, ClusterConfig, GpuRequest, RoleConfig, as_sbatch
from workers.config import ConfigError

_SHAPE = "it follows from allocation.* and the split of the devices"
_OWN = {
    "array": "it holds the chunks of wall time, which follow from run.max_hours",
    "clusters": "the jobs would be in the queue of another cluster, where Headway does not look for them",
    "dependency": "it chains the arrays of a run and the runs of a sweep",
    "error": "logs are in the run folder, jobs/", "output": "logs are in the run folder, jobs/", "open-mode": "logs are continued, never overwritten",
    "hold": "Headway holds and releases jobs by itself",
    "job-name": "jobs are found by it; set run.name",
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core", "gpus"), _SHAPE),
    "requeue": "preempted jobs come back by it", "no-requeue": "preempted jobs come back by --requeue",
    "signal": "it asks running jobs to save their state; set cluster.signal_delay_s",
    "kill-on-bad-exit": "a gang ends as one",
}
_ACTIONS = ("help", "usage", "version", "wait", "wrap", "test-only", "parsable", "quiet", "verbose", "uid", "gid", "ignore-pbs")
KEYS = ("partition", "account", "qos", "time", "constraint", "nodelist", "exclude", "reservation", "mem", "mem-per-gpu", "cpus-per-gpu",
         "cpus-per-task", "exclusive")
_SRUN_OWN = {"output", "error", "open-mode", "kill-on-bad-exit", "unbuffered", "ntasks", "nodes", "ntasks-per-node"}

# The long options of sbatch, of SLURM 22.05 to 26.05, for where `sbatch --help` cannot be asked, and beyond what it lists; then those that
# came after 22.05, which are there where it lists them.
_NAMES = """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude exclusive export
    export-file extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help
    hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
    mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
    ntasks-per-socket open-mode output overcommit oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot
    requeue reservation segment signal sockets-per-node spread-job switches test-only thread-spec threads-per-core time time-min tmp tres-per-task
    uid usage use-min-nodes verbose version wait wait-all-nodes wckey wrap"""
LATER = frozenset(("consolidate-segments", "container-id", "container-type", "oom-kill-step", "resources", "resv-ports", "spread-segments", "stepmgr",
                   "tres-bind"))
ALWAYS = frozenset(_NAMES.split())
KNOWN = ALWAYS | LATER


def names_in_help(text: str) -> frozenset[str]:
    """The long options that `sbatch --help` lists."""
    return frozenset(re.findall(r"(?:^|\s)--([a-z][a-z0-9-]+)", text))


def check_options(cluster: ClusterConfig, legal: frozenset[str] = KNOWN, roles: Sequence[str] = ("inference", "train")) -> None:
    """Refuse options of `roles` that sbatch does not know or that Headway sets itself. Raises `ConfigError`."""
    for role in roles:
        part = cluster.role(role)
        for name in part.sbatch:
            _check_option(f"cluster.{role}", name, part, legal)
        for argument in part.srun_args:
            name = argument.lstrip("-").split("=")[0]
            if not argument.startswith("-") or name in _SRUN_OWN:
                why = "Headway sets it itself" if name in _SRUN_OWN else "must begin with '-': one argument an entry, as in ['--mpi=none']"
                raise ConfigError(f"cluster.{role}.srun_args={argument!r}: {why}. Leave it out or correct it")


def _check_option(key: str, given: str, part: RoleConfig, legal: frozenset[str]) -> None:
    name = as_sbatch(given)
    where = f"{key}.sbatch.{given}={part.sbatch[given]!r}"
    if name in _OWN:
        raise ConfigError(f"{where}: Headway sets --{name} itself: {_OWN[name]}. Leave it out")
    if name in _ACTIONS:
        raise ConfigError(f"{where}: --{name} changes what sbatch does, not what the job gets. Leave it out")
    if name in KEYS:
        raise ConfigError(f"{where}: --{name} has a key of its own. Use {key}.{name.replace('-', '_')}")
    if name in GPU_OPTIONS and part.gpus is not GpuRequest.none:
        raise ConfigError(f"{where}: GPUs are asked for by {key}.gpus={part.gpus.value}. Use {key}.gpus and {key}.gpu_type, "
                          f"or set {key}.gpus=none to ask for them by hand")
    if name in LATER - legal:
        raise ConfigError(f"{where}: this cluster's SLURM is older than sbatch's option --{name}. Leave it out")
    if name not in legal | ALWAYS:
        near = difflib.get_close_matches(name, legal | ALWAYS, 1)
        raise ConfigError(f"{where}: sbatch has no option --{name}. {f'Did you mean {near[0]}?' if near else 'See sbatch --help'}")
