"""From the config of a role to what sbatch and srun get: the one place where this is translated.

    cluster.train.partition=a ...   --> #SBATCH --partition=a ...
    cluster.train.sbatch            --> further #SBATCH lines (launcher/config/sbatch_options.py says which)
    cluster.train.env, setup        --> lines before srun, after those that wait for the run folder
    cluster.train.container, python --> the command that runs Python on the node, or srun's --container-*
"""

from __future__ import annotations

import functools
import itertools
import os
import shlex
import sys
from pathlib import Path

from launcher.config.cluster import ContainerKind, GpuRequest, RoleConfig, as_sbatch, asks_for_gpus
from launcher.config.sbatch_options import KEYS
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import JobSpec
from launcher.share import SLURM
from workers.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
WAIT, STAY = SLURM / "wait_for_run_folder.sh", SLURM / "stay_after_failure.sh"
MAX_LINKS = 10_000
"""Files of a folder that are looked at for links out of it."""


def python_path() -> str:
    """This shell's PYTHONPATH as it is for every process, wherever that runs; this code first."""
    given = [str(Path(folder).expanduser().absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return os.pathsep.join(dict.fromkeys([str(ROOT), *given]))


def sbatch_options(spec: JobSpec, part: RoleConfig) -> dict[str, str | bool]:
    """The #SBATCH lines that come from the role's config; an empty value there is no line here."""
    options: dict[str, str | bool] = {name: value for name in KEYS if (value := getattr(part, name.replace("-", "_"))) and name != "time"}
    kind = f"gpu:{part.gpu_type}:" if part.gpu_type else "gpu:"
    if part.gpus is GpuRequest.gres:
        options["gres"] = f"{kind}{spec.devices_per_node}"
    elif part.gpus is not GpuRequest.none:
        number = spec.devices_per_node if part.gpus is GpuRequest.gpus_per_node else spec.devices_per_node // spec.tasks_per_node
        options[part.gpus.value.replace("_", "-")] = f"{kind.removeprefix('gpu:')}{number}"
    for given, value in part.sbatch.items():
        if value.lower() != "false":
            options[as_sbatch(given)] = True if value.lower() in ("", "true") else value
    return {name: value if value is True else str(value) for name, value in options.items()}


def setup_lines(spec: JobSpec, part: RoleConfig) -> list[str]:
    """The lines before srun: threads, PYTHONPATH as it was at launch, variables, then the user's lines, then where Python finds this code."""
    # sbatch passes on the PYTHONPATH of the shell that submits: later submissions (resume, watch) come from other shells.
    given = [f"export PYTHONPATH={shlex.quote(part.pythonpath)}"] if part.pythonpath else []
    # Until the workers set their own number: numpy's libraries start a thread for each core of the node.
    # With sbatch --export=NONE, as some sites have it, srun would pass on nothing of what stands here.
    return [f"export SLURM_EXPORT_ENV=ALL OMP_NUM_THREADS={spec.num_threads}", *given,
            *(f"export {name}={shlex.quote(value)}" for name, value in part.env.items()), *part.setup,
            f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"]


def waiting_lines(run: RunFolder, config: FullConfig) -> list[str]:
    """The lines before all others: wait for the run folder, then log into it; and do not end at once where nothing begins."""
    return [f"RUN={shlex.quote(str(run.path))} LIMIT_S={60 * config.run.outage_minutes:.0f} STAY_S={config.cluster.stay_s:.0f}",
            *(path.read_text("utf-8").rstrip() for path in (WAIT, STAY))]


def mounted(config: FullConfig, run: RunFolder) -> list[str]:
    """The folders that a container must show: this code, the run folder, and what the run reads, wherever its files link to."""
    read = (config.model.path, config.algorithm.teacher, config.reward.model.path, *config.data.paths())
    named = [path for text in read if text and (path := Path(text).expanduser().absolute()).exists()]
    other = [config.weights.dir] if config.weights.dir not in ("auto", "run") else []
    contained = any(config.cluster.role(role).container.kind is not ContainerKind.none for role in config.roles)
    linked = dict.fromkeys(folder for path in named for folder in _linked(path)) if contained else ()
    return [str(ROOT), str(run.path), *map(str, named), *linked, *other]


@functools.lru_cache
def _linked(path: Path) -> tuple[str, ...]:
    """The folders to which links in `path` lead (of the first `MAX_LINKS` entries) and that it does not hold, as they are named and as they really
    are: files of the Hugging Face hub's cache are such links."""
    links = [entry for entry in itertools.chain([path], itertools.islice(path.rglob("*"), MAX_LINKS)) if entry.is_symlink()]
    targets = [target for link in links for target in (Path(os.path.normpath(link.parent / os.readlink(link))), link.resolve())]
    folders = dict.fromkeys(target if target.is_dir() else target.parent for target in targets if target.exists())
    return tuple(str(folder) for folder in folders if not any(folder.is_relative_to(held) for held in (path, path.resolve())))


def _mounts(part: RoleConfig, folders: list[str]) -> str:
    return ",".join(dict.fromkeys([*(f"{folder}:{folder}" for folder in folders), *part.container.mounts]))


def python_command(part: RoleConfig, folders: list[str]) -> str:
    """The command, for a shell, that runs Python on the node; `folders` must be visible in a container."""
    container = part.container
    python = part.python or (sys.executable if container.kind is ContainerKind.none else "python3")
    if container.kind is not ContainerKind.apptainer:
        return shlex.quote(python)
    gpus = [] if part.gpus is GpuRequest.none and not asks_for_gpus(part.sbatch) else ["--nv"]
    return shlex.join(["apptainer", "exec", *gpus, "--bind", _mounts(part, folders), *container.args, container.image, python])


def srun_arguments(part: RoleConfig, folders: list[str], as_one: bool = True) -> list[str]:
    """What srun is told besides what sbatch was. `as_one`: a task that breaks ends the others."""
    arguments = [f"--kill-on-bad-exit={int(as_one)}", "--wait=0", "--open-mode=append"]
    if part.cpus_per_task:
        arguments.append(f"--cpus-per-task={part.cpus_per_task}")  # since SLURM 22.05 srun does not take this over from sbatch
    if part.container.kind is ContainerKind.pyxis:
        arguments += [f"--container-image={part.container.image}", f"--container-mounts={_mounts(part, folders)}", *part.container.args]
    return arguments + part.srun_args


def local_command(run: RunFolder) -> str:
    """The command that submitit's local executor starts for each element."""
    return shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(run.jobs)])
