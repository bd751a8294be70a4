"""What faults cost a run on SLURM: how long until it works again, how much of that is SLURM's own, and how much work is lost.

    python -m benchmarks.slurm [--only FAULT ...]

Real SLURM on this machine (slurm/local), brought up for this and taken down afterwards; the tiny experiment, so the model costs next to
nothing, and what is measured is the machinery around it. One detached run has all its jobs in a partition in which they can be preempted.
It meets one fault after another; before each one it is whole: three rollout workers and training.

Times count from the fault. For a fault of the training job they end with the first training step of its successor; for one of an
inference job with the first work of the worker that takes its place. `slurm_s` is the part until SLURM has a successor running; the rest
is start-up: Python, PyTorch and Megatron, checkpoint, weights. What is lost: steps (and their tokens) that have to be trained again, or
groups that have to be generated again from nothing. A checkpoint is written every 20 steps, and on every announced end.

What SLURM notices late it notices early here, and jobs start within a second (slurm/local/README.md). KillWait and the grace time
of preemption have SLURM's usual 30 s. status.json is written once a second: times are as exact as that.

Each line is one JSON object: name, value, unit, and more; the last one has all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import LocalCluster, available
from tests.slurm.runs import ENDLESS, SlurmRun, headway, kill, occupy

PREEMPTIBLE = ("cluster.inference.partition=preemptible", "cluster.train.partition=preemptible",
               "cluster.inference.exclude='trn[0-1]'", "cluster.train.exclude='inf[0-3]'")
CHECKPOINT_STEPS = 20
BETWEEN = 25
"""Steps from one fault to the next: at least one checkpoint lies between them."""
LIMIT_S = 240.0
LAUNCHES = 3


@dataclass(frozen=True)
class Fault:
    """Something that happens to one role's element; `after` puts the cluster in order again, once its place is given to others."""

    role: str
    name: str
    happens: Callable[[SlurmRun, str], None]
    after: Callable[[LocalCluster, str], None] = lambda cluster, node: None


def shot(run: SlurmRun, node: str) -> None:
    """SIGKILL for the process that SLURM started."""
    element = next(element for element in run.queue() if element.node == node)
    kill(next(task for task in run.tasks("train" if "-train-" in element.name else "inference") if task.environ()["SLURM_JOB_ID"] == element.job_id))


def cancelled(run: SlurmRun, node: str) -> None:
    """scancel of the element."""
    run.cluster.run("scancel", next(element.job for element in run.queue() if element.node == node))


def preempted(run: SlurmRun, node: str) -> None:
    """A job of higher priority wants its node."""
    occupy(run.cluster, "train" if node.startswith("trn") else "inference", node)


def powered_off(run: SlurmRun, node: str) -> None:
    """A power cut."""
    run.cluster.power_off(node)


def power_again(cluster: LocalCluster, node: str) -> None:
    """And power again."""
    cluster.power_on(node)
    cluster.wait(f"{node} back", lambda: cluster.nodes()[node] == "idle", LIMIT_S)


def other_done(cluster: LocalCluster, _: str) -> None:
    """The other job ends."""
    cluster.run("scancel", "--name=somebody-else")


FAULTS = [Fault(role, name, happens, after) for role in ("train", "inference") for name, happens, after in (
    ("kill", shot, lambda cluster, node: None), ("scancel", cancelled, lambda cluster, node: None),
    ("preemption", preempted, other_done), ("power cut", powered_off, power_again))]


def until(what: str, condition: Callable[[], bool]) -> float:
    """Poll until the condition holds; returns when that was, in seconds since 1970."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(0.1)
    return time.time()


def make_whole(run: SlurmRun) -> None:
    """Wait until the run trains with all its workers, and has a checkpoint behind it."""
    run.with_replicas(3, LIMIT_S)
    run.more_steps(BETWEEN, LIMIT_S)


def measure(run: SlurmRun, fault: Fault) -> dict:
    """Let the fault happen to a run that is whole, and measure what follows."""
    make_whole(run)
    element, jobs = run.elements(fault.role)[0], {other.job for other in run.elements(fault.role)}
    epochs, last = len(run.incarnations), run.steps[-1]
    workers = {(worker["host"], worker["pid"], worker["job"]) for worker in run.workers()}
    started = time.time()
    fault.happens(run, element.node)
    gone = until("the element's end", lambda: element not in run.elements(fault.role))
    # A successor is another element, or the same one again, after a requeue.
    running = until("a successor that SLURM runs", lambda: any(other.job not in jobs - {element.job} for other in run.elements(fault.role)))
    if fault.role == "train":
        again, lost = trained_again(run, epochs, last)
    else:
        again = until("work of a new worker", lambda: any(
            worker["running"] and (worker["host"], worker["pid"], worker["job"]) not in workers for worker in run.workers()))
        now = run.steps[-1]
        lost = {"groups_begun_again": now["num_retries"] - last["num_retries"], "steps_meanwhile": now["step"] - last["step"]}
    fault.after(run.cluster, element.node)
    return {"name": f"{fault.role}: {fault.name}, until it works again", "value": round(again - started, 1), "unit": "s",
            "slurm_s": round(running - started, 1), "element_gone_s": round(gone - started, 1), **lost}


def trained_again(run: SlurmRun, epochs: int, last: dict) -> tuple[float, dict]:
    """When the incarnation after the first `epochs` finished its first step, and what it had to do again up to the record `last`."""
    until("another incarnation", lambda: len(run.incarnations) > epochs)
    claim = run.incarnations[epochs].claim
    again = until("a training step", lambda: run.status.get("epoch") == claim.epoch and run.status["step"] > claim.step)
    trained_at = {record["step"]: record["tokens_trained"] for record in run.steps}
    return again, {"steps_lost": max(0, last["step"] - claim.step),
                   "tokens_to_train_again": max(0, last["tokens_trained"] - trained_at.get(claim.step, 0))}


def time_limit(cluster: LocalCluster, folder: Path) -> dict:
    """One chunk of wall time follows another."""
    run = SlurmRun(cluster, folder / "chunks", *ENDLESS, "cluster.train.time=2", "cluster.signal_delay_s=20", "run.max_hours=0.1")
    until("the end of the first chunk", lambda: run.endings[:1] == ["walltime"])
    end, last = run.incarnations[0].end, run.steps[-1]
    assert end is not None
    running = until("a successor that SLURM runs", lambda: any(element.job != run.incarnations[0].claim.element for element in run.elements("train")))
    again, lost = trained_again(run, 1, last)
    run.drain()
    return {"name": "train: time limit, until it works again", "value": round(again - end.time, 1), "unit": "s",
            "slurm_s": round(running - end.time, 1), **lost}


def launches(cluster: LocalCluster, folder: Path) -> list[dict]:
    """Complete short runs: from the command to the first lease and step, and from the last step to an empty queue."""
    commands, leases, steps, ends, outcomes = [], [], [], [], []
    for number in range(LAUNCHES):
        cluster.wait_idle()
        started = time.time()
        run = SlurmRun(cluster, folder / f"launch-{number}", "run.num_steps=20")
        commands.append(time.time() - started)
        submitted = run.run.submission()["time"]
        leases.append(until("the first lease", lambda run=run: any(worker["running"] for worker in run.workers())) - submitted)  # type: ignore[misc]
        steps.append(until("the first step", lambda run=run: bool(run.steps)) - submitted)  # type: ignore[misc]
        trained = until("the last step", lambda run=run: len(run.steps) == 20)  # type: ignore[misc]
        over = until("an empty queue", lambda: cluster.run("squeue", "--noheader").strip() == "")
        outcome = (run.run.ended() or {})["time"]
        ends.append(over - trained)
        outcomes.append(over - outcome)
    figures = {"`headway --detach` itself": commands, "submission to first lease": leases, "submission to first training step": steps,
               "last training step to empty queue (last evaluation, export of the model)": ends, "outcome on record to empty queue": outcomes}
    return [{"name": name, "value": round(statistics.median(values), 1), "unit": "s", "all": [round(value, 1) for value in values]}
            for name, values in figures.items()]


def faults(cluster: LocalCluster, folder: Path, chosen: list[Fault]) -> list[dict]:
    """One run that meets all of them, and is drained in the end; its books must be right."""
    run = SlurmRun(cluster, folder / "faults", *ENDLESS, *PREEMPTIBLE, f"checkpoint.every_steps={CHECKPOINT_STEPS}", "cluster.crash_backoff_s=0")
    results = []
    for fault in chosen:
        results.append(measure(run, fault))
        print(json.dumps(results[-1]), flush=True)
    make_whole(run)
    started = time.time()
    said = headway(cluster, "stop", "--drain", run.run.path)
    seconds = time.time() - started
    results.append({"name": "headway stop --drain", "value": round(seconds, 1), "unit": "s", "said": said.split(": ", 1)[1].split(";")[0]})
    print(json.dumps(results[-1]), flush=True)
    run.assert_sound("drained")
    return results


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slurm", description=(__doc__ or "").splitlines()[0])
    names = sorted({f"{fault.role}:{fault.name.replace(' ', '-')}" for fault in FAULTS})
    parser.add_argument("--only", nargs="*", choices=[*names, "launch", "time-limit"], help="only these")
    only = parser.parse_args().only
    if reason := available():
        sys.exit(f"no SLURM cluster on this machine: {reason}")
    cluster = LocalCluster(NINF=4, NTRN=2)
    cluster.up()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            results = []
            if not only or "launch" in only:
                results += launches(cluster, Path(temporary))
                for result in results:
                    print(json.dumps(result), flush=True)
            chosen = [fault for fault in FAULTS if not only or f"{fault.role}:{fault.name.replace(' ', '-')}" in only]
            if chosen:
                results += faults(cluster, Path(temporary), chosen)
            if not only or "time-limit" in only:
                results.append(time_limit(cluster, Path(temporary)))
                print(json.dumps(results[-1]), flush=True)
    finally:
        cluster.down()
    slowest = max((result for result in results if "slurm_s" in result), key=lambda result: result["value"] - result["slurm_s"], default=results[0])
    print(json.dumps({"name": "the longest that Headway itself takes to recover, without SLURM's part",
                      "value": round(slowest["value"] - slowest.get("slurm_s", 0.0), 1), "unit": "s", "of": slowest["name"],
                      "all": {result["name"]: result["value"] for result in results}}))


if __name__ == "__main__":
    main()
