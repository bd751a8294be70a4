"""From a checked config to a running run: preflight, folder, preparation, submission, and then watching it or leaving it alone.

On this machine the launcher stays with its run (local.py). On SLURM a run needs no launcher: Ctrl-C stops watching only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from secrets import token_hex

from rich.console import Console

from launcher.config.cluster import ContainerKind, as_sbatch
from launcher.config.gpu_types import TOKENS_UNKNOWN
from launcher.config.schema import FullConfig
from launcher.interrupts import Interrupted, interruptible
from launcher.jobs.job_specs import JobSpec, job_specs
from launcher.jobs.sbatch_script import python_path
from launcher.jobs.submit import describe, submit
from launcher.launch.before_start import in_shared_memory, model_folder, prepare, tell_memory, tell_speed
from launcher.launch.local import start_here
from launcher.monitoring.watch import supervise_and_follow
from launcher.preflight import check, device_choice, fake_step
from launcher.preflight.node_probe import probing
from launcher.slurm import queries
from launcher.slurm.site import settle_nodes
from launcher.sweep import Sweep
from launcher.views import plan_advice
from launcher.views.terminal import terminal
from workers import node_look
from workers.config import ClusterKind, Device, SelfTestAction, require
from workers.run.files import is_full
from workers.run.folder import RunFolder, RunFolderError
from workers.slurm.command import SlurmError


def new_run_path(config: FullConfig, sweep: Sweep | None = None) -> Path:
    """`run.dir`, or a new name below runs/ or the sweep's folder. Raises `ConfigError`."""
    require(sweep is None or not config.run.dir, "run.dir", config.run.dir, "cannot be given with -m: each run of a sweep has a folder of its own",
            "Leave it out; hydra.sweep.dir=FOLDER says where these are made")
    if config.run.dir:
        return Path(config.run.dir).expanduser().absolute()
    if sweep is not None:
        return sweep.run_path(config.run.name)
    return Path("runs").absolute() / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{token_hex(2)}"


def absolute(path: str) -> str:
    """A user's path, the same for every process wherever it runs."""
    return str(Path(path).expanduser().absolute()) if path else path


def dry_run(config: FullConfig, run: RunFolder, specs: tuple[JobSpec, ...], told: bool, cpu_gflops: float, console: Console) -> int:
    """Show what would be submitted, and look at all that a run is prepared from, in a folder that is gone afterwards. Raises `ConfigError`."""
    for spec in specs:
        console.print(describe(spec, config, run), soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="headway-dry-run-") as folder:
        prepare(trial := RunFolder.create(Path(folder) / "run"), config, only_look=True)
        if not told:
            tell_memory(config, trial, console)
            tell_speed(config, trial, cpu_gflops, console)
        if config.launch.fake_step:
            for line in fake_step.ask(config, trial.path, model_folder(config, trial)):
                console.print(f"      {line}", soft_wrap=True)
    return 0


def settle(config: FullConfig, run: RunFolder, console: Console) -> float:
    """Fill in what follows from this shell and from the cluster, and tell the plan; returns what this machine's CPU was seen to compute (0: not
    tried). Raises `ConfigError`, `SlurmError`."""
    config.run.dir = str(run.path)
    for part in (config.data, *config.data.parts.values()):
        part.path, part.heldout_path = absolute(part.path), absolute(part.heldout_path)
    if config.weights.dir not in ("auto", "run"):
        config.weights.dir = absolute(config.weights.dir)
    if os.sep in config.engine.python:  # and not a name that is looked up
        config.engine.python = absolute(config.engine.python)
    console.print(f"plan: {config.plan().describe()}")
    settled = device_choice.settle(config)
    console.print(f"      {settled.told}", soft_wrap=True)
    if config.tokens_chosen and config.cluster.kind is ClusterKind.local and config.trainer.device is Device.cuda:
        config.trainer.microbatch_tokens = max(TOKENS_UNKNOWN, config.engine.context_length)  # until it is known how much the GPU has
    console.print(f"      {plan_advice.generation(config)}", soft_wrap=True)
    if config.launch.dry_run and config.trainer.device is Device.cuda and not config.evaluates:
        console.print(f"      {node_look.accelerators()}, in this environment", soft_wrap=True)
    for warning in plan_advice.warnings(config, plan_advice.has_chat_template(Path(config.model.path).expanduser())):
        console.print(warning, style="bold yellow", soft_wrap=True)
    if config.rewards_apart:
        console.print(f"      rewards: {config.reward.num_elements} element(s) x {config.reward.num_processes} process(es)")
    if config.self_test_action is SelfTestAction.off and not config.supervised and not config.evaluates:
        why = "engine.server=synthetic holds no model" if config.selftest.action is SelfTestAction.auto else "selftest.action=off"
        console.print(f"      no self-test of the engines' log-probs: {why}", soft_wrap=True)
    if config.cluster.kind is ClusterKind.slurm:
        for job in map(config.cluster.role, config.roles):
            job.pythonpath = job.pythonpath or python_path()
            if job.container.kind is ContainerKind.none:
                job.python = job.python or sys.executable  # whoever submits more of it later, from whatever environment
            if "chdir" not in map(as_sbatch, job.sbatch):  # relative paths of the config, for jobs that are submitted from elsewhere later
                job.sbatch["chdir"] = os.getcwd()
            job.exclude, job.nodelist = (absolute(nodes) if "/" in nodes else nodes for nodes in (job.exclude, job.nodelist))  # files, for sbatch
        if told := _settle_nodes(config):
            console.print(f"      {told}", soft_wrap=True)
    return settled.cpu_gflops


def _settle_nodes(config: FullConfig) -> str:
    if "train" not in config.roles:
        return ""
    if not config.launch.dry_run:
        return settle_nodes(config)
    try:
        return settle_nodes(config, patience_s=0)
    except SlurmError:  # a dry run needs no cluster, and has said so
        return "nobody says how many GPUs a node has: training is shown on one. Where that is too small, give allocation.devices_per_node=N"


def launch(config: FullConfig, sweep: Sweep | None = None) -> int:
    """Start a run, and unless detached stay with it to its end; returns the exit status. Raises `ConfigError`, `RunFolderError`,
    `SlurmError`, and `Interrupted` where a signal ended it."""
    console = terminal()
    run = RunFolder(new_run_path(config, sweep))
    on_slurm = config.cluster.kind is ClusterKind.slurm
    with interruptible(), queries.asked_once() if on_slurm and config.launch.dry_run else contextlib.nullcontext("") as silent:
        if silent:
            console.print(f"not checked by SLURM, which gives no answer here: {silent}", soft_wrap=True)
        cpu_gflops = settle(config, run, console)
        told = tell_memory(config, run, console)
        if config.launch.dry_run:
            tell_speed(config, run, cpu_gflops, console)
        specs: tuple[JobSpec, ...] = job_specs(config.plan(), config, run)
        if config.launch.dry_run:
            return dry_run(config, run, specs, told, cpu_gflops, console)
        if on_slurm:
            specs = check.check(specs, config, run, lambda text: console.print(text, soft_wrap=True))
        else:
            check.check_here(config)
        RunFolder.create(run.path)
        try:
            # Jobs and the preparation find the packages wherever this command was started.
            os.environ["PYTHONPATH"] = python_path()
            probe = on_slurm and (sweep is None or not sweep.runs())  # the runs of a sweep are alike
            with probing(specs, config, run, in_shared_memory(config, run)) if probe else contextlib.nullcontext(list) as notes:
                prepare(run, config)
                if not told:  # a model that is made on the spot
                    tell_memory(config, run, console)
                for note in notes():
                    console.print(note, soft_wrap=True)
        except BaseException as error:
            shutil.rmtree(run.path)  # a run that never began: the corrected command can use the same folder
            if is_full(error):
                raise RunFolderError(f"{run.full_disk()}. Free some space, or choose another run.dir") from error
            raise
        return (start_on_slurm if on_slurm else _start_here)(run, config, specs, console, sweep)


def _start_here(run: RunFolder, config: FullConfig, specs: tuple[JobSpec, ...], console: Console, sweep: Sweep | None) -> int:
    if sweep is not None:
        sweep.add(run)
    return start_here(run, config, specs, console)


def start_on_slurm(run: RunFolder, config: FullConfig, specs: tuple[JobSpec, ...], console: Console, sweep: Sweep | None) -> int:
    """Submit, and watch unless detached; a sweep goes on to its next run at once."""
    after = sweep.after(config.launch.max_concurrent_runs) if sweep is not None else ()
    console.print(f"run folder {run.path}", soft_wrap=True)
    num_earlier = len(run.submission().get("arrays", []))
    try:
        submit(specs, config, run, after)
    except Interrupted as error:
        console.print(f"\n{error.words} during submission: what was submitted has been cancelled")
        raise
    if sweep is not None:
        sweep.add(run)
    for array in run.submission()["arrays"][num_earlier:]:
        console.print(f"{array['role']}: job {array['job_id']}, {array['num_elements']} elements, {array['throttle']} at a time"
                      f"  log {run.jobs}/{array['job_id']}_0_0_log.out", soft_wrap=True)
    say = f"watch it: headway watch {run.path}\nend it:   headway stop {run.path}"
    if config.launch.detach or sweep is not None:
        console.print(say, soft_wrap=True)
        return 0
    try:
        return supervise_and_follow(run, console, config.launch.plain or not console.is_terminal)
    except Interrupted as error:
        console.print(f"\n{error.words}: the run goes on without this command\n{say}", soft_wrap=True)
        return 0
