"""One short job in each partition that looks at the run folder and at this code from there (node_probe_script.py).

It says what is wrong there, which network the nodes talk over and whether there is a faster one, and the NCCL of either role: versions that
differ form no group for weights. It asks for one device of a node and a little memory, for as long as `cluster.probe_s`. Where no node is free
in that time, the run goes on without: its jobs will say what they miss, later. A folder that looks private to a node must have been found shared
before (probe_cache.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher.config.cluster import GPU_OPTIONS, ContainerKind, RoleConfig, as_sbatch
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import JobSpec
from launcher.jobs.sbatch_script import mounted, python_command, sbatch_options, setup_lines, srun_arguments
from launcher.jobs.submit import outside_any_job
from launcher.preflight import node_probe_script, probe_cache
from launcher.preflight.check import refuse
from launcher.slurm import queries
from workers.config import Device, Dtype, Server, Transport
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError

ANSWER_S = 300.0
MAX_SKEW_S = 5.0
MEMORY, MEMORY_GPU = "500M", "3G"
"""Without a number a job gets all of a node's memory on some clusters, and waits for a node that is empty."""
PRIVATE_TO_A_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
# Tells each line of cluster.*.setup that fails: nothing else does, and the job would go on without. Only lines, not what a file that they read does.
# The probe's token marks them: such lines may say SETUP of their own.
TRAP = "trap 'status=$?; ((${#BASH_SOURCE[@]})) || printf \"SETUP %s %s %s\\n\" TOKEN $status \"$BASH_COMMAND\"' ERR"


@dataclass(frozen=True)
class Answer:
    """What a probe has said: problems, what is worth knowing, and its NCCL. `unseen`: why it has said nothing."""

    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    nccl: str = ""
    unseen: str = ""


@contextlib.contextmanager
def probing(specs: tuple[JobSpec, ...], config: FullConfig, run: RunFolder,
            shared_memory: Mapping[str, float]) -> Iterator[Callable[[], list[str]]]:
    """Probe while the block does something else. Gives a function that waits for the probes, raises `ConfigError` with what is wrong
    there, and returns what is worth knowing, and what could not be looked at. `shared_memory`: bytes in the memory of a node of each role."""
    if not config.cluster.probe_s:
        yield list
        return
    token = secrets.token_hex(16)
    (run.path / node_probe_script.TOKEN).write_text(token)
    pool = ThreadPoolExecutor(len(specs))
    with outside_any_job():
        calls = [_Call(spec, config, run, token, shared_memory.get(spec.role, 0.0)) for spec in specs]
    answers = [pool.submit(call.answer) for call in calls]
    try:
        yield lambda: _sum_up(calls, [answer.result() for answer in answers], run) + _versions(calls, [answer.result() for answer in answers], config)
    finally:
        for call in calls:
            call.process.terminate()
        pool.shutdown()
        (run.path / node_probe_script.TOKEN).unlink(missing_ok=True)


def _sum_up(calls: list[_Call], answers: list[Answer], run: RunFolder) -> list[str]:
    notes = [note for answer in answers for note in (answer.notes if not answer.unseen else [answer.unseen])]
    problems = [problem for answer in answers for problem in answer.problems]
    cluster, folder = _cluster_name(), run.path.resolve().parent
    for call, answer in zip(calls, answers, strict=True):
        if not answer.problems and not answer.unseen:
            probe_cache.remember(cluster, call.partition, folder, time.time())
    unseen = [call for call, answer in zip(calls, answers, strict=True)
              if answer.unseen and not probe_cache.is_shared(cluster, call.partition, folder, time.time())]
    if unseen and not problems and any(run.path.is_relative_to(folder) for folder in PRIVATE_TO_A_NODE):
        problems.append(f"run.dir={run.path}: is in a folder that each node has for itself, and no node was free to look whether it is shared here. "
                        "Choose a run.dir on a shared file system, or set cluster.probe_s=0 if this one is")
    refuse(problems)
    return notes


def _versions(calls: list[_Call], answers: list[Answer], config: FullConfig) -> list[str]:
    """Whether the roles' NCCL is one, where weights are to be broadcast by it."""
    found = {call.role: answer.nccl for call, answer in zip(calls, answers, strict=True) if answer.nccl}
    if config.weights.transport is not Transport.nccl or len(set(found.values())) < 2:
        return []
    told = ", ".join(f"{role} {version}" for role, version in found.items())
    return [f"weights=nccl: NCCL is not the same ({told}), and forms no group of two versions: weights will go by zmq. Use one environment for both "
            "roles (constraints/gpu.txt)"]


def _cluster_name() -> str:
    try:
        return queries.cluster_name()
    except SlurmError:
        return ""


def asked(spec: JobSpec, config: FullConfig, shared_memory: float) -> dict[str, object]:
    """What the probe of a role is to look at, besides the run folder and Python."""
    sglang = spec.role == "inference" and config.engine.server is Server.sglang
    used = sglang and config.engine.device != "cpu" if spec.role == "inference" else config.trainer.device is Device.cuda
    on_gpus = config.gives_gpus(spec.role) and used
    dtype = config.engine.dtype if spec.role == "inference" else config.trainer.dtype
    container = spec.role == "inference" and config.workflow.name == "shell_agent"
    return {"role": spec.role, "gpus": on_gpus, "half": dtype is Dtype.bfloat16, "interface": config.transport.interface,
            "shared_memory": shared_memory, **({"sglang": config.engine.python} if sglang else {}),
            **({"container": dataclasses.asdict(config.workflow.container)} if container else {})}


def command(spec: JobSpec, part: RoleConfig, config: FullConfig, run: RunFolder, token: str, shared_memory: float = 0.0) -> list[str]:
    """The srun call of the probe. `shared_memory`: bytes of weights that are to lie in such a node's memory."""
    one = dataclasses.replace(spec, nodes_per_element=1, tasks_per_node=1, devices_per_node=1)
    memory = MEMORY_GPU if config.gives_gpus(spec.role) else MEMORY
    whole = part.exclusive or re.fullmatch(r"0+[KMGT]?B?", part.mem, re.IGNORECASE) is not None  # such a site may not take a number
    few = dataclasses.replace(part, exclusive=False, mem="" if whole else memory, mem_per_gpu="", cpus_per_task=0, sbatch={
        name: value for name, value in part.sbatch.items() if as_sbatch(name) in ("licenses", "chdir", *GPU_OPTIONS)},
        nodelist="" if {",", "[", "/"} & set(part.nodelist) else part.nodelist)  # several nodes cannot be asked for one
    options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in sbatch_options(one, few).items()]
    folders = mounted(config, run)
    arguments = shlex.join([Path(node_probe_script.__file__).read_text(), str(run.path), token, json.dumps(asked(spec, config, shared_memory))])
    inside = f"{python_command(part, folders)} -c {arguments}"
    lines = "\n".join([TRAP.replace("TOKEN", token), *setup_lines(one, part), "trap - ERR", f"exec {inside}"])
    container = [argument for argument in srun_arguments(part, folders) if part.container.kind is ContainerKind.pyxis and "container" in argument]
    return ["srun", "--quiet", f"--immediate={max(1, round(config.cluster.probe_s))}", "--nodes=1", "--ntasks=1", "--time=5",
            f"--job-name={config.run.name}-probe", *options, *container, *part.srun_args, "bash", "-c", lines]


class _Call:
    """A call of srun that is under way."""

    def __init__(self, spec: JobSpec, config: FullConfig, run: RunFolder, token: str, shared_memory: float) -> None:
        part = config.cluster.role(spec.role)
        self.role, self._wait_s = spec.role, config.cluster.probe_s
        self.partition = part.partition
        self._where = f"partition {part.partition or '(default)'}"
        self._before, self._token = time.time(), token
        self.process = subprocess.Popen(command(spec, part, config, run, token, shared_memory), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, errors="replace")

    def answer(self) -> Answer:
        """What it has said, or why it has not."""
        try:
            output, words = self.process.communicate(timeout=self._wait_s + ANSWER_S)
        except subprocess.TimeoutExpired:
            return Answer(unseen=f"{self._where} was not probed: no answer within {self._wait_s + ANSWER_S:g} s")
        after = time.time()
        lines = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith("PROBE ")]
        broken = broken_setup(output, words, self.role, self._where, self._token)
        if lines:
            said = json.loads(lines[-1])
            notes = [f"on {said['host']} ({self._where}): {note}" for note in said["notes"]]
            return Answer(broken + judge(said, self._where, self._before, after), notes, said["nccl"])
        if broken:
            return Answer(broken)
        why = unanswered("; ".join(words.splitlines()) or f"exit status {self.process.returncode}", self.role, self._where, self._wait_s)
        return Answer(unseen=why) if isinstance(why, str) else Answer(why)


def broken_setup(output: str, words: str, role: str, where: str, token: str) -> list[str]:
    """The lines of cluster.ROLE.setup that failed there, with what was said meanwhile. Pure."""
    said = "; ".join(line for line in words.splitlines() if not line.startswith("srun:"))
    failed = re.findall(rf"^SETUP {re.escape(token)} (\d+) (.*)$", output, re.MULTILINE)
    return [f"cluster.{role}.setup: {line!r} fails on a node of {where} with status {status}{f' ({said})' if said else ''}. "
            "Correct it, or write `|| true` after it where that does no harm" for status, line in failed]


def unanswered(words: str, role: str, where: str, wait_s: float) -> str | list[str]:
    """What srun's words mean where the node said nothing: no free node is a note, anything else a problem. Pure."""
    if "Unable to allocate resources" in words or "immediate" in words.lower():
        return f"{where} was not probed: no node of it was free within {wait_s:g} s"
    return [f"cluster.{role}: its Python does not start on a node of {where}: {words}. Correct cluster.setup, cluster.python or cluster.container"]


def judge(answer: dict, where: str, before: float, after: float) -> list[str]:
    """The problems in a probe's answer, which arrived between `before` and `after`. Pure."""
    found = [f"on {answer['host']} ({where}): {problem}" for problem in answer["problems"]]
    skew = max(before - answer["time"], answer["time"] - after)
    if skew > MAX_SKEW_S:
        found.append(f"on {answer['host']} ({where}): its clock is {skew:.0f} s off; at most {MAX_SKEW_S:g} s do no harm. "
                     f"Ask for a time service, or exclude the node")
    return found
