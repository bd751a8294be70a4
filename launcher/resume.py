"""`headway resume RUN`: go on with a run that was drained, was stopped, or failed, in the same folder, from its newest checkpoint.

    outcome.json -> outcome.1.json, stop -> gone, new jobs submitted --> they find the newest checkpoint by themselves

Without a checkpoint the run starts again at step 0. `run.num_steps=N` and `run.max_hours=H` may be given to go on for longer.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time

import msgspec
from rich.console import Console

from launcher.accounting import newest_checkpoint, training_hours
from launcher.arguments import USER_ERROR, add_run, open_run, refuse
from launcher.interrupts import Interrupted, interruptible
from launcher.jobs import JobSpec, job_specs
from launcher.keeping import lock, read_excluded, remaining, with_excluded
from launcher.living import living, on_slurm
from launcher.schema import FullConfig, as_yaml, read_full
from launcher.script import ROOT
from workers import incarnations
from workers.config import ClusterKind, ConfigError
from workers.files import write_atomic
from workers.rundir import RunFolder
from workers.slurm_command import SlurmError

CHANGEABLE = {"run.num_steps": int, "run.max_hours": float}


def changed(config: FullConfig, changes: list[str]) -> FullConfig:
    """The config with the changes ('run.num_steps=200'). Raises `ConfigError`."""
    result = copy.deepcopy(config)
    for change in changes:
        key, _, value = change.partition("=")
        if key not in CHANGEABLE:
            raise ConfigError(f"{change}: cannot be changed when a run goes on. Only {' and '.join(CHANGEABLE)} can; start a new run for the rest")
        try:
            setattr(result.run, key.removeprefix("run."), CHANGEABLE[key](value))
        except ValueError as error:
            raise ConfigError(f"{change}: not a number. Give {key}=N") from error
    result.check()
    return result


def refusal(run: RunFolder, config: FullConfig, now: float) -> str:
    """Why the run cannot go on; '' if it can. Raises `SlurmError`."""
    outcome, checkpoint = run.ended(), newest_checkpoint(run)
    if left := len(living(run)):
        what = "elements in the queue" if on_slurm(run) else "living processes"
        return f"{run.path}: has {left} {what}; only what has ended can be resumed. Run: headway stop --drain {run.path}"
    if outcome is not None and outcome["state"] == "finished":
        return f"{run.path}: is complete; there is nothing to resume. Start a new run, for example from {run.final_model}"
    if checkpoint is not None and checkpoint.step >= config.run.num_steps:
        return (f"run.num_steps={config.run.num_steps}: must be more than the {checkpoint.step} steps that are done. "
                f"Run: headway resume {run.path} run.num_steps=...")
    used = training_hours(incarnations.history(run), now)
    if on_slurm(run) and used >= config.run.max_hours:
        return (f"run.max_hours={config.run.max_hours:g}: must be more than the {used:.1f} h that training has had. "
                f"Run: headway resume {run.path} run.max_hours=...")
    return ""


def reopen(run: RunFolder) -> None:
    """Make the folder that of a run which has not ended; the outcome is kept under another name. Nothing of the run may live."""
    if run.ended() is not None:
        number = 1 + len(list(run.path.glob("outcome.*.json")))
        run.outcome.rename(run.path / f"outcome.{number}.json")
    run.stop.unlink(missing_ok=True)
    run.launcher_lock.unlink(missing_ok=True)  # of a launcher that died; held by nobody, it would end the run
    for address in run.rendezvous.iterdir():  # of coordinators that are gone: workers that start first would look for them there
        address.unlink()


def _plan(run: RunFolder, config: FullConfig, console: Console) -> tuple[FullConfig, tuple[JobSpec, ...]]:
    """What is submitted: on SLURM without excluded nodes, for the hours that are left, and checked as at the start. Raises `ConfigError`."""
    from launcher import preflight  # imports submitit

    if config.cluster.kind is ClusterKind.local:
        return config, job_specs(config.plan(), config, run)
    config = with_excluded(config, read_excluded(run))
    rest = remaining(config, training_hours(incarnations.history(run), time.time()))
    return config, preflight.check(job_specs(rest.plan(), rest, run), config, run, console.print)


def _start(run: RunFolder, config: FullConfig, specs: tuple[JobSpec, ...], console: Console) -> int:
    from launcher.attached import start_here  # these import submitit
    from launcher.launch import start_on_slurm

    if config.cluster.kind is ClusterKind.slurm:
        return start_on_slurm(run, config, specs, console, None)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    return start_here(run, config, specs, console)


def resume(run: RunFolder, config: FullConfig, console: Console) -> int:
    """Go on with the run; returns the exit status. Raises `ConfigError`, `SlurmError`, `Interrupted`."""
    if why := refusal(run, config, time.time()):
        return refuse(why)
    planned, specs = _plan(run, config, console)
    with lock(run) as mine:
        if not mine:
            return refuse(f"{run.path}: a `headway watch` is still keeping it. End that one with Ctrl-C, then try again")
        checkpoint = newest_checkpoint(run)
        write_atomic(run.config, msgspec.json.format(msgspec.json.encode(config.for_workers())))
        write_atomic(run.config_yaml, as_yaml(config))
        reopen(run)
    console.print("there is no checkpoint: the run starts again at step 0" if checkpoint is None
                  else f"the run goes on from the checkpoint of step {checkpoint.step}")
    with interruptible():
        return _start(run, planned, specs, console)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 2 where the run cannot be resumed."""
    parser = add_run(argparse.ArgumentParser(prog="headway resume", description=(__doc__ or "").splitlines()[0]))
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help=f"{' or '.join(CHANGEABLE)}")
    parser.add_argument("--detach", action="store_true", help="return as soon as it is submitted")
    parser.add_argument("--plain", action="store_true", help="lines instead of the live view")
    options = parser.parse_intermixed_args(arguments)
    run = open_run(options.run)
    try:
        config = changed(read_full(run), options.changes)
        config.launch.detach, config.launch.plain = options.detach, options.plain
        return resume(run, config, Console(markup=False, highlight=False))
    except (ConfigError, SlurmError) as error:
        return refuse(str(error))
    except Interrupted as error:
        print(f"headway: ended by {error}", file=sys.stderr)
        return USER_ERROR - 1


if __name__ == "__main__":
    sys.exit(main())
