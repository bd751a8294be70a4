"""The top of a report: what the run was and what came of it, in words and a few large figures. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from launcher.config.device_split import Plan, plan
from launcher.report.ages import Ages
from launcher.report.record import Record, number
from launcher.report.series import values, words
from launcher.views.queue_view import duration
from workers.config import AllocationConfig, ConfigError, ParallelConfig

RECENT = 10


@dataclass(frozen=True)
class Figure:
    """A large figure: what it is, and what stands below it."""

    name: str
    value: str
    below: str = ""


@dataclass(frozen=True)
class Fact:
    """A line of what the run was."""

    name: str
    text: str


def figures(record: Record, ages: Ages, now: float) -> list[Figure]:
    """The large figures, the held-out one first."""
    last = record.steps[-1] if record.steps else {}
    steps = Figure("steps", f"{number(last.get('step')) or 0:.0f}", f"of {record.text('run.num_steps')}" if record.text("run.num_steps") else "")
    shown = [_heldout(record), *([_trend(record, "loss", "loss of a batch")] if record.supervised else [_trend(record, "reward", "reward")]), steps,
             _wall(record, now)]
    if ages.total:
        eta = "?" if ages.eta is None else words(ages.eta)
        beyond = f", {ages.beyond:.1%} of groups older" if ages.beyond else ""
        shown.append(Figure("oldest group trained on", f"{max(ages.counts)} step{'' if max(ages.counts) == 1 else 's'}", f"η = {eta}{beyond}"))
    tokens, generated = number(last.get("tokens_trained")), number(last.get("tokens_generated"))
    if tokens is not None:
        shown.append(Figure("tokens trained", words(tokens), "" if generated is None else f"of {words(generated)} generated"))
    return [figure for figure in shown if figure is not None]


def _heldout(record: Record) -> Figure | None:
    found = values(record.evaluations, record.figure)
    if not found:
        return None
    name = record.figure_name
    count = number(record.evaluations[-1].get("num_prompts"))
    prompts = "" if count is None else f"{count:.0f} {'examples' if record.supervised else 'prompts'} never trained on"
    (first, before), (last, after) = found[0], found[-1]
    if len(found) == 1:
        return Figure(name, f"{before:.3f}", f"after step {words(first)}" + (f", {prompts}" if prompts else ""))
    return Figure(name, f"{before:.3f} → {after:.3f}", f"step {words(first)} → {words(last)}" + (f", {prompts}" if prompts else ""))


def _trend(record: Record, key: str, name: str) -> Figure | None:
    found = [value for _, value in values(record.steps, key)]
    if not found:
        return None
    first, last = found[:RECENT], found[-RECENT:]
    sign = "+" if key == "reward" else ""
    if len(found) < 2 * RECENT:
        return Figure(name, f"{sum(last) / len(last):{sign}.3g}", f"mean of the last {len(last)} steps")
    return Figure(name, f"{sum(first) / RECENT:{sign}.3g} → {sum(last) / RECENT:{sign}.3g}", f"means of the first and last {RECENT} steps")


def _wall(record: Record, now: float) -> Figure | None:
    wall, seconds = record.wall_s(now), number(record.steps[-1].get("seconds")) if record.steps else None
    if wall is None:
        return None
    count = len(record.lives)
    below = [f"{duration(seconds)} of it up to the last step"] if seconds is not None else []
    if count > 1:
        below.append(f"{count} incarnations")
    return Figure("wall time", duration(wall), ", ".join(below))


def facts(record: Record) -> list[Fact]:
    """What the run was; what is not known is left out."""
    learner = record.text("run.kind") or "rl"
    lines = [
        Fact("kind", {"rl": "reinforcement learning", "supervised": "supervised warm start", "evaluation": "evaluation"}.get(learner, learner)),
        Fact("model", record.text("model.path") or record.text("model.source")),
        Fact("data", _data(record)),
        *([] if learner != "rl" else _rl_facts(record)),
        Fact("optimizer", f"lr {record.text('trainer.lr')}, {record.text('trainer.lr_schedule')}; {record.text('trainer.batch_groups')} "
             f"{'groups' if learner == 'rl' else 'examples'} a step in {record.text('trainer.num_minibatches')} minibatch(es)"),
        Fact("devices", devices(record)), Fact("seed", record.text("run.seed")),
        Fact("began", _when(record.lives[0].claim.time) if record.lives else ""),
        Fact("ended", "" if record.ended_at is None else _when(record.ended_at)),
    ]
    return [line for line in lines if line.text]


def _lead(record: Record) -> str:
    """How far ahead was allowed at the end, and why."""
    last = record.steps[-1] if record.steps else {}
    lead, reason = number(last.get("lead")), last.get("lead_reason")
    return f"{words(lead)} steps, {reason}" if lead is not None and isinstance(reason, str) and reason else ""


def _rl_facts(record: Record) -> list[Fact]:
    chosen = [f"{key.removeprefix('algorithm.')}={value}" for key, value in record.config.items()
              if key.startswith("algorithm.") and isinstance(value, str) and value]
    group, tokens, engine = (record.text(key) for key in ("workflow.group_size", "workflow.max_new_tokens", "engine.server"))
    return [
        Fact("algorithm", ", ".join(chosen)),
        Fact("staleness", f"η = {record.text('staleness.eta')}, {record.text('staleness.bound')}"),
        Fact("lead", _lead(record)),
        Fact("rollouts", f"{record.text('workflow.name')}, {group} samples a prompt, at most {tokens} tokens a turn; engine {engine}"),
    ]


def _data(record: Record) -> str:
    kind = record.text("data.kind")
    return f"{kind} {record.text('data.task' if kind == 'reasoning_gym' else 'data.path')}".strip()


def num_replicas(record: Record) -> int:
    """How many rollout workers the plan has; 1 where that cannot be told."""
    found = _plan(record)
    return 1 if found is None else max(1, found.num_replicas)


def devices(record: Record) -> str:
    """How the devices were split."""
    found = _plan(record)
    return record.text("allocation.num_devices") if found is None else found.describe()


def _plan(record: Record) -> Plan | None:
    try:
        allocation = msgspec.convert(_part(record, "allocation."), AllocationConfig)
        return plan(allocation, msgspec.convert(_part(record, "trainer.parallel."), ParallelConfig), inference=not record.supervised)
    except (ConfigError, msgspec.ValidationError):
        return None


def _part(record: Record, prefix: str) -> dict[str, object]:
    return {key.removeprefix(prefix): value for key, value in record.config.items() if key.startswith(prefix)}


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
