"""SLURM's commands as the launcher calls and reads them: with commands on PATH that answer what SLURM 22.05 has answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.cluster import ClusterConfig, GpuRequest
from launcher.config.schema import FullConfig
from launcher.monitoring.observation import cancelled_by
from launcher.slurm import queries
from launcher.slurm.parsing import clock, expand_hosts, gpus, max_array_size, seconds
from launcher.slurm.site import look, settle_nodes
from launcher.slurm.states import State
from workers.config import AllocationConfig, ClusterKind
from workers.slurm import command as slurm_command
from workers.slurm.command import SlurmError

Command = Callable[..., Path]

SQUEUE = """\
1|3|4|PENDING||N/A|1:00:00|JobHeldUser|(null)
1|2|1|PENDING||2026-11-21T15:54:05|1:00:00|Resources|
1|0|2|COMPLETING|inf0|2026-11-21T15:53:58|1:00:00|job requeued in held state|(null)
1|1|3|RUNNING|inf[1-2]|2026-11-21T15:53:56|59:55|None|headway: waits | for its disk
17|N/A|17|RUNNING|trn0|2026-11-21T15:53:56|UNLIMITED|None|the user's own
1|5|9|COMPLETED|inf1|2026-11-21T15:53:56|1:00|None|(null)
"""
SACCT = """\
1_0|REQUEUED|1|billing=1,cpu=1,gres/gpu=1,mem=100M,node=1|inf0|2026-11-21T15:53:56|2026-11-21T15:53:57|0:0
1_1|CANCELLED by 0|5|billing=1,cpu=1,gres/gpu:h100=2,mem=100M,node=1|inf1|2026-11-21T15:53:56|2026-11-21T15:54:01|0:15
1_3|CANCELLED by 0|0||None assigned|None|2026-11-21T15:54:01|0:0
1_[2,4-5%2]|CANCELLED by 0|0||None assigned|None|2026-11-21T15:54:01|0:0
1_6|FAILED|61|cpu=1|inf[0,2]|2026-11-21T15:53:56|2026-11-21T15:54:57|3:0
1_7|RUNNING|9|cpu=1|inf1|2026-11-21T15:55:56|Unknown|0:0
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Puts a command on PATH that answers as told, and keeps its arguments, one call a line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name: str, output: str = "", error: str = "", status: int = 0, fails_first: int = 0) -> Path:
        calls, answer = tmp_path / f"{name}.calls", tmp_path / f"{name}.answer"
        answer.write_text(output)
        script = folder / name
        script.write_text(f"""#!/bin/bash
echo "$@" >>{calls}
if (( {fails_first} && $(wc -l <{calls}) <= {fails_first} )); then echo "Unable to contact slurm controller (connect failure)" >&2; exit 1; fi
cat {answer}
[[ -z "{error}" ]] || echo "{error}" >&2
exit {status}
""")
        script.chmod(0o755)
        return calls

    return make


def test_the_queue(command: Command) -> None:
    calls = command("squeue", SQUEUE)
    held, pending, ending, running, single = queries.squeue(["1", "17"])
    assert "--jobs=1,17" in calls.read_text() and "--array" in calls.read_text()
    assert held.element == "1_3" and held.held and held.state is State.PENDING and held.start is None and held.time_left_s == 3600
    assert pending.element == "1_2" and pending.reason == "Resources" and pending.nodes == () and pending.start == clock("2026-11-21T15:54:05")
    assert ending.state is State.COMPLETING and not ending.held
    assert running.nodes == ("inf1", "inf2") and running.reason == "" and running.time_left_s == 3595 and running.job_id == "3"
    assert [entry.comment for entry in (held, pending, running, single)] == ["", "", "waits | for its disk", ""]
    assert single.element == "17" and single.task_id is None and single.time_left_s is None


def test_jobs_that_the_queue_has_forgotten_are_gone(command: Command) -> None:
    command("squeue", error="slurm_load_jobs error: Invalid job id specified", status=1)
    assert queries.squeue(["99999"]) == [] and queries.squeue([]) == []


def test_history(command: Command) -> None:
    calls = command("sacct", SACCT)
    requeued, cancelled, *unbegun, failed, running = queries.history(["1"])
    assert "--duplicates" in calls.read_text()
    assert (requeued.element, requeued.state, requeued.elapsed_s, requeued.num_gpus) == ("1_0", State.REQUEUED, 1, 1)
    assert cancelled.state is State.CANCELLED and cancelled.num_gpus == 2 and cancelled.nodes == ("inf1",)
    assert failed.exit_code == 3 and failed.nodes == ("inf0", "inf2") and failed.array_job_id == "1" and failed.end - failed.start == 61
    assert running.end is None
    assert [(entry.element, entry.nodes, entry.cancelled_by) for entry in unbegun] == [("1_3", (), "root"), ("1_[2,4-5%2]", (), "root")]
    assert (cancelled.cancelled_by, failed.cancelled_by) == ("root", "")
    assert cancelled_by([requeued, cancelled, *unbegun], 0.0) == "root" and cancelled_by([cancelled, failed, running], 0.0) == ""
    assert cancelled_by([cancelled], cancelled.end + 1) == "", "that was before the run was resumed"


def test_many_jobs_are_asked_for_in_several_calls(command: Command) -> None:
    calls = command("squeue", "")
    queries.squeue([str(number) for number in range(250)])
    assert len(calls.read_text().splitlines()) == 3


def test_jobs_are_found_by_name_in_the_queue_and_in_accounting(command: Command) -> None:
    command("squeue", "12\n12\n7\n")
    command("sacct", "7_0\n7_1\n3\n")
    assert queries.jobs_named("a-b") == ["3", "7", "12"]
    command("sacct", error="Slurm accounting storage is disabled", status=1)
    assert queries.jobs_named("a-b") == ["7", "12"], "the queue is enough"


def test_without_accounting_the_history_says_so(command: Command) -> None:
    command("sacct", error="Slurm accounting storage is disabled", status=1)
    with pytest.raises(SlurmError, match="sacct .*exit status 1: Slurm accounting storage is disabled"):
        queries.history(["1"])


def test_a_controller_that_restarts_is_asked_again(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_command, "RETRY_S", 0.01)
    calls = command("squeue", SQUEUE, fails_first=2)
    assert len(queries.squeue(["1"])) == 5 and len(calls.read_text().splitlines()) == 3
    monkeypatch.setattr(slurm_command, "PATIENCE_S", 0.05)
    command("scancel", fails_first=10**6)
    with pytest.raises(SlurmError, match="scancel 1: exit status 1: Unable to contact slurm controller"):
        queries.cancel(["1"])


@pytest.mark.parametrize(("name", "ask"), [
    ("sacct", lambda: queries.history(["1"])), ("scontrol", queries.show_config),
    ("scontrol", lambda: settle_nodes(slurm_config(), patience_s=0)), ("sinfo", lambda: queries.node_kinds("gpu", patience_s=0))])
def test_what_people_wait_for_is_asked_once(command: Command, name: str, ask: Callable[[], object]) -> None:
    lost = "_open_persist_conn: failed to open persistent connection to host:db:6819"
    for words in ("sacct: error: slurm_persist_conn_open: failed to send", lost, "Connection refused", "Unable to contact slurm controller"):
        calls = command(name, error=words, status=1)
        calls.unlink(missing_ok=True)
        with pytest.raises(SlurmError, match=words):
            ask()
        assert len(calls.read_text().splitlines()) == 1


def test_a_launch_does_not_wait_for_accounting(command: Command) -> None:
    command("scontrol", "MaxArraySize = 8\nAccountingStorageEnforce = limits\nPartitionName=gpu Default=YES MaxTime=60:00 State=UP\n")
    command("sinfo", "3|8|8000|idle|gpu:1\n")
    command("squeue", "lab|normal|gpu\nlab|normal|gpu\n")
    command("sbatch", "--mem=N")
    calls = command("sacctmgr", error="sacctmgr: error: slurm_persist_conn_open_without_init: Connection refused", status=1)
    site = look(slurm_config().cluster)
    assert (site.qualities, site.limits.associations, len(site.limits.mine), site.max_array_size) == (None, (), 2, 8)
    assert len(calls.read_text().splitlines()) == 3


def slurm_config() -> FullConfig:
    return FullConfig(cluster=ClusterConfig(kind=ClusterKind.slurm), allocation=AllocationConfig(64))


def test_the_default_partition_is_asked_for_its_nodes(command: Command) -> None:
    command("scontrol", "PartitionName=cpu State=UP\nPartitionName=gpu Default=YES State=UP\n")
    calls = command("sinfo", "3|8|8000|idle|gpu:8\n2|8|8000|idle|(null)\n1|8|8000|idle|gpu:4\n")
    full = slurm_config()
    assert settle_nodes(full) == "cluster.train.devices_per_node=8, as the nodes of partition gpu have: training takes 16 devices"
    assert full.cluster.train.devices_per_node == 8 and full.allocation.devices_per_node == 0 and "--partition=gpu" in calls.read_text()
    assert settle_nodes(full) == "" and full.cluster.train.devices_per_node == 8, "what is given holds"
    full.cluster.train.devices_per_node, full.cluster.train.gpus = 0, GpuRequest.none
    assert settle_nodes(full) == "" and full.cluster.train.devices_per_node == 0, "processes are not counted by GPUs"


def test_other_errors_are_told_at_once(command: Command) -> None:
    calls = command("scancel", error="scancel: error: Kill job error on job id 1: Access/permission denied", status=1)
    with pytest.raises(SlurmError, match="permission denied"):
        queries.cancel(["1"])
    assert len(calls.read_text().splitlines()) == 1


def test_a_command_that_is_not_there_or_does_not_answer(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slurm_command, "TIMEOUT_S", 0.2)
    command("sinfo")
    (tmp_path / "bin" / "sinfo").write_text("#!/bin/bash\nexec sleep 60\n")
    begin = time.monotonic()
    with pytest.raises(SlurmError, match=r"sinfo .*no answer within 0.2 s"):
        queries.node_kinds("gpu")
    assert time.monotonic() - begin < 30
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="squeue: not found on PATH. Log in"):
        queries.squeue(["1"])


def test_where_there_is_no_cluster_the_answer_is_ours(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = command("scontrol", status=1, error="scontrol: error: fetch_config: DNS SRV lookup failed\n"
                                                "scontrol: fatal: Could not establish a configuration source")
    with pytest.raises(SlurmError, match=r"^scontrol: SLURM is installed here, but this machine belongs to no cluster \(.*or set SLURM_CONF$"):
        queries.show_config(patience_s=None)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(SlurmError, match=r"^SLURM_CONF=.*/slurm.conf: no such file"):
        queries.show_config()
    assert len(calls.read_text().splitlines()) == 1


def test_changes(command: Command) -> None:
    calls = command("scancel")
    queries.cancel(["1", "2"], pending_only=True)
    assert calls.read_text().strip() == "--state=PENDING 1 2"
    calls = command("scontrol", error="1_0: Job has already finished", status=1)
    queries.release(["1"])
    queries.update_exclude("1", ["inf0", "inf2"])
    assert calls.read_text().splitlines() == ["release 1", "update JobId=1 ExcNodeList=inf0,inf2"]


def test_the_cluster(command: Command) -> None:
    command("scontrol", "Configuration data as of 2026-11-21T15:54:05\nMaxArraySize            = 1001\nKillWait                = 30 sec\n"
                        "SlurmctldParameters     = preempt_send_user_signal\nPrologFlags             = \n\nSlurmctld(primary) at here is UP\n")
    config = queries.show_config()
    assert config["MaxArraySize"] == "1001" and config["KillWait"] == "30 sec" and config["PrologFlags"] == ""
    command("scontrol", "PartitionName=gpu AllowGroups=ALL MaxTime=1-00:00:00 Nodes=inf[0-2] State=UP TRES=cpu=24,mem=24000M,gres/gpu=3\n")
    partition = queries.partition("gpu")
    assert partition is not None and partition["MaxTime"] == "1-00:00:00" and partition["TRES"] == "cpu=24,mem=24000M,gres/gpu=3"
    command("scontrol", "Partition nix not found\n", status=1)
    assert queries.partition("nix") is None
    calls = command("sinfo", "3|8|8000|idle|gpu:1\n2|96+|1000000+|drained*|gpu:h100:8(S:0-1),nvme:1\n1|4|100|mixed|(null)\n")
    assert [(kind.num_nodes, kind.num_gpus, kind.num_cpus) for kind in queries.node_kinds("gpu")] == [(3, 1, 8), (2, 8, 96), (1, 0, 4)]
    assert [kind.away for kind in queries.node_kinds("gpu")] == [False, True, False]
    assert "--exact" in calls.read_text(), "else unlike nodes are one line"
    command("sbatch", error="sbatch: Job 5 to start at 2026-11-21T15:54:03 using 1 processors on nodes inf0 in partition inference")
    assert "to start at" in queries.test_only("#!/bin/bash\n")
    command("sbatch", error="allocation failure: Invalid account or account/partition combination specified", status=1)
    with pytest.raises(SlurmError, match="Invalid account"):
        queries.test_only("#!/bin/bash\n")


def test_what_users_set_for_their_own_eyes_changes_nothing(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command("squeue")
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/bash\nenv >{tmp_path / 'env'}\n")
    mine = {"SQUEUE_FORMAT", "SLURM_TIME_FORMAT", "SQUEUE_STATES", "SLURM_CLUSTERS", "SBATCH_CLUSTERS", "SQUEUE_CLUSTERS", "SBATCH_PARTITION"}
    for name in mine:
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "bin" / "squeue"))
    queries.squeue(["1"])
    names = {line.split("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert "SLURM_CONF" in names and not names & mine


@pytest.mark.parametrize(("text", "hosts"), [
    ("", ""), ("inf0", "inf0"), ("inf[0-2,7],trn01", "inf0 inf1 inf2 inf7 trn01"), ("n[08-11]", "n08 n09 n10 n11"), ("None assigned", ""),
    ("r[0-1]n[2-3]", "r0n2 r0n3 r1n2 r1n3"), ("a,b-c,d[1]", "a b-c d1"), ("(null)", ""), ("gpu[1-2].site.org", "gpu1.site.org gpu2.site.org")])
def test_hosts(text: str, hosts: str) -> None:
    assert expand_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize(("text", "value"), [
    ("59:55", 3595), ("1:00:00", 3600), ("2-03:04:05", 183845), ("0:00", 0), ("UNLIMITED", None), ("INVALID", None), ("NOT_SET", None), ("", None)])
def test_durations(text: str, value: float | None) -> None:
    assert seconds(text) == value


@given(st.integers(min_value=0, max_value=400 * 86400))
def test_durations_as_slurm_writes_them(number: int) -> None:
    days, rest = divmod(number, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}" if days else f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
    assert seconds(text) == number


@pytest.mark.parametrize(("text", "number"), [
    ("gpu:1", 1), ("gpu:h100:8(S:0-1),nvme:1", 8), ("(null)", 0), ("", 0), ("gpu:a100:4,gpu:v100:2", 6), ("billing=1,gres/gpu=2,gres/gpu:h100=2", 2),
    ("gres/gpu:a100=1,gres/gpu:v100=3", 4), ("cpu=4,gres/gpumem=80", 0), ("mygpu:3", 0)])
def test_gpus(text: str, number: int) -> None:
    assert gpus(text) == number


@pytest.mark.parametrize(("parameters", "size"), [
    ("", 1001), ("defer,max_array_tasks=200,bf_continue", 200), ("max_array_tasks=5000", 1001), ("no_max_array_tasks_x=3", 1001)])
def test_the_size_of_arrays(parameters: str, size: int) -> None:
    assert max_array_size({"MaxArraySize": "1001", "SchedulerParameters": parameters}) == size and max_array_size({}) == 1001


def test_the_name_of_the_cluster_is_asked_once(command: Command) -> None:
    queries.cluster_name.cache_clear()
    calls = command("scontrol", "Configuration data as of now\nClusterName             = alpha\nMaxArraySize            = 1001\n")
    assert queries.cluster_name() == queries.cluster_name() == "alpha" and len(calls.read_text().splitlines()) == 1
    queries.cluster_name.cache_clear()
