"""`headway resume RUN`: go on with a run that was drained, was stopped, or failed, in the same folder, from its newest checkpoint.

    outcome.json -> outcome.1.json, stop -> gone, new jobs submitted --> they find the newest checkpoint by themselves

Of two that resume a run at the same time one is refused: supervisor.lock is held until all is submitted, then left to whoever watches.
Without a checkpoint the run starts again at step 0. `run.num_steps=N` and `run.max_hours=H` may be given to go on for longer (or to end with the
steps that are done: their evaluation and model are made), `selftest.action=warn` where the self-test has ended it, `workflow.max_rejected=SHARE`
where too many groups were rejected, `alarms.stop=[NAME,...]` where an alarm has, `trainer.device=cpu` or `cuda` where the other one is there now,
`trainer.microbatch_tokens=N` where devices have less memory; on SLURM also where and how jobs run (`cluster.train.partition=...`): whether the run
fits there is then looked at as at its start.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import time

import msgspec
from rich.console import Console

from launcher.arguments import FAILED, Parser, add_run, open_run, refuse
from launcher.config.schema import FullConfig, as_yaml, read_full
from launcher.interrupts import Interrupted, interruptible
from launcher.jobs.job_records import unanswered
from launcher.jobs.job_specs import JobSpec, job_specs
from launcher.jobs.liveness import host_elsewhere, on_slurm, still_there
from launcher.jobs.sbatch_script import python_path
from launcher.launch.changeable import CAN, CHANGEABLE, changed
from launcher.monitoring.observation import Observer
from launcher.monitoring.supervisor import lock, read_excluded, remaining, with_excluded
from launcher.monitoring.supervisor_policy import UNANSWERED_S
from launcher.preflight import device_choice
from launcher.slurm.accounting import last_sign, newest_checkpoint, training_hours
from launcher.views import evaluation_view
from launcher.views.terminal import terminal
from workers.config import ClusterKind, ConfigError, Schedule
from workers.run import checkpoints, incarnations
from workers.run.files import is_full, read_lines, write_atomic
from workers.run.folder import RunFolder, RunFolderError
from workers.slurm.command import SlurmError


def refusal(run: RunFolder, config: FullConfig, now: float) -> str:
    """Why the run cannot go on; '' if it can. Raises `SlurmError`."""
    outcome, checkpoint = run.ended(), newest_checkpoint(run)
    if host := host_elsewhere(run):
        return f"{run.path}: runs on {host}; only what has ended can be resumed. Run: headway stop --drain {run.path}"
    if left := len(still_there(run)):
        what = "elements in the queue" if on_slurm(run) else "living processes"
        return f"{run.path}: has {left} {what}; only what has ended can be resumed. Run: headway stop --drain {run.path}"
    if outcome is not None and outcome["state"] == "finished":
        return f"{run.path}: is complete; there is nothing to resume. Start a new run, for example from {run.final_model}"
    if checkpoint is not None and checkpoint.step > config.run.num_steps and (step := _whole_step(run, config)) > config.run.num_steps:
        return (f"run.num_steps={config.run.num_steps}: must be at least the {step} steps that are done, after which the run ends. "
                f"Run: headway resume {run.path} run.num_steps=...")
    lost = [array for array in unanswered(run) if now - array["submitted"] < UNANSWERED_S] if on_slurm(run) else []
    if lost:
        return (f"{run.path}: sbatch gave no clear answer for {lost[-1]['name']}, and SLURM may queue it yet. "
                f"Try again in {UNANSWERED_S - now + lost[-1]['submitted']:.0f} s")
    used = _hours_used(run, now)
    if used >= config.run.max_hours:
        return (f"run.max_hours={config.run.max_hours:g}: must be more than the {used:.2f} h that training has had. "
                f"Run: headway resume {run.path} run.max_hours=...")
    return ""


def _hours_used(run: RunFolder, now: float) -> float:
    """Hours that training has had. Raises `SlurmError`."""
    if on_slurm(run):
        return Observer(run).look(now).training_hours
    return training_hours(incarnations.history(run), now, seen=last_sign(run, newest_checkpoint(run)))


def _whole_step(run: RunFolder, config: FullConfig) -> int:
    """The step that training goes on from: that of the newest checkpoint whose files are what was written, as the trainer looks for it (one rank by
    their digests, several by their sizes); 0 without any. Raises `ConfigError` where there are some, but none is whole."""
    whole = checkpoints.newest(run, by_digests=config.plan().num_train_devices == 1)
    if whole is None and (published := checkpoints.all_checkpoints(run)):
        raise ConfigError(checkpoints.none_whole(run, published))
    return whole.version.step if whole else 0


def reopen(run: RunFolder) -> None:
    """Make the folder that of a run which has not ended; the outcome is kept under another name. Nothing of the run may live."""
    if run.ended() is not None:
        run.keep_room()
        number = 1 + len(list(run.path.glob("outcome.*.json")))
        run.outcome.rename(run.path / f"outcome.{number}.json")
    run.stop.unlink(missing_ok=True)
    run.launcher_lock.unlink(missing_ok=True)  # of a launcher that died; held by nobody, it would end the run
    for address in run.rendezvous.iterdir():  # of coordinators that are gone: workers that start first would look for them there
        shutil.rmtree(address) if address.is_dir() else address.unlink()
    for crash in run.evaluation.glob("crash.*"):  # what failed before does not count any more
        crash.unlink()
    for done in run.evaluation.glob("*.done"):  # prompts that failed are tried again
        lines = [line for path in run.evaluation.glob(f"{done.stem}.*.jsonl") for line in read_lines(path)]
        if {line["index"] for line in lines} - {line["index"] for line in lines if "failed" not in line}:
            done.unlink()


def _plan(run: RunFolder, config: FullConfig, console: Console) -> tuple[FullConfig, tuple[JobSpec, ...]]:
    """What is submitted: on SLURM without excluded nodes, for the hours that are left, and checked as at the start. Raises `ConfigError`."""
    from launcher.preflight import check  # imports submitit

    device_choice.settle(config)  # it may be another machine than the one that began; on SLURM, another device
    if config.cluster.kind is ClusterKind.local:
        return config, job_specs(config.plan(), config, run)
    config = with_excluded(config, read_excluded(run))
    rest = remaining(config, Observer(run).look(time.time()).training_hours)
    return config, check.check(job_specs(rest.plan(), rest, run), config, run, console.print)


def _look_there(run: RunFolder, config: FullConfig, specs: tuple[JobSpec, ...], console: Console) -> None:
    """The run goes on with other memory, or on other nodes, than it began with: whether it fits there, and what these say. Raises `ConfigError`."""
    from launcher.launch.before_start import in_shared_memory, tell_memory  # this imports what is predicted of a run
    from launcher.preflight.node_probe import probing

    tell_memory(config, run, console, changeable=CHANGEABLE)
    if config.cluster.kind is ClusterKind.local:
        return
    with probing(specs, config, run, in_shared_memory(config, run)) as notes:
        for note in notes():
            console.print(note, soft_wrap=True)


def _start(run: RunFolder, config: FullConfig, specs: tuple[JobSpec, ...], console: Console) -> int:
    """On SLURM: submit, and no more. Here: stay with the run to its end."""
    from launcher.launch.local import start_here  # these import submitit
    from launcher.launch.on_slurm import start_on_slurm

    if config.cluster.kind is ClusterKind.slurm:
        detached = copy.deepcopy(config)
        detached.launch.detach = True
        return start_on_slurm(run, detached, specs, console, None)
    os.environ["PYTHONPATH"] = python_path()
    return start_here(run, config, specs, console)


def resume(run: RunFolder, config: FullConfig, console: Console, elsewhere: bool = False) -> int:
    """Go on with the run; returns the exit status. `elsewhere`: whether what it gets may be other memory or other nodes than before.
    Raises `ConfigError`, `SlurmError`, `Interrupted`."""
    if why := refusal(run, config, time.time()):
        return refuse(why)
    with interruptible():
        with lock(run, console.print) as mine:
            if not mine:
                where = f" on {host} (or was, a minute ago)" if (host := run.kept_elsewhere()) else ""
                return refuse(f"{run.path}: a `headway watch` is still keeping it{where}, or another `headway resume` is under way. "
                              "End the first with Ctrl-C, or wait for the second, then try again")
            if why := refusal(run, config, time.time()):  # another one may have resumed it since
                return refuse(why)
            planned, specs = _plan(run, config, console)
            if elsewhere:
                _look_there(run, planned, specs, console)
            step = _whole_step(run, config)
            write_atomic(run.config, msgspec.json.format(msgspec.json.encode(config.for_workers())))
            write_atomic(run.config_yaml, as_yaml(config))
            reopen(run)
            console.print(evaluation_view.goes_on(evaluation_view.progress(run), run.path) or "nothing is judged yet" if config.evaluates
                          else f"the run goes on from the checkpoint of step {step}" if step
                          else "there is no checkpoint: the run starts again at step 0")
            status = _start(run, planned, specs, console)
        return status if config.cluster.kind is ClusterKind.local or config.launch.detach else _watch(run, config, console)


def _watch(run: RunFolder, config: FullConfig, console: Console) -> int:
    from launcher.monitoring.watch import supervise_and_follow

    try:
        return supervise_and_follow(run, console, config.launch.plain or not console.is_terminal)
    except Interrupted as error:
        console.print(f"\n{error.words}: the run goes on without this command", soft_wrap=True)
        return 0


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 2 where the run cannot be resumed."""
    parser = add_run(Parser(prog="headway resume", description=(__doc__ or "").splitlines()[0]))
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help=CAN)
    parser.add_argument("--detach", action="store_true", help="return as soon as it is submitted")
    parser.add_argument("--plain", action="store_true", help="lines instead of the live view")
    options = parser.parse_intermixed_args(arguments)
    run = open_run(options.run)
    try:
        before = read_full(run)
        config = changed(before, options.changes)
        for role in config.roles:
            if (size := before.cluster.role(role).gpu_memory_gb) and not config.cluster.role(role).gpu_memory_gb:
                print(f"note: cluster.{role}.gpu_memory_gb={size:g} was of other GPUs, and is left out. Give it with the partition, if need be")
        if config.run.num_steps != before.run.num_steps and config.trainer.lr_schedule is not Schedule.constant:
            print(f"note: trainer.lr_schedule={config.trainer.lr_schedule.value} ends with step {config.run.num_steps} now, not "
                  f"{before.run.num_steps}: the learning rate is another one from the next step on")
        config.launch.detach, config.launch.plain = options.detach, options.plain
        return resume(run, config, terminal(), any(change.startswith(("cluster.", "trainer.")) for change in options.changes))
    except (ConfigError, RunFolderError, SlurmError) as error:
        return refuse(str(error))
    except OSError as error:
        if not is_full(error):
            raise
        return refuse(f"{run.full_disk()}. Free some space, then try again")
    except Interrupted as error:
        print(f"headway: ended by {error.words}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
