"""What judging takes, by reward processes and by a judge's endpoint, in lines of `headway status`."""

from __future__ import annotations

from launcher.views.queue_view import duration


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else duration(seconds)


def rewards_lines(rewards: dict | None) -> list[tuple[str, str]]:
    """What judging costs; many requests that wait mean that there are too few reward processes."""
    judge = _judge((rewards or {}).get("judge"))
    if rewards is None or not (rewards["busy_s"] or rewards["waiting"]):
        return judge
    where = f"{rewards['num_elements']} elements   " if rewards["placement"] == "array" else ""
    done = rewards.get("num_done", 0)
    each = "none judged yet" if not done else (
        f"a request takes {_seconds(rewards['busy_s'] / done)} and waits {_seconds(rewards['wait_s'] / done)} (means of {done})")
    text = f"{where}{rewards['waiting']} waiting   {each}"
    text += f"   {rewards['num_late']} times no answer in time (reward.timeout_s)" if rewards.get("num_late") else ""
    replaced = f"   {rewards['num_killed']} processes replaced" if rewards["num_killed"] else ""
    failed = f"   {rewards['num_failed']} requests without an answer" if rewards["num_failed"] else ""
    return [("rewards", text + replaced + failed), *judge]


def _judge(judge: dict | None) -> list[tuple[str, str]]:
    """What the judge's endpoint was asked, and what it did not score."""
    if judge is None:
        return []
    own = judge["asked"] - judge["cached"] - judge["waiting"]
    text = f"{judge['waiting']} waiting   {judge['asked']} questions, {judge['cached']} known already, {judge['calls']} calls"
    text += f"   a question takes {_seconds(judge['s'] / own)}" if own > 0 else ""
    return [("judge", text + (f"   {judge['failed']} without a score, the last: {judge['error']}" if judge["failed"] else ""))]


def part_scores(record: dict) -> str:
    """The mean scores of a step's verifiers, where there are several."""
    found = {key.removeprefix("score_"): value for key, value in record.items() if key.startswith("score_")}
    return "".join(f"   {name} {value:.3f}" for name, value in found.items())
