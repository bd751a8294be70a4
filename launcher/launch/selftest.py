"""`headway selftest [overrides] [--keep]`: do the log-probs of engine and trainer agree, in a short run of a config?

    config --learning rate 0, two steps, small batches, no evaluation--> a run of its own --> metrics.jsonl, outcome.json --> verdict, exit status

    step 1   tokens that the engines sampled with the starting weights, as they were first published
    step 2   tokens of the weights after an update that leaves them as they are: they have gone the whole way to the engines

With eta = 0 every token is of the weights that the trainer holds, so that all are compared. Every other run tests itself too, as far as tokens
of the present weights come to it (workers/trainer/selftest/self_test.py); this one says so beforehand.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.config.schema import FullConfig
from launcher.jobs.liveness import still_there
from launcher.launch.on_slurm import launch
from launcher.views.terminal import terminal
from workers.config import Control, Schedule, SelfTestAction, Server, require
from workers.run.files import read_lines
from workers.run.folder import RunFolder

MAX_GROUPS = 8
MAX_SAMPLES = 4
MAX_HOURS = 2.0
STEPS = ("the starting weights", "after an update at learning rate 0")


def selftest(config: FullConfig) -> int:
    """Test a checked config; exit status 0 where engine and trainer agree, else 1. Raises as `launch`."""
    keep = config.launch.keep or bool(config.run.dir)
    shorten(config)
    status = launch(config)
    if config.launch.dry_run:
        return status
    run = RunFolder(Path(config.run.dir))
    agreed, lines = verdict(read_lines(run.metrics), config)
    passed = agreed and status == 0
    remove = passed and not keep and not still_there(run)
    if remove:
        shutil.rmtree(run.path)
    folder = "removed (--keep keeps it)" if remove else str(run.path)
    console = terminal()
    for line in [*lines, f"self-test {'passed' if passed else 'FAILED'}; run folder {folder}"]:
        console.print(line, soft_wrap=True)
    return 0 if passed else 1


def shorten(config: FullConfig) -> None:
    """Make of a config the shortest run that tests it. Raises `ConfigError` where there is nothing to test."""
    require(not config.supervised, "run.kind", config.run.kind.value, "has no self-test", "No engine takes part in a supervised run")
    require(not config.evaluates, "run.kind", config.run.kind.value, "has no self-test", "No trainer takes part in an evaluation")
    require(config.engine.server is not Server.synthetic, "engine.server", config.engine.server.value, "has no self-test",
            "It holds no model whose log-probs could be compared")
    require(not config.launch.detach, "launch.detach", True, "must be false for a self-test", "Its verdict is told at its end")
    run, trainer, algorithm = config.run, config.trainer, config.algorithm
    run.name, run.num_steps, run.target_accuracy, run.max_hours = f"{run.name[:70]}-selftest", len(STEPS), None, min(run.max_hours, MAX_HOURS)
    trainer.lr = trainer.min_lr = algorithm.critic_lr = 0.0
    trainer.lr_schedule, trainer.warmup_steps, algorithm.critic_warmup_steps = Schedule.constant, 0, 0
    # At least one group for each of the engines.
    trainer.batch_groups, trainer.num_minibatches = max(min(trainer.batch_groups, MAX_GROUPS), config.plan().num_replicas), 1
    fixed = config.rollout.concurrency
    config.rollout.concurrency = max(fixed, trainer.batch_groups) if isinstance(fixed, int) else trainer.batch_groups
    config.workflow.group_size = min(config.workflow.group_size, MAX_SAMPLES)
    staleness = config.staleness
    staleness.eta, staleness.target, staleness.control, staleness.min_ess, config.tracking.to = 0, None, Control.eta, None, []
    config.evaluation.enabled, config.evaluation.every_steps = False, 0
    config.checkpoint.every_steps, config.checkpoint.every_minutes = 0, 0.0
    trainer.export_final, trainer.export_every_steps = False, 0
    if config.self_test_action is SelfTestAction.off:
        config.selftest.action = SelfTestAction.fail
    config.check()


def verdict(steps: Sequence[dict], config: FullConfig) -> tuple[bool, list[str]]:
    """Whether engine and trainer agreed in every one of `STEPS`, and what was found, in words."""
    agreed, lines = True, []
    for number, what in enumerate(STEPS):
        gap = steps[number].get("logprob_gap_mean") if number < len(steps) else None
        agreed = agreed and gap is not None and gap <= config.mean_tolerance
        if gap is None:
            lines.append(f"{what}: the run did not get so far, see above")
            continue
        lines.append(f"{what}: log-probs differ by {gap:.2g} nats on average over {steps[number]['num_tokens_compared']:.0f} tokens, "
                     f"{steps[number]['logprob_gap_max']:.2g} at most")
    lines.append(f"{config.mean_tolerance:g} are allowed on average (selftest.mean_tolerance), with engine.dtype={config.engine.dtype.value}, "
                 f"trainer.dtype={config.trainer.dtype.value}, weights.transport={config.weights.transport.value}")
    return agreed, lines
