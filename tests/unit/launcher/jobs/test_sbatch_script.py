"""From the config of a role to sbatch's options and srun's, and which options may not be set by hand."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config.cluster import ClusterConfig, ContainerConfig, ContainerKind, GpuRequest, RoleConfig
from launcher.config.sbatch_options import KNOWN, check_options, names_in_help
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import JobSpec, job_specs
from launcher.jobs.sbatch_script import ROOT, mounted, python_command, python_path, sbatch_options, setup_lines, srun_arguments, waiting_lines
from launcher.jobs.submit import scripts
from workers.config import AllocationConfig, ClusterKind, ConfigError
from workers.entry import Element
from workers.run.folder import RunFolder

SPEC = JobSpec("train", "x-train", Element("train", "/run"), 1, 3, 2, 4, 4, 3600, 2)
# The beginning of what sbatch 22.05.8 says, and some of its odder lines.
HELP = """Usage: sbatch [OPTIONS(0)...] [ : [OPTIONS(N)...]] script(0) [args(0)...]

Parallel run options:
  -a, --array=indexes         job array index values
      --bb=<spec>             burst buffer specifications
      --cpu-freq=min[-max[:gov]] requested cpu frequency (and governor)
      --deadline=time         remove the job if no ending possible before
                              this deadline (start > (deadline - time[-min]))
      --export[=names]        specify environment variables to export
                              --mem >= --mem-per-cpu if --mem is specified.
  -B  --extra-node-info=S[:C[:T]]  combine request of sockets per node,
"""


def checked(**role: object) -> None:
    check_options(ClusterConfig(kind=ClusterKind.slurm, train=RoleConfig(**role)))  # type: ignore[arg-type]


def test_the_names_in_sbatchs_help() -> None:
    assert names_in_help(HELP) == {"array", "bb", "cpu-freq", "deadline", "export", "mem", "mem-per-cpu", "extra-node-info"}
    assert names_in_help(HELP) <= KNOWN


@pytest.mark.parametrize(("name", "words"), [
    ("array", "chunks of wall time"), ("job-name", "set run.name"), ("job_name", "set run.name"), ("signal", "cluster.signal_delay_s"),
    ("no-requeue", "Leave it out"), ("dependency", "chains"), ("output", "jobs/"), ("nodes", "allocation"), ("clusters", "another cluster"),
    ("partition", "Use cluster.train.partition"), ("mem-per-gpu", "Use cluster.train.mem_per_gpu"), ("time", "Use cluster.train.time"),
    ("wrap", "changes what sbatch does"), ("gres", "cluster.train.gpus=none"), ("contigous", "Did you mean contiguous"), ("zzz", "sbatch --help"),
])
def test_options_that_may_not_be_set_by_hand(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        checked(sbatch={name: "1"})
    assert f"cluster.train.sbatch.{name}='1'" in str(caught.value)


def test_options_that_came_later_need_a_slurm_that_lists_them() -> None:
    later = ClusterConfig(kind=ClusterKind.slurm, train=RoleConfig(sbatch={"oom_kill_step": "1", "segment": "4"}))
    check_options(later)
    check_options(later, names_in_help("      --oom-kill-step[=0|1]   kill all of the step"))
    with pytest.raises(ConfigError, match=r"oom_kill_step='1': this cluster's SLURM is older than sbatch's option --oom-kill-step"):
        check_options(later, names_in_help(HELP))


def test_options_that_may_be_set_by_hand() -> None:
    checked(sbatch={"comment": "a b", "mail_type": "END", "contiguous": ""})
    checked(sbatch={"gres": "gpu:2,nvme:1"}, gpus=GpuRequest.none)
    check_options(ClusterConfig(train=RoleConfig(sbatch={"newest-option": "1"})), frozenset({"newest-option"}))


@pytest.mark.parametrize("argument", ["--output=x", "mpi=none", "--ntasks=3", "--kill-on-bad-exit=0"])
def test_arguments_of_srun_that_may_not_be_given(argument: str) -> None:
    with pytest.raises(ConfigError, match="cluster.train.srun_args"):
        checked(srun_args=["--mpi=none", argument])


def test_empty_values_are_not_passed() -> None:
    assert sbatch_options(SPEC, RoleConfig(gpus=GpuRequest.none)) == {}
    part = RoleConfig(partition="p", account="a", qos="q", time="60", constraint="c", nodelist="n1", exclude="n2", reservation="r", mem="1G",
                      cpus_per_task=2, exclusive=True)
    assert sbatch_options(SPEC, part) == {
        "partition": "p", "account": "a", "qos": "q", "constraint": "c", "nodelist": "n1", "exclude": "n2", "reservation": "r", "mem": "1G",
        "cpus-per-task": "2", "exclusive": True, "gres": "gpu:4"}


@pytest.mark.parametrize(("gpus", "kind", "option"), [
    (GpuRequest.gres, "", ("gres", "gpu:4")), (GpuRequest.gres, "h100", ("gres", "gpu:h100:4")),
    (GpuRequest.gpus_per_node, "", ("gpus-per-node", "4")),
    (GpuRequest.gpus_per_node, "a100", ("gpus-per-node", "a100:4")), (GpuRequest.gpus_per_task, "", ("gpus-per-task", "1")),
])
def test_gpus_are_asked_for_in_the_sites_way(gpus: GpuRequest, kind: str, option: tuple[str, str]) -> None:
    assert sbatch_options(SPEC, RoleConfig(gpus=gpus, gpu_type=kind)) == dict([option])


def test_further_options() -> None:
    part = RoleConfig(gpus=GpuRequest.none, sbatch={"mail_type": "END", "contiguous": "", "overcommit": "True", "spread-job": "false"})
    assert sbatch_options(SPEC, part) == {"mail-type": "END", "contiguous": True, "overcommit": True}


def test_the_lines_before_srun_run_in_a_shell() -> None:
    lines = setup_lines(SPEC, RoleConfig(setup=["export GREETING='hello world'"]))
    done = subprocess.run(["bash", "-c", "\n".join([*lines, 'echo "$OMP_NUM_THREADS|$GREETING|$PYTHONPATH"'])], env={"PYTHONPATH": "/a"},
                          capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"2|hello world|{ROOT}:/a"


def test_every_submission_gets_the_pythonpath_of_the_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"lib::/it's:{ROOT}")
    part = RoleConfig(pythonpath=python_path(), setup=["export PYTHONPATH=/module:$PYTHONPATH"])
    assert part.pythonpath == f"{ROOT}:{tmp_path}/lib:/it's"
    done = subprocess.run(["bash", "-c", "\n".join([*setup_lines(SPEC, part), 'echo "$PYTHONPATH"'])], env={"PYTHONPATH": "/of/another/shell"},
                          capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{ROOT}:/module:{part.pythonpath}"


def test_training_on_several_nodes_asks_for_whole_ones() -> None:
    config = FullConfig()
    config.cluster.kind, config.run.name, config.allocation = ClusterKind.slurm, "x", AllocationConfig(64, devices_per_node=8)
    config.cluster.inference = config.cluster.train = RoleConfig(time="60")
    run = RunFolder(Path("/a"))
    inference, train = (scripts(spec, config, run, 1001)[0].splitlines() for spec in job_specs(config.plan(), config, run))
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --gres=gpu:8"} <= set(train)
    assert {"#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1", "#SBATCH --gres=gpu:1"} <= set(inference)


def test_the_command_that_runs_python() -> None:
    assert python_command(RoleConfig(), ["/r"]) == shlex.quote(sys.executable)
    assert python_command(RoleConfig(python="/a b/python"), ["/r"]) == "'/a b/python'"
    image = ContainerConfig(ContainerKind.apptainer, "/i.sif", ["/m:/m:ro"], ["--env", "A=1"])
    assert python_command(RoleConfig(container=image), ["/code", "/it's"]) == (
        "apptainer exec --nv --bind '/code:/code,/it'\"'\"'s:/it'\"'\"'s,/m:/m:ro' --env A=1 /i.sif python3")
    assert "--nv" not in python_command(RoleConfig(container=image, gpus=GpuRequest.none), [])
    assert "--nv" in python_command(RoleConfig(container=image, gpus=GpuRequest.none, sbatch={"gres": "gpu:h100:4,lscratch:100"}), [])
    pyxis = RoleConfig(container=ContainerConfig(ContainerKind.pyxis, "nvcr.io#x", ["/m:/m"], ["--no-container-remap-root"]),
                       srun_args=["--mpi=pmix"])
    assert python_command(pyxis, ["/r"]) == "python3"
    assert srun_arguments(pyxis, ["/r"]) == ["--kill-on-bad-exit=1", "--wait=0", "--open-mode=append", "--container-image=nvcr.io#x",
                                             "--container-mounts=/r:/r,/m:/m", "--no-container-remap-root", "--mpi=pmix"]
    assert srun_arguments(RoleConfig(), [], as_one=False)[0] == "--kill-on-bad-exit=0"


def test_a_container_shows_what_the_run_reads(tmp_path: Path) -> None:
    config = FullConfig()
    (tmp_path / "model").mkdir()
    config.model.path, config.data.path, config.weights.dir = str(tmp_path / "model"), "/missing", "/fast"
    assert mounted(config, RunFolder(Path("/run"))) == [str(ROOT), "/run", str(tmp_path / "model"), "/fast"]


def test_a_container_shows_where_files_link_to(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "1" / "data", tmp_path / "hub" / "blobs"
    for folder in (snapshot, blobs, tmp_path / "judge"):
        folder.mkdir(parents=True)
    (blobs / "x").touch()
    (snapshot / "config.json").symlink_to("../../../blobs/x")
    (snapshot.parent / "inside").symlink_to(snapshot / "own")
    (snapshot / "own").touch()
    config = FullConfig()
    config.model.path, config.reward.model.path = str(snapshot.parent), str(tmp_path / "judge")
    assert mounted(config, RunFolder(Path("/run")))[2:] == [str(snapshot.parent), str(tmp_path / "judge")], "no container"
    config.cluster.train.container = ContainerConfig(ContainerKind.apptainer, "/i.sif")
    assert mounted(config, RunFolder(Path("/run")))[2:] == [str(snapshot.parent), str(tmp_path / "judge"), str(blobs)]


def test_a_container_shows_folders_by_the_names_that_links_have(tmp_path: Path) -> None:
    """As with HF_HOME on another file system, and data in folders that are links."""
    for folder in ("scratch/hub/blobs", "scratch/hub/1", "other/data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scratch/hub/blobs/x").touch()
    (tmp_path / "home").symlink_to("scratch")
    (tmp_path / "home/hub/1/config.json").symlink_to("../blobs/x")
    (tmp_path / "home/hub/1/data").symlink_to(tmp_path / "other/data")
    config = FullConfig()
    config.model.path, config.cluster.train.container = str(tmp_path / "home/hub/1"), ContainerConfig(ContainerKind.apptainer, "/i.sif")
    assert set(mounted(config, RunFolder(Path("/run")))[3:]) == {
        str(tmp_path / "home/hub/blobs"), str(tmp_path / "scratch/hub/blobs"), str(tmp_path / "other/data")}


def test_the_script_holds_what_the_run_needs() -> None:
    config = FullConfig()
    config.cluster.kind, config.run.name = ClusterKind.slurm, "x"
    config.cluster.train = RoleConfig(partition="p", cpus_per_task=2, account="it's mine")
    first, second, third = scripts(SPEC.__class__(**{**vars(SPEC), "num_chunks": 5}), config, RunFolder(Path("/a b")), 2, after=("7", "8"))
    lines = first.splitlines()
    for line in ("#SBATCH --array=0-1%1", "#SBATCH --requeue", "#SBATCH --signal=USR2@120", "#SBATCH --open-mode=append", "#SBATCH --nodes=2",
                 "#SBATCH --ntasks-per-node=4", "#SBATCH --time=60", "#SBATCH --dependency=afterany:7:8", "#SBATCH --job-name=x-00000000-train-1",
                 "#SBATCH --output=/dev/null", "RUN='/a b' LIMIT_S=900 STAY_S=60", "#SBATCH --account='it'\"'\"'s mine'"):
        assert line in lines, line
    assert not any("wckey" in line or "--error" in line for line in lines)
    command = shlex.split(lines[-1])
    assert command[0] == "srun" and {"--kill-on-bad-exit=1", "--open-mode=append", "--cpus-per-task=2"} <= set(command)
    assert command[-3:] == ["-m", "submitit.core._submit", "/a b/jobs"]
    assert "--dependency=afterany:ID_OF_x-00000000-train-1" in second and "--array=0-1%1" in third, "one element is no array: a spare one more"
    config.cluster.signal_delay_s = 30
    assert "--signal=USR2@30" in scripts(dataclasses.replace(SPEC), config, RunFolder(Path("/a")), 100)[0]


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Starts what stands in every job's script before srun, with SLURM's commands replaced by ones that keep their arguments."""
    run, folder = RunFolder.create(tmp_path / "run"), tmp_path / "bin"
    run.config.write_text("{}")
    folder.mkdir()
    (tmp_path / "comments").write_text("9 x-1-train-1 headway: waits\n7 x-1-inference-1 (null)\n12 x-12-train-1 (null)\n")
    for name, answer in (("scontrol", ""), ("scancel", ""), ("squeue", "7 x-1-inference-1\n8 x-1-train-1\n8 x-1-train-1\n9 x-12-train-1")):
        comments = f"case \"$*\" in *%k*) cat {tmp_path}/comments; exit;; esac" if name == "squeue" else ""
        (folder / name).write_text(f"#!/bin/bash\n{comments}\necho {name} \"$@\" >>{tmp_path}/calls\necho \"{answer}\"\n")
        (folder / name).chmod(0o755)

    def start(minutes: float, then: str = "echo begun") -> subprocess.Popen:
        config = FullConfig()
        config.run.outage_minutes = minutes
        env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1",
               "SLURM_JOB_NAME": "x-1-train-1"}
        return subprocess.Popen(["bash", "-c", "\n".join([*waiting_lines(run, config), then])], env=env, stderr=subprocess.DEVNULL)

    return start


def test_an_element_waits_for_the_run_folder_and_then_logs_into_it(job: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "away")
    with job(minutes=10) as child:
        while not (tmp_path / "calls").exists():
            assert child.poll() is None
            time.sleep(0.01)
        (tmp_path / "away").rename(tmp_path / "run")
    assert child.returncode == 0 and (tmp_path / "run" / "jobs" / "8_1_0_log.out").read_text() == "begun\n"
    waits, over = (tmp_path / "calls").read_text().splitlines()
    assert waits.startswith(f"scontrol update JobId=9 Comment=headway: {tmp_path}/run is full or away") and over == "scontrol update JobId=9 Comment="


@pytest.mark.parametrize("there", [True, False])
def test_a_run_folder_that_stays_away_ends_all_of_its_run_and_of_no_other(job: Callable[..., subprocess.Popen], tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "run" / "jobs").rmdir()  # it can be read, but not used
    else:
        (tmp_path / "run").rename(tmp_path / "away")
    with job(minutes=0) as child:
        pass
    calls = (tmp_path / "calls").read_text()
    assert child.returncode == 1 and "was full or away for 0 s: the run has ended" in calls and calls.endswith("scancel 7 8\n")
    outcome = RunFolder(tmp_path / "run").ended()
    assert ("run.outage_minutes" in (outcome or {})["cause"]) if there else outcome is None


def test_a_node_on_which_nothing_begins_does_not_use_up_the_array(job: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    log = tmp_path / "run" / "jobs" / "8_1_0_log.out"
    with job(minutes=10, then="/no/such/python") as child:
        while not (log.exists() and "this element stays for 60 s" in log.read_text()):
            assert child.poll() is None
            time.sleep(0.01)
        RunFolder(tmp_path / "run").end("enough", "test")
    assert child.returncode == 127 and "ended within seconds, with status 127" in log.read_text()


@pytest.mark.parametrize(("then", "status"), [
    ("SECONDS=100; (exit 3)", 3), ("touch $RUN/jobs/.begun.9; (exit 1)", 1), ("true", 0), ("kill -TERM $$", -15)])
def test_what_has_begun_ends_when_it_does(job: Callable[..., subprocess.Popen], then: str, status: int) -> None:
    with job(minutes=10, then=then) as child:
        pass
    assert child.returncode == status


def test_an_element_of_a_run_that_has_ended_waits_for_nothing(job: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").end("enough", "test")
    shutil.rmtree(tmp_path / "run" / "keys")
    with job(minutes=10) as child:
        pass
    assert child.returncode == 0 and not (tmp_path / "calls").exists()


def test_a_node_that_alone_lacks_the_run_folder_leaves_the_run_to_the_others(job: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "away")
    with (tmp_path / "comments").open("a") as comments:
        comments.write("8 x-1-train-1 (null)\n")  # it trains, and has nothing to say
    with job(minutes=0) as child:
        pass
    calls = (tmp_path / "calls").read_text()
    assert child.returncode == 1 and "alone: the run goes on without this element" in calls and "scancel" not in calls
