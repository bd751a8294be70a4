"""The local cluster itself: jobs on nodes that are hosts, power cuts, preemption. What Headway makes of them is tested elsewhere."""

import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import SCRIPTS, LocalCluster


@pytest.mark.quick
@pytest.mark.parametrize("command", [("install.sh", "--suite", "sid"), ("install.sh", "--suite"), ("enter.sh", "sid", "true"), ("enter.sh",)])
def test_another_debian_release_is_one_that_is_known(command: tuple[str, ...]) -> None:
    done = subprocess.run([SCRIPTS / command[0], *command[1:]], capture_output=True, text=True, check=False)
    said = "sid" if "sid" in command else ""
    assert done.returncode == 1 and done.stderr == f"slurm/local: no suite '{said}': use one of bookworm trixie forky\n"


@pytest.mark.quick
def test_array_elements_run_on_hosts_of_their_own(cluster: LocalCluster, tmp_path: Path) -> None:
    memory = "touch /dev/shm/$SLURM_ARRAY_TASK_ID; ls /dev/shm > seen-$SLURM_ARRAY_TASK_ID"
    script = f"{memory}; echo $(hostname) $CUDA_VISIBLE_DEVICES > $SLURM_ARRAY_TASK_ID"
    array = cluster.sbatch(script, "--array=0-2", "--partition=inference", "--gres=gpu:1", "--cpus-per-task=8", f"--chdir={tmp_path}")
    for index in range(3):
        cluster.wait_state(f"{array}_{index}", "COMPLETED")
        assert (tmp_path / f"seen-{index}").read_text().split() == [str(index)], "no memory is shared between nodes"
    assert sorted((tmp_path / str(index)).read_text().split() for index in range(3)) == [["inf0", "0"], ["inf1", "0"], ["inf2", "0"]]
    cluster.wait("three elements in the accounts", lambda: [row.state for row in cluster.sacct(array)] == ["COMPLETED"] * 3)


def test_power_cut_requeues_the_job_on_another_node(cluster: LocalCluster, tmp_path: Path) -> None:
    script = "echo $(hostname) ${SLURM_RESTART_COUNT:-0} >> starts; [ ${SLURM_RESTART_COUNT:-0} = 1 ] || sleep 600"
    job = cluster.sbatch(script, "--partition=train", "--requeue", "--open-mode=append", f"--chdir={tmp_path}")
    cluster.wait("the job's first start", (tmp_path / "starts").exists)
    first = cluster.wait_state(job, "RUNNING").node_list
    cluster.power_off(first)
    cluster.wait_state(job, "COMPLETED", timeout_s=120)
    other = "trn1" if first == "trn0" else "trn0"
    assert (tmp_path / "starts").read_text().splitlines() == [f"{first} 0", f"{other} 1"]
    cluster.wait("both incarnations in the accounts", lambda: [row.state for row in cluster.sacct(job)] == ["NODE_FAIL", "COMPLETED"])


def test_a_preempted_job_is_told_in_time_and_comes_back(cluster: LocalCluster, tmp_path: Path) -> None:
    # Without its own requeue it would be COMPLETED and gone: it exits by itself within the grace time.
    on_signal = "trap 'echo USR2 >> signals; scontrol requeue $SLURM_JOB_ID; exit 0' USR2; trap 'echo TERM >> signals' TERM"
    script = f"{on_signal}; touch started-${{SLURM_RESTART_COUNT:-0}}; while :; do sleep 0.1; done"
    place = ("--nodelist=trn0", "--gres=gpu:1", f"--chdir={tmp_path}")
    job = cluster.sbatch(script, "--partition=preemptible", "--requeue", "--signal=B:USR2@60", *place)
    cluster.wait("the job's start", (tmp_path / "started-0").exists)
    winner = cluster.sbatch("sleep 600", "--partition=train", *place)
    cluster.wait_state(winner, "RUNNING", timeout_s=90)
    assert (tmp_path / "signals").read_text().split()[0] == "USR2"
    assert cluster.squeue(job)[0].state == "PENDING"
    cluster.run("scancel", str(winner))
    cluster.wait("its second start", (tmp_path / "started-1").exists)


def test_a_node_without_network_runs_on(cluster: LocalCluster, tmp_path: Path) -> None:
    job = cluster.sbatch("while :; do date +%s.%N > beat; sleep 0.1; done", "--partition=train", "--no-requeue", f"--chdir={tmp_path}")
    cluster.wait("the job's first beat", (tmp_path / "beat").exists)
    node = cluster.wait_state(job, "RUNNING").node_list
    cluster.cut_network(node)
    last_seen = (tmp_path / "beat").read_text()
    cluster.wait_state(job, "NODE_FAIL", timeout_s=120)
    gone_for_slurm = (tmp_path / "beat").read_text()
    cluster.wait("another beat", lambda: (tmp_path / "beat").read_text() not in ("", last_seen, gone_for_slurm))


def test_controller_restarts_under_running_jobs_and_wrong_accounts_are_refused(cluster: LocalCluster) -> None:
    job = cluster.sbatch("sleep 600", "--partition=inference")
    cluster.wait_state(job, "RUNNING")
    cluster.restart_controller()
    assert cluster.squeue(job)[0].state == "RUNNING"
    refused = cluster.run("bash", "-c", "sbatch --account=nobody --wrap true 2>&1; echo status $?")
    assert "Invalid account" in refused and "status 1" in refused


def test_a_node_with_a_suspended_job_loses_its_power_like_any_other(cluster: LocalCluster) -> None:
    """Its processes are frozen, and end all the same."""
    job = cluster.sbatch("sleep 3600", "--partition=preemptible", "--nodelist=trn0")
    cluster.wait_state(job, "RUNNING")
    cluster.run("scontrol", "suspend", str(job))
    cluster.wait_state(job, "SUSPENDED")
    cluster.power_off("trn0")
    cluster.power_on("trn0")
