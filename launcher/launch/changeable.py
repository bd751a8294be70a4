"""What of a run's config may be another when it goes on: `headway resume RUN KEY=VALUE`. Pure."""

from __future__ import annotations

import copy
import enum
import functools
import json
from collections.abc import Callable

from launcher.config.schema import FullConfig
from workers.config import ClusterKind, ConfigError, Device, SelfTestAction


def _lines(value: str) -> list[str]:
    """Lines of shell, as a JSON list. Raises ValueError."""
    found = json.loads(value)
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        raise ValueError("no list of lines")
    return found


CHANGEABLE: dict[str, Callable[[str], object]] = {
    "run.num_steps": int, "run.max_hours": float, "selftest.action": SelfTestAction, "workflow.max_rejected": float, "trainer.device": Device,
    "trainer.microbatch_tokens": int, "run.stall_minutes": float, "run.outage_minutes": float, "cluster.signal_delay_s": int,
    "alarms.stop": lambda value: [name for name in value.strip("[]").split(",") if name]}
OF_JOBS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("partition", "account", "qos", "time", "constraint", "nodelist", "exclude", "reservation", "mem", "mem_per_gpu"), str),
    "gpu_type": str, "gpu_memory_gb": float, "python": str, "setup": _lines,
    **dict.fromkeys(("cpus_per_gpu", "cpus_per_task", "devices_per_node"), int)}
"""Of a role (cluster.train.time): where and how its next jobs run, which is nothing to the run."""
CAN = f"{', '.join(CHANGEABLE)} and, on SLURM, cluster.ROLE.KEY of {', '.join(OF_JOBS)}"


def changed(config: FullConfig, changes: list[str]) -> FullConfig:
    """The config with the changes ('run.num_steps=200'). Raises `ConfigError`."""
    result = copy.deepcopy(config)
    for change in changes:
        key, _, value = change.partition("=")
        choices = CHANGEABLE.get(key) or _of_jobs(result, key)
        if choices is None:
            raise ConfigError(f"{change}: cannot be changed when a run goes on. Only {CAN} can; start a new run for the rest")
        *parts, name = key.split(".")
        try:
            setattr(functools.reduce(getattr, parts, result), name, choices(value))
        except ValueError as error:
            raise ConfigError(f"{change}: not {_kind(choices)}. Give {key}=VALUE") from error
    result.trainer.warmup_steps = min(result.trainer.warmup_steps, result.run.num_steps)  # a run may end in it
    result.algorithm.critic_warmup_steps = min(result.algorithm.critic_warmup_steps, result.run.num_steps)
    for role in config.roles if config.cluster.kind is ClusterKind.slurm else ():
        own = {change.partition("=")[0].removeprefix(f"cluster.{role}.") for change in changes if change.startswith(f"cluster.{role}.")}
        if own & {"partition", "gpu_type"} and "gpu_memory_gb" not in own:  # it was that of the GPUs there
            result.cluster.role(role).gpu_memory_gb = 0.0
    result.check()
    return result


def _kind(choices: Callable[[str], object]) -> str:
    if isinstance(choices, enum.EnumMeta):
        return "one of " + ", ".join(choices.__members__)
    return 'a list of lines, as ["LINE", "LINE"]' if choices is _lines else "a number"


def _of_jobs(config: FullConfig, key: str) -> Callable[[str], object] | None:
    """What reads a value of `key`, where that says how jobs run that this run has."""
    section, _, rest = key.partition(".")
    role, _, name = rest.partition(".")
    return OF_JOBS.get(name) if section == "cluster" and config.cluster.kind is ClusterKind.slurm and role in config.roles else None
