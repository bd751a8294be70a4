"""What a node has for the job of a role: SGLang, GPUs, network, shared memory. The preflight's probe asks for it there, before anything is submitted.

    asked (JSON) -> look -> what is wrong, what is worth knowing, the version of NCCL
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from workers.config import ConfigError, ContainerConfig
from workers.run import gpus, gpus_seen
from workers.transport import addresses

START_S = 120.0
"""For an interpreter to import torch or SGLang, on a shared file system and for the first time."""
NOT_A_NETWORK = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "tun", "tap")
"""Beginnings of interfaces' names that lead to no other node."""
ACCELERATORS = (("Transformer Engine", "transformer_engine", "matrices and norms"),
                ("FlashAttention 3", "flash_attn_interface", "attention on Hopper"),
                ("apex", "apex", "Adam and norms in one kernel"))
"""Name, module, and what is faster with it."""
START = Path(__file__).parent / "rollout" / "engines" / "servers" / "sglang" / "start.py"


def look(asked: dict) -> tuple[list[str], list[str], str]:
    """Problems, notes, and the version of NCCL that the GPUs' processes have ('': not known).

    `asked`: `sglang`: the interpreter that is to have SGLang, '' for this one (absent: none is needed); `gpus`: whether the job has GPUs that
    training or SGLang uses, `half`: in bfloat16; `role`: whose job it is; `interface`: transport.interface; `shared_memory`: bytes of weights
    that lie in /dev/shm; `container`: workflow.container, where an agent's commands are run.
    """
    problems, nccl = look_at_sglang(asked["sglang"]) if "sglang" in asked else [], ""
    if asked["gpus"]:
        found, nccl = look_at_gpus(asked.get("sglang", ""), asked["half"], asked["role"])
        problems += found
    found, notes = look_at_network(asked["interface"])
    if asked["gpus"] and asked["role"] == "train":
        notes.append(accelerators())
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            notes.append("there is no C compiler, with which Triton makes the launchers of fused kernels: training may end at its first step. Load a "
                         "module of gcc in cluster.setup")
    if "container" in asked:
        from workers.rollout.workflows.shell_agent import problem  # imports what generates

        problems += filter(None, [problem(msgspec.convert(asked["container"], ContainerConfig))])
    return problems + found + look_at_shared_memory(asked["shared_memory"]), notes, nccl


def accelerators(has: Callable[[str], object] = importlib.util.find_spec) -> str:
    """Which of `ACCELERATORS` this interpreter has, in words; none of them is needed."""
    return "accelerators of training: " + ", ".join(f"{name} {'yes' if has(module) else 'no'} ({what})" for name, module, what in ACCELERATORS)


def look_at_sglang(python: str, start: Path = START) -> list[str]:
    """What is wrong with the SGLang of an interpreter, in the words of `start`, the file that the rollout workers start it by."""
    try:
        asked = subprocess.run([python or sys.executable, str(start), "--check"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               timeout=START_S, check=False)
    except OSError as error:
        return [f"engine.python={python}: cannot be run ({error.strerror}). Give the interpreter of an environment that has SGLang"]
    except subprocess.TimeoutExpired:
        return [f"engine.python={python}: has not answered in {START_S:g} s. Give the interpreter of an environment that has SGLang"]
    return [] if asked.returncode == 0 else [asked.stderr.strip() or f"engine.python={python}: exited with status {asked.returncode}"]


def look_at_gpus(python: str, half: bool, role: str) -> tuple[list[str], str]:
    """What is wrong with the GPUs of this job, as the torch of an interpreter sees them ('': this one), and that torch's version of NCCL."""
    try:
        asked = subprocess.run([python or sys.executable, gpus_seen.__file__], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               timeout=START_S, check=False, env=gpus.environment_of(python))
        found = gpus.found(json.loads(asked.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return [f"{python or sys.executable}: its torch has not said within {START_S:g} s which GPUs it sees. Look at the node with nvidia-smi"], ""
    except (OSError, IndexError, ValueError) as error:
        return [f"{python or sys.executable}: its torch does not start ({error}). Try it by hand"], ""
    words = gpus.problem(found, half, os.environ.get("CUDA_VISIBLE_DEVICES"), role)
    return [words] if words else [], found.nccl


def look_at_network(interface: str) -> tuple[list[str], list[str]]:
    """What is wrong with the network of `transport.interface`, and what it is; with the fastest other one, where that is faster."""
    try:
        address = addresses.address_of(interface)
        name = addresses.interface_of(address)
    except ConfigError as error:
        return [str(error)], []
    speeds = {one: state.speed for one, state in psutil.net_if_stats().items() if state.isup and not one.startswith(NOT_A_NETWORK)}
    here = f"transport.interface={interface}: {name}, {address}" + (f", {speeds[name]} Mbit/s" if speeds.get(name) else "")
    faster = max(speeds, key=lambda one: speeds[one], default=name)
    if interface == "auto" and speeds.get(faster, 0) > max(1, speeds.get(name, 0)):
        here += f". {faster} has {speeds[faster]} Mbit/s: is it the network for data? Then set transport.interface={faster}"
    return [], [here]


def look_at_shared_memory(wanted: float) -> list[str]:
    """Whether /dev/shm holds the versions of the weights that are to lie there."""
    if not wanted:
        return []
    try:
        there = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return [f"/dev/shm cannot be used ({error.strerror}), and weights are to lie there. Set weights.dir to a folder on a local disk"]
    return [] if wanted <= there else [
        f"/dev/shm has {there / 2**30:.3g} GiB, and the versions of the weights that lie there take {wanted / 2**30:.3g} GiB. Ask for it to be made "
        "larger, or set weights.dir to a folder on a local disk"]
