"""What people see of a run's jobs in SLURM: rows and lines for run_view.py and `headway status`. Pure: monitoring/observation.py's figures in."""

from __future__ import annotations

import time

from rich.table import Table
from rich.text import Text

STALE_S = 10.0
NODES_SHOWN = 4
ROLE_NAMES = {"inference": "inference", "reward": "reward jobs", "train": "training"}
# SLURM's reasons by how they begin, in words.
REASONS = {
    "Resources": "no nodes are free",
    "Priority": "jobs of higher priority are ahead",
    "Dependency": "another job has to end first",
    "BeginTime": "its earliest start has not come; a requeued job waits for a while",
    "Cleaning": "SLURM is still cleaning up after it",
    "JobArrayTaskLimit": "the elements before it have to end",
    "JobHeldUser": "held: scontrol release",
    "JobHoldMaxRequeue": "held after too many requeues: scontrol release",
    "JobHeldAdmin": "held by an administrator",
    "job requeued in held state": "held: scontrol release",
    "launch failed requeued held": "it could not be launched and is held: scontrol release",
    "ReqNodeNotAvail": "its nodes are down or reserved",
    "NodeDown": "its node is down",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionTimeLimit": "its time limit is above the partition's",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives",
    "BadConstraints": "no node fits what it asks for",
    "Reservation": "its reservation has not begun",
    "Licenses": "a licence is not free",
    "QOSMax": "your limit in this QOS is reached",
    "QOSGrp": "the limit of this QOS for all its users is reached",
    "QOS": "your QOS does not allow it now",
    "AssocMax": "your account's limit for you is reached",
    "AssocGrp": "your account's limit is reached",
    "Assoc": "your account does not allow it now",
    "None": "SLURM has not said why yet",
}
TOO_LARGE = "it asks for more than one job may have: headway stop, then headway resume with another cluster.ROLE.time, or qos"


def duration(seconds: float) -> str:
    """2h03m, 4m05s, 12s."""
    minutes, rest = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def reason_words(reason: str) -> str:
    """'Resources' -> 'Resources: no nodes are free'; a reason that we do not know stays as it is."""
    words = TOO_LARGE if "PerJob" in reason else next((words for begin, words in REASONS.items() if reason.startswith(begin)), "")
    return f"{reason}: {words}" if words else reason


def _starts(role: dict, now: float) -> str:
    if role["starts"] is None:
        return ""
    then, today = time.localtime(role["starts"]), time.localtime(now)
    return f", starts about {time.strftime('%H:%M' if then[:3] == today[:3] else '%a %d %b %H:%M', then)}"


def _why(role: dict) -> str:
    """The reason why the next element waits: the others wait only because it is there."""
    reasons = [reason for reason in role["reasons"] if reason != "JobArrayTaskLimit"] or list(role["reasons"])
    return reason_words(max(reasons, key=lambda reason: role["reasons"][reason])) if reasons else ""


def absent(status: dict | None, slurm: dict, now: float) -> str:
    """What the run waits for while no coordinator writes its status; '' if one does."""
    if status is not None and now - status["time"] <= STALE_S:
        return ""
    if "train" not in slurm["roles"]:
        return _absent_elements(slurm["roles"]["inference"], now)
    train = slurm["roles"]["train"]
    if train["running"]:
        job = train["running"][0]
        silent = "has not written its status yet" if status is None else f"has not written its status for {duration(now - status['time'])}"
        if job["state"] != "RUNNING":
            return f"training job {job['element']} on {_nodes(job['nodes'])}: {job['state']}"
        return f"training job {job['element']} runs on {_nodes(job['nodes'])}; its coordinator {silent}"
    if train["pending"]:
        return f"training waits for its job {train['next']}, which is pending ({_why(train)}{_starts(train, now)})"
    return "no training job is in the queue; headway watch submits one while it runs"


def _absent_elements(role: dict, now: float) -> str:
    """What an evaluation waits for while no element of it says anything."""
    if role["running"]:
        job = role["running"][0]
        return f"job {job['element']} on {_nodes(job['nodes'])} is {job['state']}, and has not said anything lately"
    if role["pending"]:
        return f"the evaluation waits for its job {role['next']}, which is pending ({_why(role)}{_starts(role, now)})"
    return "no job of the evaluation is in the queue; headway watch submits one while it runs"


def _nodes(nodes: list[str]) -> str:
    return ",".join(nodes[:NODES_SHOWN]) + (f" and {len(nodes) - NODES_SHOWN} more" if len(nodes) > NODES_SHOWN else "")


def role_line(role: dict, now: float) -> str:
    """'2 running on inf0,inf1 (12m00s left), 4 pending (Resources: no nodes are free, starts about 14:05), 3 done, 1 failed'."""
    parts = []
    if running := role["running"]:
        nodes = list(dict.fromkeys(node for job in running for node in job["nodes"]))
        left = [job["time_left_s"] for job in running if job["time_left_s"] is not None]
        parts.append(f"{len(running)} running on {_nodes(nodes)}" + (f" ({duration(min(left))} left)" if left else ""))
    if role["pending"] and running and set(role["reasons"]) == {"JobArrayTaskLimit"}:
        parts.append(f"{role['pending']} to follow")
    elif role["pending"]:
        parts.append(f"{role['pending']} pending ({_why(role)}{_starts(role, now)})")
    parts += [f"{role[key]} {key}" for key in ("done", "failed") if role[key]]
    return ", ".join(parts) or "nothing in the queue"


def hours_line(hours: dict | None) -> str:
    """'12.3 GPU-hours used (9.0 inference, 3.3 training), 0.2 wasted'."""
    if hours is None:
        return "unknown: SLURM keeps no accounting here"
    others = hours["used"] - hours["inference"] - hours["train"]
    rewards = f", {others:.2f} reward jobs" if others >= 0.005 else ""
    return (f"{hours['used']:.2f} {hours['unit']} used ({hours['inference']:.2f} inference, {hours['train']:.2f} training{rewards}), "
            f"{hours['wasted']:.2f} wasted")


def _saved(status: dict, slurm: dict, now: float) -> str:
    saved = status.get("checkpoint") or slurm["checkpoint"]
    if saved is None:
        return "none yet"
    since = max(0.0, now - status["time"]) if status.get("checkpoint") else 0.0  # the status may be of long ago
    return f"step {saved['step']}, {duration(saved['age_s'] + since)} old{_best(saved)}"


def _best(saved: dict) -> str:
    if "best_step" not in saved:
        return ""
    figure = f"{saved['best_accuracy']:.3f}" if "best_accuracy" in saved else f"loss {saved['best_loss']:.4f}"
    return f"; the best is step {saved['best_step']} ({figure})"


def _says(roles: dict) -> list[tuple[str, str]]:
    """What elements say of themselves in SLURM's comments: why they wait, where they cannot write it into the run folder."""
    return [("waits", text) for text in dict.fromkeys(text for role in roles.values() for text in role.get("says", []))]


def rows(status: dict | None, slurm: dict, now: float) -> list[tuple[str, str]]:
    """Names and values for the view's table."""
    lines = [("checkpoint", _saved(status or {}, slurm, now)),
             *((name, role_line(slurm["roles"][role], now)) for role, name in ROLE_NAMES.items() if role in slurm["roles"]),
             ("used", hours_line(slurm["hours"]))]
    if "train" not in slurm["roles"]:
        lines = lines[1:]  # nothing is saved but what is judged
    if status is not None and "replicas_ready" in status and "inference" in slurm["roles"]:
        ready = f"{status['replicas_ready']} ready, training needs {status['min_replicas']}"
        lines.insert(1, ("replicas", f"{ready}   {status.get('parked', 0)} groups parked"))
    lines[:0] = _says(slurm["roles"])
    if status is not None and status.get("suspended"):
        lines.insert(0, ("suspended", status["suspended"]))
    return lines


def lives_table(slurm: dict) -> Table:
    """The newest incarnations of the training job and how they ended."""
    table = Table("training jobs so far", box=None, header_style="dim")
    for life in slurm["lives"]:
        table.add_row(Text(life["words"]))
    return table
