"""Submission to a real SLURM: what is refused before anything is queued, and that nothing that reaches the queue is lost track of."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.slurm import queries
from tests.e2e.runs import ROOT
from tests.slurm.cluster import LocalCluster
from workers.run.folder import RunFolder

LATER = ("+cluster.inference.sbatch.begin=now+1hour", "+cluster.train.sbatch.begin=now+1hour")  # queued, and does not start


def headway(cluster: LocalCluster, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the command on the login node to its end."""
    return subprocess.run([sys.executable, "-m", "launcher", "experiment=tiny", "cluster=local_slurm", *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False, stdin=subprocess.DEVNULL, env={**cluster.env, **environment})


def queued(cluster: LocalCluster) -> list[str]:
    """Names of jobs that have not ended."""
    return cluster.run("squeue", "--noheader", "--format=%j").split()


def assert_refused(cluster: LocalCluster, run: Path, words: str, *arguments: str) -> None:
    result = headway(cluster, "--detach", f"run.dir={run}", *arguments)
    assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr, result.stdout + result.stderr
    assert queued(cluster) == [] and not run.exists()


@pytest.mark.parametrize(("arguments", "words"), [
    (["cluster.account=nobody"], "cluster.train.account='nobody'"),
    (["cluster.train.partition=nowhere"], "Use one of ['inference', 'preemptible', 'short', 'train']"),
    (["cluster.qos=best"], "cluster.inference.qos='best': there is no such quality of service. Use one of ['normal']"),
    (["cluster.inference.partition=short"], "cluster.inference.time='60': must be at most MaxTime=00:03:00 of partition short"),
    (["allocation.num_devices=4", "allocation.replica_size=2"], "allocation.replica_size: inference takes 2 GPUs of a node"),
    (["cluster.train.cpus_per_task=64"], "cluster.train.cpus_per_task=64"),
    (["cluster.train.mem=900G"], "cluster.train.mem='900G'"),
    (["cluster.train.constraint=h100"], "cluster.train.constraint='h100'"),
    (["cluster.train.gpu_type=h100"], "cluster.train.gpu_type='h100'"),
    (["+cluster.train.sbatch.contigous=true"], "Did you mean contiguous?"),
    (["cluster.setup=[\"export PATH=/nowhere\"]", "cluster.python=python"], "its Python does not start on a node of partition train"),
    (["cluster.python=/usr/bin/python3"], "/usr/bin/python3 has no "),
    (["cluster.setup=[module load cuda]"], "cluster.train.setup: 'module load cuda' fails on a node of partition train with status 127"),
])
@pytest.mark.quick
def test_mistakes_are_refused_before_anything_is_queued(cluster: LocalCluster, tmp_path: Path, arguments: list[str], words: str) -> None:
    assert_refused(cluster, tmp_path / "run", words, *arguments)


@pytest.mark.parametrize("state", ["DOWN", "DRAIN", "INACTIVE"])
@pytest.mark.quick
def test_a_partition_that_is_not_up_is_refused(cluster: LocalCluster, tmp_path: Path, state: str) -> None:
    cluster.set_partition("train", state)
    assert_refused(cluster, tmp_path / "run", f"cluster.train.partition='train': it is {state}")


def test_a_folder_that_nodes_have_for_themselves_is_refused(cluster: LocalCluster) -> None:
    run = Path(f"/dev/shm/headway-test-{os.getpid()}")
    assert_refused(cluster, run, f"on trn0 (partition train): the run folder {run} is not there")


def test_where_no_node_is_free_the_run_is_queued_all_the_same(cluster: LocalCluster, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    busy = cluster.sbatch("sleep 600", "--partition=train", "--nodes=2", "--exclusive")
    cluster.wait_state(busy, "RUNNING")
    refused = headway(cluster, "--detach", f"run.dir={tmp_path / 'run'}", "cluster.probe_s=1", **cache)
    assert refused.returncode == 2 and "is in a folder that each node has for itself" in refused.stderr and not (tmp_path / "run").exists()
    result = headway(cluster, "--detach", f"run.dir={tmp_path / 'run'}", "cluster.probe_s=0")
    assert result.returncode == 0, result.stderr
    assert len(set(queued(cluster))) == 3
    cluster.cancel_all()
    cluster.wait_idle()
    seen = headway(cluster, "--detach", f"run.dir={tmp_path / 'seen'}", *LATER, **cache)
    assert seen.returncode == 0 and "not probed" not in seen.stdout, seen.stdout + seen.stderr
    cluster.wait_state(cluster.sbatch("sleep 600", "--partition=train", "--nodes=2", "--exclusive"), "RUNNING")
    second = headway(cluster, "--detach", f"run.dir={tmp_path / 'second'}", "cluster.probe_s=1", *LATER, **cache)
    assert second.returncode == 0 and "partition train was not probed" in second.stdout, second.stdout + second.stderr


@pytest.mark.quick
def test_sbatch_gets_what_a_dry_run_shows(cluster: LocalCluster, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a b" / "it's")
    arguments = ["allocation.num_devices=4", f"run.dir='{str(run.path).replace(chr(39), chr(92) + chr(39))}'", *LATER]
    shown = headway(cluster, "--dry-run", *arguments)
    assert shown.returncode == 0 and not run.path.exists(), shown.stderr
    assert headway(cluster, "--detach", *arguments).returncode == 0
    token = run.submission()["token"]
    arrays = run.submission()["arrays"]
    assert [(array["role"], array["num_elements"], array["throttle"]) for array in arrays] == [("inference", 84, 3), ("train", 28, 1)]
    for array in arrays:
        held = cluster.run("scontrol", "write", "batch_script", array["job_id"], "-")
        assert held.strip() in shown.stdout.replace("00000000", token)
        elements = {row.index for row in cluster.squeue(array["job_id"])}
        assert elements == set(range(array["num_elements"]))


@pytest.mark.quick
def test_from_the_login_node_of_another_cluster_nothing_is_touched(cluster: LocalCluster, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert headway(cluster, "--detach", f"run.dir={run.path}", "cluster.probe_s=0", *LATER).returncode == 0
    submitted, before = run.submission(), queued(cluster)
    assert {array["cluster_name"] for array in submitted["arrays"]} == {"headway"} and before
    elsewhere = [array | {"cluster_name": "elsewhere"} for array in submitted["arrays"]]
    run.submitted.write_text(json.dumps(submitted | {"arrays": elsewhere}))
    call = functools.partial(subprocess.run, cwd=ROOT, env=cluster.env, capture_output=True, text=True, timeout=120, check=False)
    said = "in the queue of cluster 'elsewhere', and SLURM here is that of 'headway'"
    for command, status in (("status", 0), ("watch", 2), ("resume", 2), ("stop", 2)):
        result = call([sys.executable, "-m", "launcher", command, str(run.path)])
        assert result.returncode == status and said in result.stdout + result.stderr
    assert queued(cluster) == before and run.ended() is None
    run.submitted.write_text(json.dumps(submitted))
    assert call([sys.executable, "-m", "launcher", "stop", str(run.path)]).returncode == 0 and queued(cluster) == []


def test_elements_run_and_log_whatever_the_folder_is_called(cluster: LocalCluster, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a b")
    assert headway(cluster, "--detach", f"run.dir='{run.path}'").returncode == 0
    log = run.jobs / f"{run.arrays('inference')[0]}_0_0_log.out"
    cluster.wait("the log of the first replica", lambda: log.exists() and "Starting with JobEnvironment" in log.read_text())


@contextlib.contextmanager
def slow(folder: Path, call: int, seconds: float) -> Iterator[str]:
    """A PATH on which sbatch answers at once to the calls before `call`; that one reaches SLURM at once too, but its answer takes a while."""
    folder.mkdir()
    (folder / "sbatch").write_text(f"""#!/bin/bash
[[ $1 == --* ]] && exec /usr/bin/sbatch "$@"
echo >>{folder}/calls
[[ $(wc -l <{folder}/calls) -lt {call} ]] && exec /usr/bin/sbatch "$@"
answer=$(/usr/bin/sbatch "$@")
touch {folder}/reached
sleep {seconds}
echo "$answer"
""")
    (folder / "sbatch").chmod(stat.S_IRWXU)
    yield f"{folder}:{os.environ['PATH']}"


@pytest.mark.quick
@pytest.mark.parametrize("call", [1, 2])
def test_a_launcher_that_is_killed_between_submissions_loses_nothing(
        cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    run = RunFolder(tmp_path / "run")
    with slow(tmp_path / "bin", call, 600) as path:
        launcher = subprocess.Popen([sys.executable, "-m", "launcher", "--detach", "experiment=tiny", "cluster=local_slurm", f"run.dir={run.path}",
                                     "cluster.probe_s=0", *LATER], cwd=ROOT, env={**cluster.env, "PATH": path}, start_new_session=True)
        cluster.wait("the array whose answer is lost", (tmp_path / "bin" / "reached").exists)
        launcher.kill()
        launcher.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    record = run.submission()
    assert not record["complete"] and len(record["arrays"]) == call and record["arrays"][-1]["job_id"] is None
    assert all(array["job_id"] for array in record["arrays"][:-1])
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    found = queries.jobs_named(record["arrays"][-1]["name"])
    assert len(found) == 1 and set(queued(cluster)) == {array["name"] for array in record["arrays"]}
    cluster.run(sys.executable, "-m", "launcher", "stop", run.path, timeout_s=120, cwd=ROOT)
    assert queued(cluster) == []


def test_ctrl_c_during_submission_takes_everything_back(cluster: LocalCluster, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with slow(tmp_path / "bin", 2, 3) as path:
        launcher = subprocess.Popen([sys.executable, "-m", "launcher", "--detach", "experiment=tiny", "cluster=local_slurm", f"run.dir={run.path}",
                                     "cluster.probe_s=0", *LATER], cwd=ROOT, env={**cluster.env, "PATH": path}, start_new_session=True,
                                    stdout=subprocess.PIPE, text=True)
        cluster.wait("the array whose answer is late", (tmp_path / "bin" / "reached").exists)
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does it: sbatch gets it too
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode != 0 and "what was submitted has been cancelled" in output
    assert queued(cluster) == [] and "submission failed" in (run.ended() or {})["cause"]


def test_chunks_that_a_limit_does_not_let_in_are_left_for_later(cluster: LocalCluster, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    user = cluster.run("id", "-un").strip()
    cluster.run("sacctmgr", "--immediate", "--quiet", "modify", "user", user, "set", "MaxSubmitJobs=20")
    try:
        result = headway(cluster, "--detach", f"run.dir={run.path}", "allocation.num_devices=4", "cluster.probe_s=0", *LATER)
        assert result.returncode == 0 and "5 of 28 chunks are submitted now" in result.stdout, result.stderr
        assert [array["num_elements"] for array in run.submission()["arrays"]] == [15, 5]
        again = headway(cluster, "--detach", f"run.dir={tmp_path / 'again'}")
        assert again.returncode == 2 and "you may have 0 more jobs in the queue" in again.stderr
        forced = headway(cluster, "--detach", f"run.dir={tmp_path / 'forced'}", "cluster.max_submit=500", "cluster.probe_s=0")
        assert forced.returncode == 2 and "AssocMaxSubmitJobLimit" in forced.stderr
        assert set(queued(cluster)) == {array["name"] for array in run.submission()["arrays"]}
    finally:
        cluster.run("sacctmgr", "--immediate", "--quiet", "modify", "user", user, "set", "MaxSubmitJobs=-1")


def test_a_launcher_inside_a_job_submits_jobs_of_their_own_shape(cluster: LocalCluster, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    call = f"{sys.executable} -m launcher --detach experiment=tiny cluster=local_slurm run.dir={run.path} cluster.probe_s=0 {' '.join(LATER)}"
    job = cluster.sbatch(f"cd {ROOT}; {call}", "--partition=preemptible", "--nodes=2", "--ntasks=4", "--mem-per-cpu=200M", f"--output={tmp_path}/log")
    cluster.wait_state(job, "COMPLETED", 90)
    for array in run.submission()["arrays"]:
        shown = cluster.run("scontrol", "show", "job", "--oneliner", f"{array['job_id']}_0")
        for words in ("NumNodes=1-1 ", "NumTasks=1 ", f"Partition={array['role']} ", "MinMemoryNode=", "gres/gpu=1"):
            assert words in shown, shown


def test_a_sweep_submits_all_its_runs_in_lanes(cluster: LocalCluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    result = headway(cluster, "-m", "staleness.eta=0,1,2", "launch.max_concurrent_runs=2", f"hydra.sweep.dir={sweep}", "cluster.probe_s=0", *LATER)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = [RunFolder(Path(entry["run"])) for entry in json.loads((sweep / "sweep.json").read_bytes())["runs"]]
    assert [run.path.name for run in runs] == ["000-tiny", "001-tiny", "002-tiny"]
    first, second, third = ([array["job_id"] for array in run.submission()["arrays"]] for run in runs)
    for job in third:
        shown = cluster.run("scontrol", "show", "job", "--oneliner", f"{job}_0")
        waits = re.search(r"Dependency=(\S+)", shown)
        assert waits and all(f"afterany:{earlier}_" in waits[1] for earlier in first) and not any(f":{other}_" in waits[1] for other in second)
    assert all("Dependency=(null)" in cluster.run("scontrol", "show", "job", "--oneliner", f"{job}_0") for job in first + second)


def test_ctrl_c_leaves_a_submitted_run_alone(cluster: LocalCluster, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    launcher = subprocess.Popen([sys.executable, "-m", "launcher", "experiment=tiny", "cluster=local_slurm", f"run.dir={run.path}",
                                 "cluster.probe_s=0", *LATER], cwd=ROOT, env=cluster.env, stdout=subprocess.PIPE, text=True)
    cluster.wait("a complete submission", lambda: run.submission().get("complete", False))
    cluster.wait("a launcher that follows the run", (run.path / "supervisor.lock").exists)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 0 and f"headway stop {run.path}" in output and "the run goes on" in output
    assert run.ended() is None and not run.launcher_lock.exists() and len(queued(cluster)) == 2


def test_the_command_of_a_container_reaches_the_node(cluster: LocalCluster, tmp_path: Path) -> None:
    """With a stand-in for apptainer that notes what it is told and runs the rest."""
    tool, note = tmp_path / "bin" / "apptainer", tmp_path / "told"
    tool.parent.mkdir()
    tool.write_text(f"""#!/bin/bash
echo "$@" >>{note}
until [[ $1 == *.sif ]]; do shift; done
exec "${{@:2}}"
""")
    tool.chmod(stat.S_IRWXU)
    run = RunFolder(tmp_path / "run")
    result = headway(cluster, "--detach", f"run.dir={run.path}", f"cluster.setup=['export PATH={tool.parent}:$PATH']",
                     "cluster.container.kind=apptainer",
                     "cluster.container.image=/images/x.sif", "cluster.container.mounts=['/data:/data:ro']", f"cluster.python={sys.executable}")
    assert result.returncode == 0, result.stderr
    log = run.jobs / f"{run.arrays('train')[0]}_0_0_log.out"
    cluster.wait("the log of the trainer", lambda: log.exists() and "Starting with JobEnvironment" in log.read_text())
    told = note.read_text()
    assert f"exec --nv --bind {ROOT}:{ROOT},{run.path}:{run.path},/data:/data:ro /images/x.sif {sys.executable} -u -m submitit.core._submit" in told
