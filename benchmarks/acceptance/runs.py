"""Whole runs on this machine, of a Qwen3-0.6B with random weights: `runs agreement|killed|eight|drift [--small]`.

    agreement   headway selftest: how far are SGLang's log-probs from the trainer's, on average?
    killed      the launcher and all that is the run's is killed after a step, and `headway resume` goes on: is every step there once?
    eight       an 8B model, 4 GPUs for inference and 4 for training: how long does generation stand still for new weights, and training for data?
    drift       half an hour, the same: do steps become longer, or the processes larger?

With one GPU engine and trainer share it: it is named twice in CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.acceptance import shapes
from benchmarks.acceptance.running import PYTHON, ROOT, tell
from launcher.jobs import liveness
from workers.run.folder import RunFolder

GAP, PAUSE_S, IDLE, DRIFT = 0.03, 1.5, 0.1, 1.1
STEPS, KILLED_AFTER, DEADLINE_S = 6, 2, 600.0


def arguments(work: Path, small: bool, shape: dict[str, Any]) -> list[str]:
    """Of a run with a model that is made here."""
    model = shapes.write_model(work / "model", *((shapes.SMALL, "float32") if small else (shape, "bfloat16")))
    shapes.add_tokenizer(model, work / "tiny")
    common = ["experiment=tiny", "model=hf", f"model.path={model}", "evaluation.every_steps=0", "workflow.stop=[]", f"run.dir={work / 'run'}"]
    if small:
        return [*common, "engine.num_threads=1"]
    return [*common, "engine=sglang", f"engine.python={os.environ['HEADWAY_SGLANG_PYTHON']}", "engine.dtype=bfloat16", "trainer.dtype=bfloat16",
            "engine.context_length=1024", "workflow.max_new_tokens=512", "trainer.microbatch_tokens=8192", "trainer.lr=1e-6"]


def _half(small: bool) -> list[str]:
    """So much of the GPU for SGLang that training has room beside it."""
    return [] if small else ["engine.mem_fraction=0.3"]


def headway(*words: str, share: bool = False) -> subprocess.Popen:
    """The command, in the process group of this check; `share`: the one GPU is for both roles."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    shared = {"CUDA_VISIBLE_DEVICES": f"{own},{own}"} if share else {}
    return subprocess.Popen([PYTHON, "-m", "launcher", *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=os.environ | shared)


def records(work: Path) -> list[dict[str, Any]]:
    """What the trainer has written of its steps."""
    file = work / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def agreement(work: Path, small: bool) -> None:
    """A self-test, whose run is kept."""
    status = headway("selftest", "--plain", "--keep", *arguments(work, small, shapes.QWEN3_06B), *_half(small), share=not small).wait()
    gaps = [record["logprob_gap_mean"] for record in records(work) if "logprob_gap_mean" in record]
    tell(f"{max(gaps):.4f}" if gaps else "-", status == 0 and bool(gaps) and max(gaps) <= GAP, "" if gaps else "no log-probs were compared")


def killed(work: Path, small: bool) -> None:
    """Kill it, go on, and look at its steps."""
    settings = [*arguments(work, small, shapes.QWEN3_06B), f"run.num_steps={STEPS}", "checkpoint.every_steps=1", "trainer.export_final=false",
                *_half(small)]
    first, deadline = headway("--plain", *settings, share=not small), time.monotonic() + DEADLINE_S
    while len(records(work)) < KILLED_AFTER and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    while liveness.still_there(RunFolder(work / "run")) and time.monotonic() < deadline:
        liveness.kill(RunFolder(work / "run"))
    status = headway("resume", str(work / "run"), "--plain", share=not small).wait()
    steps = [record["step"] for record in records(work)]
    tell(f"steps {steps}", status == 0 and sorted(set(steps)) == list(range(1, STEPS + 1)) and len(steps) == STEPS,
         "" if status == 0 else f"resume ended with status {status}")


def eight(work: Path, small: bool) -> None:
    """Eight GPUs, an 8B model, answers of 4,096 tokens: pause and waiting, of the steps after the first two."""
    settings = [*arguments(work, small, shapes.QWEN3_8B), "allocation.num_devices=8", "allocation.inference_fraction=0.5", "trainer.parallel.tp=2",
                "weights=nccl", "run.num_steps=12", "trainer.batch_groups=16", "engine.context_length=8192", "workflow.max_new_tokens=4096",
                "rollout.concurrency=auto", "trainer.export_final=false"]
    status = headway("--plain", *settings).wait()
    found = records(work)
    if status or len(found) < 4:
        tell("-", False, f"the run ended with status {status} after {len(found)} steps")
        return
    first, last = found[1], found[-1]
    updates = max(1.0, last["weight_updates"] - first["weight_updates"])
    pause = (last["weight_update_s"] - first["weight_update_s"]) / updates
    waited, worked = (sum(record[name] for record in found[2:] for name in names) for names in (("wait_batch_s",), ("train_s", "publish_s")))
    idle = waited / (waited + worked)
    tell(f"{pause:.2f} s, {idle:.0%}", pause <= PAUSE_S and idle <= IDLE)


def drift(work: Path, small: bool) -> None:
    """The median of a step's time at the end over that in the beginning, and the same of the memory of all processes."""
    minutes = 0.3 if small else 30.0
    settings = [*arguments(work, small, shapes.QWEN3_06B), "run.num_steps=100000", "trainer.export_final=false", "checkpoint.every_steps=20",
                *([] if small else ["allocation.num_devices=8", "weights=nccl"])]
    command, began, sizes = headway("--plain", *settings), time.monotonic(), list[int]()
    while time.monotonic() - began < 60 * minutes + 120 and command.poll() is None:
        time.sleep(minutes)
        found = records(work)
        if len(found) > 2:
            sizes.append(sum(memory(process) for process in liveness.still_there(RunFolder(work / "run"))))
        if len(sizes) >= 60:
            break
    headway("stop", str(work / "run")).wait()
    command.wait()
    times = [record["train_s"] for record in records(work)][2:]
    third = max(1, len(times) // 3)
    if len(sizes) < 6 or len(times) < 6:
        tell("-", False, f"the run ended after {len(times)} steps")
        return
    longer = statistics.median(times[-third:]) / statistics.median(times[:third])
    larger = statistics.median(sizes[-len(sizes) // 3:]) / statistics.median(sizes[:len(sizes) // 3])
    tell(f"{longer:.2f}, {larger:.2f}", longer <= DRIFT and larger <= DRIFT, f"{len(times)} steps")


def memory(process: Any) -> int:
    """Bytes of a process that may be ending."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def main(what: str, *rest: str) -> None:
    """One of them, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="headway-acceptance-") as folder:
        {"agreement": agreement, "killed": killed, "eight": eight, "drift": drift}[what](Path(folder), "--small" in rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
