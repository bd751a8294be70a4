"""Which curves a report shows, out of which fields of metrics.jsonl and evaluations.jsonl (docs/metrics.md). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.report import plot
from launcher.report.plot import Chart, Trace
from launcher.report.record import Record, number
from launcher.report.series import Point, increments, rates, values, wilson


@dataclass(frozen=True)
class Panel:
    """A chart's title, its fields with their names, what must be on its y axis, and what it says."""

    title: str
    fields: Mapping[str, str]
    note: str = ""
    include: tuple[float, ...] = ()
    log: bool = False


LEARNING = (
    Panel("Reward", {"reward": ""}, "mean of the batch, as scaled"),
    Panel("Score while sampling", {"accuracy": "trained on", "accuracy_sampled": "all sampled"}, "mean score", (0.0, 1.0)),
    Panel("Loss", {"loss": ""}),
    Panel("Entropy", {"entropy": ""}, "nats a token", (0.0,)),
    Panel("Response length", {"response_tokens": ""}, "tokens, mean", (0.0,)),
    Panel("Groups without use", {"share_no_spread": "all rewards equal", "share_rejected": "rejected"}, "share", (0.0, 1.0)),
)
UPDATES = (
    Panel("Gradient norm", {"grad_norm": "policy", "value_grad_norm": "critic"}, "before clipping", (0.0,)),
    Panel("Learning rate", {"lr": "policy", "critic_lr": "critic"}, "", (0.0,)),
    Panel("Clipped and masked", {"clip_share": "clipped", "behavior_masked_share": "above the cap"}, "share of tokens", (0.0,)),
    Panel("Importance weights", {"behavior_weight_mean": "mean", "behavior_weight_max": "largest"}, "proximal over behaviour", (1.0,), log=True),
    Panel("Effective sample size", {"behavior_ess": ""}, "share of the batch's tokens", (0.0, 1.0)),
    Panel("KL divergence", {"kl_proximal": "from proximal", "kl_behavior": "from behaviour", "kl_reference": "from reference"},
          "nats a token", (0.0,)),
    Panel("Gaps of log-probs", {"gap_current_proximal": "current, proximal", "gap_proximal_behavior": "proximal, behaviour",
                                "gap_current_behavior": "current, behaviour"}, "mean absolute, nats", (0.0,)),
    Panel("Gaps, the farthest tokens", {"gap_proximal_behavior_p99": ""}, "proximal, behaviour: 99% within, nats", (0.0,)),
    Panel("Engine against trainer", {"logprob_gap_mean": "mean", "logprob_gap_max": "largest"}, "same weights, nats", (), log=True),
    Panel("Critic", {"value_loss": "loss", "explained_variance": "explained variance"}, "", (0.0,)),
    Panel("Values and returns", {"value_mean": "values", "return_mean": "returns"}, "means"),
)
SUPERVISED = (
    Panel("Loss", {"loss": ""}, "nats a token, of the batch"),
    Panel("Perplexity", {"perplexity": ""}, "", (1.0,), log=True),
    Panel("Entropy", {"entropy": ""}, "nats a token", (0.0,)),
    Panel("Gradient norm", {"grad_norm": ""}, "before clipping", (0.0,)),
    Panel("Learning rate", {"lr": ""}, "", (0.0,)),
    Panel("Response length", {"response_tokens": ""}, "tokens, mean", (0.0,)),
)
ELSEWHERE = frozenset((
    "step", "seconds", "heldout_loss", "heldout_tokens", "staleness_mean", "staleness_max", "token_age_mean", "token_age_max", "lead",
    "tokens_trained", "tokens_generated", "tokens_interrupted", "alarms", "num_samples"))
"""Fields that other parts of the report show, or that say nothing as a curve."""


def incarnation_steps(record: Record) -> list[float]:
    """The steps at which later incarnations of the trainer went on."""
    return [float(life.claim.step) for life in record.lives[1:]]


def chart_of(panel: Panel, record: Record) -> Chart | None:
    """The panel of one run; None where it has none of the fields."""
    traces = [Trace(name, values(record.steps, field), tone) for tone, (field, name) in enumerate(panel.fields.items())]
    shown = [trace for trace in traces if trace.points]
    if len(shown) == 1 and shown[0].tone == 0:
        shown = [Trace("", shown[0].points)]  # alone it is what the title says
    return plot.line_chart(panel.title, shown, note=panel.note, include=panel.include, log=panel.log, marks=incarnation_steps(record))


def heldout(record: Record) -> Chart | None:
    """The held-out figure over the steps whose weights it is of, with their intervals."""
    intervals = [] if record.supervised else [found for evaluation in record.evaluations if (found := interval(evaluation)) is not None]
    trace = Trace("", values(record.evaluations, record.figure), 1, intervals, dots=True)
    if record.supervised:
        return plot.line_chart("Held-out loss", [trace], note="nats a token", marks=incarnation_steps(record))
    levels = {number(evaluation.get("confidence")) or 0.95 for evaluation in record.evaluations}
    level = f"{100 * levels.pop():.3g}% " if len(levels) == 1 else ""
    note = f"with {level}intervals" if intervals else ""
    return plot.line_chart(record.figure_name.capitalize(), [trace], note=note, include=(0.0, 1.0), marks=incarnation_steps(record))


def interval(evaluation: Mapping[str, object]) -> tuple[float, float, float] | None:
    """(step, low, high) of an evaluation's mean score: as it stands there, else by the number of prompts; None where neither is known."""
    step, share = number(evaluation.get("step")), number(evaluation.get("accuracy"))
    told = evaluation.get("avg")
    low, high = (number(told.get("low")), number(told.get("high"))) if isinstance(told, dict) else (None, None)
    if step is not None and low is not None and high is not None:
        return step, low, high
    count = (number(evaluation.get("num_prompts")) or 0.0) - (number(evaluation.get("num_failed")) or 0.0)
    if step is None or share is None or count < 1 or not 0 <= share <= 1:
        return None
    return step, *wilson(share, count)


def of_samples(record: Record) -> Chart | None:
    """pass@k and maj@k of the held-out prompts, where each was answered more than once; None where none was."""
    most = max((number(evaluation.get("num_samples")) or 0.0 for evaluation in record.evaluations), default=0.0)
    if most <= 1:
        return None
    found: dict[str, list[Point]] = {}
    for evaluation in record.evaluations:
        passed, step = evaluation.get("pass"), number(evaluation.get("step"))
        told = {f"pass@{k}": value for k, value in passed.items()} if isinstance(passed, dict) else {}
        for name, value in (told | {f"maj@{most:g}": evaluation.get("maj")}).items():
            mean = number(value.get("mean")) if isinstance(value, dict) else None
            if step is not None and mean is not None:
                found.setdefault(name, []).append((step, mean))
    traces = [Trace(name, points, tone % 10, dots=True) for tone, (name, points) in enumerate(found.items())]
    return plot.line_chart("Held-out, of several answers", traces, note=f"{most:g} each", include=(0.0, 1.0), marks=incarnation_steps(record))


def learning(record: Record) -> list[Chart]:
    """How well it does, and what its answers are like."""
    panels = SUPERVISED if record.supervised else LEARNING
    return [chart for chart in (heldout(record), of_samples(record), *(chart_of(panel, record) for panel in panels)) if chart is not None]


def updates(record: Record) -> list[Chart]:
    """What the optimizer did, and how far the policies are apart."""
    return [] if record.supervised else [chart for panel in UPDATES if (chart := chart_of(panel, record)) is not None]


def others(record: Record) -> list[Chart]:
    """All fields that nothing else shows, one chart each."""
    shown = {field for panel in (*LEARNING, *UPDATES, *SUPERVISED) for field in panel.fields} | ELSEWHERE
    names = sorted({field for line in record.steps for field, value in line.items() if number(value) is not None} - shown)
    charts = (plot.line_chart(name, [Trace("", values(record.steps, name))], marks=incarnation_steps(record)) for name in names)
    return [chart for chart in charts if chart is not None]


def slots_used(record: Record) -> list[Point]:
    """(step, share of the engines' slots in which a sample ran, on average since the step before)."""
    slots, size, tp, pp = (number(record.config.get(key)) or 1.0 for key in (
        "engine.num_slots", "allocation.replica_size", "engine.parallel.tp", "engine.parallel.pp"))
    there = dict(values(record.steps, "replicas"))
    return [(step, min(1.0, running / (there[step] * slots * max(1.0, size // (tp * pp)))))
            for step, running in rates(record.steps, "rollout_sample_s") if there.get(step)]


def throughput(record: Record) -> list[Chart]:
    """Tokens a second, and what was ready and under way."""
    marks = incarnation_steps(record)
    tokens = [Trace("trained", rates(record.steps, "tokens_trained"), 0), Trace("generated", rates(record.steps, "tokens_generated"), 1)]
    groups = [Trace("finished, in the buffer", values(record.steps, "buffer"), 2), Trace("being generated", values(record.steps, "running"), 1)]
    charts = (plot.line_chart("Tokens a second", tokens, plot.HALF, include=(0.0,), marks=marks),
              plot.line_chart("Seconds a step", [Trace("", step_seconds(record.steps))], plot.HALF, include=(0.0,), marks=marks),
              plot.line_chart("Groups", groups, plot.HALF, include=(0.0,), marks=marks),
              plot.line_chart("Slots in use", [Trace("", slots_used(record))], plot.HALF, "share; the rest waits for long answers, or for leases",
                              (0.0, 1.0), marks=marks),
              plot.line_chart("A weight update", [Trace("generation stood still", per_update(record.steps, "weight_update_s"), 1),
                                                  Trace("until weights were on the node", per_update(record.steps, "weight_fetch_s"), 2)],
                              plot.HALF, "seconds each, means", (0.0,), marks=marks))
    return [chart for chart in charts if chart is not None]


def step_seconds(steps: Sequence[Mapping[str, object]]) -> list[Point]:
    """(step, its seconds), from the second record on."""
    grown = increments(list(map(dict, steps)), "seconds")
    return [(step, grown[at]) for at, record in enumerate(steps) if at and (step := number(record.get("step"))) is not None]


def per_update(steps: Sequence[Mapping[str, object]], key: str) -> list[Point]:
    """(step, seconds of each weight update in it), where there was one."""
    records = list(map(dict, steps))
    spent, count = increments(records, key), increments(records, "weight_updates")
    return [(step, spent[at] / count[at]) for at, record in enumerate(steps) if count[at] and (step := number(record.get("step"))) is not None]
