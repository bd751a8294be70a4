"""What a run looks like to people: tables for a terminal, lines for everything else. Pure: files' contents in, text out."""

from __future__ import annotations

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launcher.views import evaluation_view
from launcher.views.judging_lines import part_scores, rewards_lines
from launcher.views.queue_view import STALE_S, absent, duration, lives_table, rows

ALARMS_SHOWN = SUSPECTS_SHOWN = 2


def eta(status: dict, steps: list[dict]) -> str:
    """Time left, from the pace of the last ten steps; '?' before the second step."""
    if len(steps) < 2:
        return "?"
    recent = steps[-11:]
    pace = (recent[-1]["seconds"] - recent[0]["seconds"]) / (len(recent) - 1)
    return duration(pace * (status["num_steps"] - steps[-1]["step"]))


def rates(steps: list[dict]) -> tuple[float, float]:
    """Tokens per second generated and trained, over the last ten steps."""
    return rate(steps, "tokens_generated"), rate(steps, "tokens_trained")


def rate(steps: list[dict], key: str) -> float:
    """By how much a total grows in a second, over the last ten steps."""
    if len(steps) < 2:
        return 0.0
    first, last = steps[-min(11, len(steps))], steps[-1]
    return (last[key] - first[key]) / max(1e-9, last["seconds"] - first["seconds"])


def histogram(counts: dict[str, int]) -> str:
    """'0: 12  1: 40  2: 28'."""
    return "  ".join(f"{age}: {count}" for age, count in counts.items())


def step_line(record: dict) -> str:
    """One plain line a training step."""
    if "perplexity" in record:
        return (f"step {record['step']:>4}  {duration(record['seconds']):>7}  loss {record['loss']:.4f}  perplexity {record['perplexity']:.3f}  "
                f"grad {record['grad_norm']:.2f}  lr {record['lr']:.2e}  tokens {record['tokens_trained']} trained")
    gap = f"gap {record['logprob_gap_mean']:.1e}  " if record.get("logprob_gap_mean") is not None else ""
    return (f"step {record['step']:>4}  {duration(record['seconds']):>7}  reward {record['reward']:+.2f}  sampled score {record['accuracy']:.3f}  "
            f"age mean {record['staleness_mean']:.1f} max {record['staleness_max']}  w {record.get('behavior_weight_mean', 1.0):.3f}  "
            f"clip {record.get('clip_share', 0.0):.3f}  {gap}entropy {record.get('entropy', 0.0):.3f}  grad {record.get('grad_norm', 0.0):.2f}  "
            f"tokens {record['tokens_generated']} generated {record['tokens_trained']} trained {record['tokens_interrupted']} interrupted  "
            f"buffer {record['buffer']}" + (f"  rejected {record['share_rejected']:.0%}" if record.get("groups_rejected") else ""))


def figure(record: dict) -> str:
    """What the mean score of an evaluation, or of a run's summary, is called: an accuracy where every score is 0 or 1."""
    return "score" if record.get("graded") else "accuracy"


def evaluation_line(record: dict) -> str:
    """One plain line an evaluation."""
    if "heldout_loss" in record:
        return f"held-out loss after step {record['step']}: {record['heldout_loss']:.4f} nats a token ({record['num_prompts']} examples)"
    failed = f", {record['num_failed']} could not be judged" if record["num_failed"] else ""
    how, figures = "greedy", ""
    if record.get("num_samples", 1) > 1:
        how = f"mean of {record['num_samples']} at temperature {record['temperature']:g}"
        best = max(record["pass"], key=int)
        figures = f", pass@{best} {record['pass'][best]['mean']:.3f}"
        figures += f", maj@{record['num_samples']} {record['maj']['mean']:.3f}" if record["maj"] else ""
    if record.get("graded") and "1" in record.get("pass", {}) and not figures.startswith(", pass@1 "):
        figures = f", pass@1 {record['pass']['1']['mean']:.3f}{figures}"
    return (f"held-out {figure(record)} after step {record['step']}: {record['accuracy']:.3f}{figures} "
            f"({record['num_prompts']} prompts, {how}{failed})")


def _grid(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))  # Text: words from elsewhere are no markup
    return table


def _supervised_facts(status: dict, steps: list[dict], evaluations: list[dict]) -> list[tuple[str, str]]:
    last = steps[-1] if steps else {}
    held = "  ".join(f"{record['heldout_loss']:.4f} (step {record['step']})" for record in evaluations[-4:]) or "-"
    return [
        ("step", f"{status['step']} of {status['num_steps']}   {duration(status['seconds'])} elapsed, {eta(status, steps)} left"),
        ("loss", f"{last['loss']:.4f} nats a token   perplexity {last['perplexity']:.3f}" if last else "-"),
        ("held-out loss", held),
        ("tokens/s", f"{rate(steps, 'tokens_trained'):.1f} trained"),
        ("examples", f"{status['set_aside']} set aside"),
        *_troubles(status),
    ]


def _facts(status: dict, steps: list[dict], evaluations: list[dict]) -> list[tuple[str, str]]:
    if status.get("kind") == "supervised":
        return _supervised_facts(status, steps, evaluations)
    if evaluation_view.is_evaluation(status):
        return evaluation_view.facts(status)
    generated, trained = rates(steps)
    last = steps[-1] if steps else {}
    held = "  ".join(f"{record['accuracy']:.3f} (step {record['step']})" for record in evaluations[-4:]) or "-"
    return [
        ("step", f"{status['step']} of {status['num_steps']}   {duration(status['seconds'])} elapsed, {eta(status, steps)} left"),
        ("reward", f"{last['reward']:+.3f}   sampled score {last['accuracy']:.3f}{part_scores(last)}" if last else "-"),
        ("held-out", held + (f"   evaluating {status['evaluating']}" if status["evaluating"] else "")),
        ("staleness", f"eta {status['eta']} ({status['bound']})   groups by age  {histogram(status['staleness']) or '-'}"),
        *([("lead", f"{status['lead']:.2g} steps   {reason}")] if (reason := status.get("lead_reason")) else []),
        ("tokens/s", f"{generated:.1f} generated   {trained:.1f} trained   {status['tokens_interrupted']} kept across interruptions"),
        ("groups", f"{status['running']} running{_limit(status)}   {status['buffer']} in the buffer   {status['set_aside']} set aside"
         + _rejected(status)),
        *_weights(status.get("weights")),
        *rewards_lines(status.get("rewards")),
        *_troubles(status),
    ]


def _limit(status: dict) -> str:
    """How many groups may run (rollout.concurrency)."""
    return f" of {status['concurrency']} at most" if "concurrency" in status else ""


def _rejected(status: dict) -> str:
    """Groups that were not trained on (workflow.keep)."""
    return f"   {status['rejected']} rejected ({status['share_rejected']:.0%} of the latest)" if status.get("rejected") else ""


def _weights(weights: dict | None) -> list[tuple[str, str]]:
    """What a new version costs each worker, and what has failed on its way."""
    if weights is None or not (weights["num_updates"] or weights["failed"]):
        return []
    text = (f"by {weights['transport']}   a version takes {weights['fetch_s']:.2f} s to arrive ({weights['fetch_bytes'] / 1e6:.1f} MB), "
            f"{weights['pause_s']:.2f} s to pause, {weights['load_s']:.2f} s to load")
    if weights["num_refetched"]:
        text += f"   {weights['num_refetched']} chunks came wrong and were fetched elsewhere"
    failed = [("", f"{transport} has failed, {weights['num_fallbacks']} versions came otherwise: {cause}")
              for transport, cause in weights["failed"].items()]
    return [("weights", text), *failed]


def _troubles(status: dict) -> list[tuple[str, str]]:
    """What strangers, or broken workers, have tried, and why the coordinator keeps no journal now."""
    refused = f"{status['refused_peers']} connections without the run's keys   {status['malformed_messages']} unreadable messages"
    rows = [("refused", refused)] if status["refused_peers"] or status["malformed_messages"] else []
    if named := status.get("suspects"):
        more = f" and {len(named) - SUSPECTS_SHOWN} more" if len(named) > SUSPECTS_SHOWN else ""
        rows.append(("suspect", f"{', '.join(named[:SUSPECTS_SHOWN])}{more}: groups fail there one after the other (headway logs RUN coordinator)"))
    return rows + ([("not recorded", f"{status['not_recorded']} (headway replay)")] if status.get("not_recorded") else [])


def _alarms(status: dict) -> list[Text]:
    """What is wrong with training, and what helps (docs/health.md)."""
    lines, alarms = [], status.get("alarms", [])
    for alarm in alarms[:ALARMS_SHOWN]:
        lines += [Text(f"alarm {alarm['name']}, since step {alarm['since']}: {alarm['condition']}", style="bold red"),
                  Text(f"  remedy: {alarm['remedy']}")]
    if rest := alarms[ALARMS_SHOWN:]:
        lines.append(Text(f"{len(rest)} more: {', '.join(alarm['name'] for alarm in rest)} (docs/health.md; headway report)", style="bold red"))
    return [Text(), *lines] if lines else []


def _step_of(version: str) -> str:
    """'61' of version 2.61, which the second incarnation of the trainer published."""
    return version.partition(".")[2]


def _workers(status: dict) -> Table:
    table = Table("worker", "process", "weights of step", "running", "waits for", box=None, header_style="dim")
    for worker in status["workers"]:
        part = worker["name"].split()[0]
        waits = worker["waiting_for"]
        if not waits or waits == "leases":
            waits = status["waiting"].get(part, "") or waits
        silent = f" (silent {worker['silent_s']:.0f} s)" if worker["silent_s"] > STALE_S else ""
        weights = _step_of(worker["version"]) + (f" (by {worker['via']})" if worker.get("via") else "")
        weights += f", fetches {_step_of(worker['fetching'])}" if worker["fetching"] else ""
        waits += " (draining)" if worker.get("draining") else ""
        process = f"{worker['host']} job {worker['job']}" if worker.get("job") else f"{worker['host']}:{worker['pid']}"
        cells = (worker["name"], process, weights, str(worker["running"]), waits + silent)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def panel(name: str, status: dict | None, steps: list[dict], evaluations: list[dict], now: float, ended: dict | None,
          slurm: dict | None = None) -> Panel:
    """The live view. `now`: seconds since 1970; `slurm`: launcher/monitoring/observation.py's figures of a run on SLURM."""
    title = Text(f"headway  {name}")
    end = "" if ended is None else f"{ended['state'] if ended['state'] == 'drained' else 'ended'}: {ended['cause'] or 'complete'}"
    if status is None and slurm is None:
        return Panel(Text(end or "waiting for the coordinator to start"), title=title)
    missing = "" if slurm is None else absent(status, slurm, now)
    lines = [] if status is None else _facts(status, steps, evaluations)
    parts: list = [_grid(lines + ([] if slurm is None else rows(status, slurm, now)))]
    if status is not None:
        parts += _alarms(status)
    if status is not None and not missing:
        parts += [Text(), _workers(status)]
    if slurm is not None and slurm["lives"]:
        parts += [Text(), lives_table(slurm)]
    if slurm is not None and (end or missing):
        parts.append(Text())
    if end:
        parts.append(Text(end, style="bold"))
    elif missing:
        parts.append(Text(missing, style="bold"))
    elif status is not None and now - status["time"] > STALE_S:
        who = "no element of the evaluation has" if evaluation_view.is_evaluation(status) else "the coordinator has not"
        parts.append(Text(f"{who} written its status for {now - status['time']:.0f} s", style="bold red"))
    return Panel(Group(*parts), title=title)


def summary_lines(summary: dict) -> list[str]:
    """The end of a run, for people."""
    def show(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    if summary.get("kind") == "supervised":
        return [f"held-out loss {show(summary['heldout_before'])} -> {show(summary['heldout_after'])} nats a token on {summary['heldout_prompts']} "
                f"examples never trained on, in {summary['num_steps']} steps and {duration(summary['seconds'])}",
                f"tokens: {summary['tokens_trained']} trained"]
    return [
        f"held-out {figure(summary)} {show(summary['heldout_before'])} -> {show(summary['heldout_after'])} on {summary['heldout_prompts']} prompts "
        f"never trained on, in {summary['num_steps']} steps and {duration(summary['seconds'])}",
        f"staleness: eta {summary['eta']} ({summary['bound']}), consumed groups by age  {histogram(summary['staleness_histogram'])}; "
        f"oldest {summary['max_staleness']}; {summary['share_stale']:.0%} begun under an older version than they trained",
        f"tokens: {summary['tokens_generated']} generated, {summary['tokens_trained']} trained"
        + (f"; {summary['num_rejected']} groups rejected" if summary.get("num_rejected") else ""),
    ]
