"""What an evaluation alone has judged so far, and its result, as people see them. Reads its files; the rest is pure."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from workers.run.files import read_lines
from workers.run.folder import RunFolder

SILENT_S = 180.0
"""An element that has said nothing for so long is not shown any more: it was killed."""


def progress(run: RunFolder) -> dict[str, Any] | None:
    """What the elements say, put together as status.json of other runs; None before the first has said anything."""
    told = [json.loads(path.read_bytes()) for path in sorted(run.evaluation.glob("*.status"))]
    if not told:
        return None
    judged: dict[str, int] = defaultdict(int)
    for status in told:
        for chunk, number in status["chunks"].items():
            judged[chunk] = max(judged[chunk], number)
    newest = max(status["time"] for status in told)
    here = [status for status in told if not status["ended"] and newest - status["time"] < SILENT_S]
    return {
        "kind": "evaluation", "time": newest, "num_prompts": told[-1]["num_prompts"], "num_samples": told[-1]["num_samples"],
        "num_judged": sum(judged.values()), "num_running": sum(status["running"] for status in here), "waiting": {},
        "tokens_generated": sum(status["tokens_generated"] for status in told),
        "complete": run.evaluation_result.exists(), "workers": [_worker(number, status, newest) for number, status in enumerate(here)]}


def _worker(number: int, status: dict[str, Any], now: float) -> dict[str, Any]:
    kept = {name: status[name] for name in ("host", "pid", "job", "running", "waiting_for", "draining", "tokens_generated")}
    return {"name": f"rollout {number}", "version": "", "fetching": "", "silent_s": round(now - status["time"], 1), **kept}


def is_evaluation(status: dict | None) -> bool:
    """Whether this is what `progress` gives."""
    return status is not None and status.get("kind") == "evaluation"


def facts(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values for the view's table. What is missing is said."""
    left = status["num_prompts"] - status["num_judged"]
    running = min(left, status["num_running"])  # one that was killed may be among those who run, and what it held with another
    missing = f"{left} prompts: {running} under way, {left - running} to come" if left else "nothing"
    samples = f" x {status['num_samples']} samples" if status["num_samples"] > 1 else ""
    return [("judged", f"{status['num_judged']} of {status['num_prompts']} prompts{samples}"), ("missing", missing),
            ("tokens", f"{status['tokens_generated']} generated")]


def tenths_line(status: dict[str, Any]) -> str:
    """One plain line for every tenth that is judged."""
    tenths = 10 * status["num_judged"] // max(1, status["num_prompts"])
    return f"{tenths * 10}% of {status['num_prompts']} prompts are judged" if tenths else ""


def goes_on(status: dict[str, Any] | None, path: object) -> str:
    """How an evaluation that was stopped is completed, in words; '' where nothing is missing, or nothing has begun."""
    if status is None or status["complete"]:
        return ""
    # An element that was killed had not yet said what it judged last.
    on_disk = {line["index"] for file in Path(str(path)).glob("evaluation/*.jsonl") for line in read_lines(file)}
    number = max(status["num_judged"], len(on_disk))
    return f"{number} of {status['num_prompts']} prompts are judged, and kept; the rest: headway resume {path}"


def result_lines(result: dict[str, Any]) -> list[str]:
    """evaluation.json as a table."""
    number = result["num_samples"]
    sampling = f"temperature {result['temperature']:g}" if result["temperature"] else "greedy"
    failed = f"; {result['num_failed']} prompts could not be judged and are left out" if result["num_failed"] else ""
    lines = [f"{result['num_prompts']} prompts x {number} sample{'s' if number > 1 else ''}, {sampling}, "
             f"{result['tokens_per_sample']:.1f} tokens a sample{failed}", f"{'':10} mean   {result['confidence']:.0%} interval"]
    rows = [(f"avg@{number}", result["avg"]), *((f"pass@{k}", value) for k, value in result["pass"].items())]
    if result["maj"] is not None:
        rows.append((f"maj@{number}", result["maj"]))
    return lines + [f"{name:10} {value['mean']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]" for name, value in rows]


def ending_lines(run: RunFolder) -> list[str]:
    """What an evaluation alone has come to, its result or what is missing; nothing of other runs."""
    if not run.evaluation.is_dir():
        return []
    if not run.evaluation_result.exists():
        left = goes_on(progress(run), run.path)
        return [left] if left else []
    return [*result_lines(json.loads(run.evaluation_result.read_bytes())), f"figures {run.evaluation_result}", f"samples {run.samples}"]
