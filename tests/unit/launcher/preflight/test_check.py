"""What the preflight makes of what a cluster says, and what the probe sees."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from launcher.config.cluster import GpuRequest, RoleConfig
from launcher.config.sbatch_options import KNOWN
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import JobSpec, job_specs
from launcher.preflight import check as preflight
from launcher.preflight import node_probe, node_probe_script, probe_cache
from launcher.preflight.check import check, problems, refuse, waits_for_nodes
from launcher.preflight.node_probe import Answer, asked, broken_setup, command, judge, unanswered
from launcher.slurm import queries
from launcher.slurm.queries import NodeKind
from launcher.slurm.site import Site, gpus_per_node, partitions_in
from launcher.slurm.submit_limits import Limits, Quality
from workers import node_look
from workers.config import AllocationConfig, ClusterKind, ConfigError, Device, Dtype, Server, Transport
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError
from workers.transport import addresses

PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=01:00:00 DisableRootJobs=NO \
ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=2 MaxTime=7-00:00:00 MinNodes=0 Nodes=inf[0-2] PreemptMode=REQUEUE State=UP TotalNodes=3
PartitionName=short AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO MaxNodes=UNLIMITED MaxTime=00:03:00 State=UP
PartitionName=off AllowAccounts=ALL AllowQos=ALL Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=DRAIN
PartitionName=closed AllowAccounts=a,b DenyQos=low Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP
"""
ASKED = {"role": "inference", "gpus": False, "half": False, "interface": "127.0.0.1", "shared_memory": 0}
"""Of a probe without GPUs."""
KINDS = [NodeKind(2, 8, 64, 500_000), NodeKind(1, 4, 32, 250_000)]
QUALITIES = {"normal": Quality(None, None), "day": Quality("1-00:00:00", 50), "low": Quality(None, 20)}
SITE = Site(1001, partitions_in(PARTITIONS), {"gpu": KINDS, "short": KINDS, "off": KINDS, "closed": KINDS}, QUALITIES,
            Limits(10_000, QUALITIES, {}, (), "", "gpu", ()), KNOWN)


def config(devices: int = 4, per_node: int = 0, **role: object) -> FullConfig:
    full = FullConfig()
    full.run.name, full.run.max_hours, full.cluster.kind = "x", 2, ClusterKind.slurm
    full.allocation = AllocationConfig(devices, devices_per_node=per_node)
    full.cluster.inference = RoleConfig(time="60")
    full.cluster.train = RoleConfig(**{"partition": "gpu", "time": "60", **role})  # type: ignore[arg-type]
    return full


def specs_of(full: FullConfig, path: Path = Path("/run")) -> tuple[JobSpec, JobSpec]:
    return job_specs(full.plan(), full, RunFolder(path))


def found(devices: int = 4, per_node: int = 0, **role: object) -> list[str]:
    full = config(devices, per_node, **role)
    return problems(SITE, specs_of(full)[1], full.cluster.train)


def test_what_scontrol_says_is_read() -> None:
    assert set(SITE.partitions) == {"gpu", "short", "off", "closed"} and SITE.default_partition == "gpu"


@pytest.mark.parametrize(("role", "words"), [
    ({"partition": "nope"}, "no such partition. Use one of ['closed', 'gpu', 'off', 'short']"),
    ({"partition": "off"}, "cluster.train.partition='off': it is DRAIN"),
    ({"partition": "short"}, "cluster.train.time='60': must be at most MaxTime=00:03:00"),
    ({"time": "8-00"}, "MaxTime=7-00:00:00"),
    ({"partition": "closed", "qos": "low"}, "cluster.train.qos='low': partition closed is closed to it"),
    ({"qos": "nope"}, "cluster.train.qos='nope': there is no such quality of service"),
    ({"qos": "day", "time": "2-00"}, "MaxWall=1-00:00:00 of qos day"),
    ({"cpus_per_task": 65}, "cluster.train.cpus_per_task=65: train takes 65 CPUs of a node"),
    ({"cpus_per_gpu": 100}, "cluster.train.cpus_per_gpu=100"),
])
def test_what_stands_against_a_role(role: dict, words: str) -> None:
    assert len(told := found(**role)) == 1 and words in told[0]


@pytest.mark.parametrize(("qos", "words"), [
    ("", "MaxWall=0-12:00:00 of qos night, which partition gpu has"), ("day", "of qos night, which partition gpu has"), ("first", ""),
    ("low", "of qos night")])
def test_the_qos_of_a_partition_has_a_wall_time_too(qos: str, words: str) -> None:
    """Before the job's, unless that has the flag OverPartQOS."""
    qualities = QUALITIES | {"night": Quality("0-12:00:00", None), "first": Quality("2-00:00:00", None, first=True)}
    limits = dataclasses.replace(SITE.limits, qualities=qualities, partition_qos={"gpu": "night"})
    site = dataclasses.replace(SITE, qualities=qualities, limits=limits)
    full = config(time="1-00", qos=qos)
    told = problems(site, specs_of(full)[1], full.cluster.train)
    assert len(told) == bool(words) and all(words in each for each in told)
    assert not problems(dataclasses.replace(site, limits=SITE.limits), specs_of(full)[1], full.cluster.train)


def test_nothing_stands_against_what_fits() -> None:
    assert found() == [] and found(partition="") == [] and found(partition="short,gpu") == [], "of several partitions one is enough"
    assert found(partition="off,short") and found(partition="off,nope")
    assert found(qos="day", account="any", cpus_per_task=64) == []
    assert found(partition="closed", account="part-of-a") == [], "SLURM knows which accounts are part of which"
    assert found(qos="day,normal", time="2-00") == [] and found(partition="closed", qos="low,day") == [], "of several one is enough"


@pytest.mark.parametrize(("devices", "per_node", "role", "words"), [
    (64, 16, {}, "train takes 16 GPUs of a node, and the nodes of partition gpu have 8. Use allocation.devices_per_node=8 or less"),
    (64, 8, {"devices_per_node": 16}, "16 GPUs of a node, and the nodes of partition gpu have 8. Use cluster.train.devices_per_node=8 or less"),
    (96, 8, {}, "training takes 3 nodes, and a job in partition gpu at most 2"),
    (96, 8, {"partition": "closed"}, "takes 3 nodes at once, and partition closed has 2 such nodes"),
])
def test_gpus_and_nodes_are_counted(devices: int, per_node: int, role: dict, words: str) -> None:
    assert any(words in problem for problem in found(devices, per_node, **role))
    assert not found(64, 16, gpus=GpuRequest.none, partition="closed"), "without GPUs they are not counted"
    assert node(1, 6, gres="gpu:a100:4,gpu:v100:2").gpus_of("v100") == 2 and node(1, 6, gres="gpu:a100:6").gpus_of("h100") == 6


def node(number: int, gpus: int, state: str = "idle", gres: str = "") -> NodeKind:
    return NodeKind(number, gpus, 64, 500_000, state, gres or f"gpu:{gpus}")


@pytest.mark.parametrize(("kinds", "gpu_type", "number"), [
    ([node(4, 8)], "", 8), ([node(4, 8), node(2, 4), node(9, 0)], "", 8), ([node(1, 16), node(9, 8)], "", 8),
    ([node(20, 8), node(1, 1)], "", 8), ([node(20, 8), node(1, 1, "down*")], "", 8), ([node(20, 4), node(1, 56)], "", 4), ([node(1, 16)], "", 0),
    ([node(4, 8, "drained"), node(2, 4)], "", 4), ([node(3, 0)], "", 0), ([], "", 0),
    ([node(2, 4, gres="gpu:v100:4"), node(2, 8, gres="gpu:h100:8(S:0-1)")], "h100", 8), ([node(2, 4)], "h100", 4),
    ([node(4, 6, gres="gpu:a100:4,gpu:v100:2")], "a100", 4), ([node(4, 18, gres="gpu:a100:4(S:0),gpu:1g.5gb:14")], "A100", 4)])
def test_a_node_gives_as_many_gpus_as_most_can_be_used_with(kinds: list[NodeKind], gpu_type: str, number: int) -> None:
    assert gpus_per_node(kinds, gpu_type, 16) == number


@pytest.mark.parametrize(("kinds", "words"), [
    ([node(2, 8, "drained"), node(1, 8, "down*")], "all nodes of partition gpu are drained or down: the run waits until they are back"),
    ([node(2, 8, "drained"), node(1, 8), node(5, 4)], "too many of the nodes that fit of partition gpu"),
    ([node(2, 8, "allocated"), node(1, 8, "drained")], ""),
    ([node(10, 8, gres="gpu:a100:8"), node(2, 8, "drained", "gpu:h100:8")], "all nodes of partition gpu are drained or down"),
])
def test_drained_nodes_are_waited_for(monkeypatch: pytest.MonkeyPatch, kinds: list[NodeKind], words: str) -> None:
    full, site = config(64, 8, gpu_type="h100"), dataclasses.replace(SITE, nodes={"gpu": kinds})
    assert words in waits_for_nodes(site, specs_of(full)[1], full.cluster.train) and not problems(site, specs_of(full)[1], full.cluster.train)

    def refused(script: str) -> str:
        raise SlurmError("sbatch --test-only: exit status 1: allocation failure: Requested node configuration is not available")

    monkeypatch.setattr(preflight, "look", lambda cluster, roles: site)
    monkeypatch.setattr(queries, "test_only", refused)
    said: list[str] = []
    if words:
        assert check(specs_of(full)[1:], full, RunFolder(Path("/run")), said.append)
        assert len(said) == 1 and said[0].startswith("cluster.train: ") and words in said[0]
    else:
        with pytest.raises(ConfigError, match="SLURM does not accept its jobs: allocation failure"):
            check(specs_of(full)[1:], full, RunFolder(Path("/run")), said.append)


def test_all_that_is_wrong_is_told_at_once() -> None:
    refuse([])
    with pytest.raises(ConfigError, match="^a$"):
        refuse(["a", "a"])
    with pytest.raises(ConfigError, match="2 things stand against this run:\n  - a\n  - b"):
        refuse(["a", "b"])


@pytest.mark.parametrize(("reason", "words"), [
    ("QOSMaxGRESPerJob", "SLURM does not accept its jobs: .*QOSMaxGRESPerJob.*was asked for cluster.train.qos=''"),
    ("QOSGrpSubmitJobsLimit", "QOSGrpSubmitJobsLimit.*may not be queued at once: .* cluster.max_submit=N")])
def test_limits_of_accounts_and_qos_are_told_by_the_line_before_their_common_text(
        monkeypatch: pytest.MonkeyPatch, reason: str, words: str) -> None:
    full = config()

    def refused(script: str) -> str:
        raise SlurmError(f"sbatch --test-only: exit status 1: sbatch: error: {reason}\nallocation failure: Job violates accounting/QOS policy "
                         "(job submit limit, user's size and/or time limits)")

    monkeypatch.setattr(preflight, "look", lambda cluster, roles: SITE)
    monkeypatch.setattr(queries, "test_only", refused)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        check(specs_of(full)[1:], full, RunFolder(Path("/run")), lambda said: None)


def test_slurm_is_asked_about_no_more_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    full, asked = config(), []
    full.cluster.train.qos, full.run.max_hours = "low", 1000
    monkeypatch.setattr(preflight, "look", lambda cluster, roles: SITE)
    monkeypatch.setattr(queries, "test_only", lambda script: asked.append(script) or "")
    said: list[str] = []
    [fitting] = check(specs_of(full)[1:], full, RunFolder(Path("/run")), said.append)
    assert fitting.num_elements == 20 and "--array=0-19%1" in asked[0] and "20 of " in said[0]


def test_a_probes_answer_is_judged() -> None:
    answer = {"problems": [], "host": "n1", "time": 100.0}
    assert judge(answer, "partition p", 98, 101) == [] and judge(answer, "partition p", 102, 104) == []
    assert "on n1 (partition p): its clock is 20 s off" in judge(answer, "partition p", 120, 121)[0] and "39 s off" in judge(answer, "p", 60, 61)[0]
    assert judge(answer | {"problems": ["it burns"]}, "partition p", 99, 101) == ["on n1 (partition p): it burns"]
    busy = "srun: error: Unable to allocate resources: Requested nodes are busy"
    assert isinstance(unanswered(busy, "train", "partition p", 5), str)
    assert "does not start" in unanswered("srun: error: trn0: task 0: Exited with exit code 127", "train", "partition p", 5)[0]


def test_the_probe_asks_for_little() -> None:
    full = config(64, 8, account="a", gpu_type="h100", exclusive=True, mem="900G", cpus_per_gpu=4,
                  sbatch={"comment": "c", "licenses": "l", "chdir": "/home"})
    call = command(specs_of(full)[1], full.cluster.train, full, RunFolder(Path("/run")), "token")
    assert call[0] == "srun" and "--gres=gpu:h100:1" in call and "--account=a" in call and "--licenses=l" in call and "--immediate=10" in call
    assert "--chdir=/home" in call, "relative paths of its set-up are those of the run's beginning, also on a resume from elsewhere"
    assert not any("exclusive" in word or "mem" in word or "comment" in word for word in call[:-1]), "whole nodes: memory is not asked for by number"


@pytest.mark.parametrize(("nodelist", "asked"), [("dgx-01", True), ("n1.site", True), ("n[1-2]", False), ("n1,n2", False), ("/my/nodes", False)])
def test_the_probe_goes_to_the_node_that_is_asked_for(nodelist: str, asked: bool) -> None:
    full = config(64, 8, nodelist=nodelist)
    assert (f"--nodelist={nodelist}" in command(specs_of(full)[1], full.cluster.train, full, RunFolder(Path("/run")), "token")) is asked


@pytest.mark.parametrize(("role", "asked"), [
    ({}, ["--mem=3G"]), ({"mem": "900G"}, ["--mem=3G"]), ({"mem_per_gpu": "64G"}, ["--mem=3G"]), ({"mem": "0"}, []), ({"mem": "0G"}, []),
    ({"exclusive": True}, [])])
def test_the_probe_takes_little_memory(role: dict, asked: list[str]) -> None:
    full = config(64, 8, **role)
    call = command(specs_of(full)[1], full.cluster.train, full, RunFolder(Path("/run")), "token")
    assert [word for word in call if word.startswith("--mem")] == asked


@pytest.mark.parametrize(("damage", "words"), [
    (lambda run: None, ""), (lambda run: (run / "probe").unlink(), "is not there"), (lambda run: (run / "probe").write_text("x"), "another folder"),
    (lambda run: run.chmod(0o755), "can be read by others there (mode 755)")])
def test_the_probe_looks_at_the_run_folder(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    (run / "probe").write_text("token")
    damage(run)
    before = time.time()
    script = Path(node_probe_script.__file__).read_text()
    done = subprocess.run([sys.executable, "-c", script, str(run), "token", json.dumps(ASKED)], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])}, cwd=tmp_path)
    answer = json.loads(done.stdout.split(" ", 1)[1])
    assert before <= answer["time"] <= time.time()
    assert answer["problems"] == [] if not words else words in answer["problems"][0]
    assert words or (len(answer["notes"]) == 1 and answer["notes"][0].startswith("transport.interface=127.0.0.1: lo, 127.0.0.1"))


@pytest.mark.parametrize(("setup", "failed"), [
    (["module load nowhere/1"], ["'module load nowhere/1' fails on a node of partition p with status 127 (bash: line 3: module: command not found)"]),
    (["export A=1", "true && (exit 3)", "source {file}", "false || true"], ["'( exit 3 )' fails on a node of partition p with status 3."]),
    (["for word in a b; do", "  test $word = a || echo $word", "done", "[[ $A ]] && echo a"], []),
    (["set -e", "no-such-program", "echo after"], ["'no-such-program' fails"]),
    (["echo SETUP complete", "echo SETUP 1 done", "false"], ["'false' fails on a node of partition p with status 1."])])
def test_a_line_of_setup_that_fails_is_told(tmp_path: Path, setup: list[str], failed: list[str]) -> None:
    (tmp_path / "activate").write_text("false\nexport ACTIVE=1\n")  # what a file does inside is its own affair
    full = config(setup=[line.format(file=tmp_path / "activate") for line in setup], python="/bin/true")
    script = command(specs_of(full)[1], full.cluster.train, full, RunFolder(tmp_path), "token")[-1]
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"})
    found = broken_setup(done.stdout, done.stderr, "train", "partition p", "token")
    assert len(found) == len(failed) and all(words in problem for words, problem in zip(failed, found, strict=True)), (found, done)
    assert all(problem.startswith("cluster.train.setup: ") for problem in found)


class Answered:
    """A call of a probe that has its answer."""

    def __init__(self, partition: str) -> None:
        self.partition = partition


def test_a_folder_that_a_probe_has_found_shared_stays_so_while_nodes_are_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(node_probe, "PRIVATE_TO_A_NODE", (str(tmp_path),))
    monkeypatch.setattr(queries, "cluster_name", lambda: "c")

    def sum_up(folder: str, inference: str | list[str], train: str | list[str]) -> list[str]:
        answers = [Answer(said) if isinstance(said, list) else Answer(unseen=said) for said in (inference, train)]
        return node_probe._sum_up([Answered("inference"), Answered("train")], answers, RunFolder(tmp_path / folder))  # type: ignore[list-item]

    with pytest.raises(ConfigError, match="no node was free to look"):
        sum_up("runs/1", [], "busy")
    with pytest.raises(ConfigError, match="no node was free to look"):
        sum_up("runs/1", [], "busy")  # the other partition's nodes have not seen it
    assert sum_up("runs/2", "busy", []) == ["busy"]
    assert sum_up("runs/3", "busy", "busy") == ["busy", "busy"] and sum_up("runs/sweeps/a/1", "busy", "busy") == ["busy", "busy"]
    for other in ("other/1", "runs-2/1"):
        with pytest.raises(ConfigError, match="no node was free to look"):
            sum_up(other, "busy", "busy")
    (file,) = (tmp_path / "cache" / "headway").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert not probe_cache.is_shared("c", "train", tmp_path / "runs", time.time() + 30 * 86400), "nodes change"
    file.write_text("[")
    assert not probe_cache.is_shared("c", "train", tmp_path / "runs", time.time())


def test_the_probe_of_inference_looks_at_sglang_too() -> None:
    full = config()
    full.engine.server, full.engine.python = Server.sglang, "/an environment/bin/python"
    inference, train = specs_of(full)
    call = shlex.split(command(inference, full.cluster.inference, full, RunFolder(Path("/run")), "token", 5.0)[-1])
    assert call[-3:-1] == ["/run", "token"] and json.loads(call[-1]) == asked(inference, full, 5.0)
    assert asked(inference, full, 5.0) == {"role": "inference", "gpus": True, "half": False, "interface": "127.0.0.1", "shared_memory": 5.0,
                                           "sglang": "/an environment/bin/python"}
    full.trainer.device, full.trainer.dtype = Device.cuda, Dtype.bfloat16
    assert asked(train, full, 0.0) == {"role": "train", "gpus": True, "half": True, "interface": "127.0.0.1", "shared_memory": 0.0}
    full.cluster.fake_gpus = True
    assert not asked(train, full, 0.0)["gpus"] and not asked(inference, full, 0.0)["gpus"]


def test_the_probe_looks_for_containers_where_commands_run() -> None:
    full = config()
    full.workflow.name, full.workflow.container.disk_mb = "shell_agent", 7
    inference, train = specs_of(full)
    said = json.loads(json.dumps(asked(inference, full, 0.0)))
    assert "container" not in asked(train, full, 0.0) and said["container"]["disk_mb"] == 7 and said["container"]["backend"] == "auto"
    said["container"]["image"] = "/nowhere"
    problems, _, _ = node_look.look({**said, "interface": "127.0.0.1", "sglang": sys.executable, "gpus": False})
    assert [problem for problem in problems if "workflow=shell_agent" in problem]


def test_an_nccl_of_two_versions_is_told_where_weights_go_by_it() -> None:
    full = config()
    calls: Any = [types.SimpleNamespace(role="inference"), types.SimpleNamespace(role="train")]
    different, same = [Answer(nccl="2.30.7"), Answer(nccl="2.29.7")], [Answer(nccl="2.30.7"), Answer(nccl="2.30.7")]
    assert node_probe._versions(calls, different, full) == []
    full.weights.transport = Transport.nccl
    assert node_probe._versions(calls, same, full) == [] and node_probe._versions(calls, [Answer(nccl="2.30.7"), Answer()], full) == []
    (told,) = node_probe._versions(calls, different, full)
    assert "inference 2.30.7, train 2.29.7" in told and "by zmq" in told


def test_the_probe_tells_of_gpus_that_cannot_be_used() -> None:
    problems, nccl = node_look.look_at_gpus("", True, "train")
    if torch.cuda.is_available():
        assert problems == [] and nccl
    else:
        assert len(problems) == 1 and ("built for CPUs" in problems[0] or "driver" in problems[0])


def test_the_probe_tells_of_a_faster_network_and_of_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def network(speed: int) -> Any:
        return types.SimpleNamespace(isup=True, speed=speed)

    monkeypatch.setattr(addresses, "address_of", lambda interface: "10.0.0.7")
    monkeypatch.setattr(addresses, "interface_of", lambda address: "eno1")
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": network(0), "eno1": network(1000), "ib0": network(400000)})
    problems, (told,) = node_look.look_at_network("auto")
    assert not problems and told.startswith("transport.interface=auto: eno1, 10.0.0.7, 1000 Mbit/s") and "set transport.interface=ib0" in told
    assert "ib0" not in node_look.look_at_network("eno1")[1][0], "who names one knows which"
    assert node_look.look_at_shared_memory(1.0) == []
    assert "weights.dir" in node_look.look_at_shared_memory(1e18)[0]


@pytest.mark.parametrize(("version", "words"), [("0.5.23", ""), ("0.5.2", "has SGLang 0.5.2: must be SGLang 0.5.21 or newer"), ("", "has no SGLang")])
def test_the_probe_tells_an_sglang_that_cannot_be_used(tmp_path: Path, version: str, words: str) -> None:
    run, packages = tmp_path / "run", tmp_path / "packages"
    run.mkdir(mode=0o700)
    (run / "probe").write_text("token")
    if version:
        (packages / "sglang.dist-info").mkdir(parents=True)
        (packages / "sglang.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(packages))} exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    script = Path(node_probe_script.__file__).read_text()
    asked = json.dumps(ASKED | {"sglang": str(python)})
    done = subprocess.run([sys.executable, "-c", script, str(run), "token", asked], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])}, cwd=tmp_path)
    problems = json.loads(done.stdout.split(" ", 1)[1])["problems"]
    assert problems == [] if not words else words in problems[0]
    full = config()
    full.engine.server, full.engine.python = Server.sglang, str(python)
    if not words:
        preflight.check_here(full)
        return
    with pytest.raises(ConfigError, match=words):
        preflight.check_here(full)


def test_an_interpreter_that_cannot_be_run_is_told() -> None:
    full = config()
    full.engine.server, full.engine.python = Server.sglang, "/no/such/python"
    with pytest.raises(ConfigError, match=r"engine\.python=/no/such/python: cannot be run \(No such file or directory\)"):
        preflight.check_here(full)


def test_accelerators_are_told_with_what_they_are_for() -> None:
    told = node_look.accelerators(lambda module: module == "apex" or None)
    assert "Transformer Engine no (matrices" in told and "FlashAttention 3 no (attention on Hopper)" in told and "apex yes" in told
