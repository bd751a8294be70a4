"""A local SLURM cluster (slurm/local) for tests: up and down, jobs and nodes, and everything that can happen to them."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm" / "local"
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmdbd", "sacctmgr", "mariadbd")
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
POLL_S = 0.1

# States of a job that has ended for good; a requeued one is PENDING again.
ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"})


def available(isolated: bool = True) -> str | None:
    """Why no local cluster can run here, or None. `isolated`: each node a host of its own, as power cuts and network cuts need it."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        return f"SLURM is not installed here (missing {', '.join(missing)}); as root on Debian or Ubuntu, make slurm-up installs it"
    if isolated and os.geteuid() != 0:
        return "nodes that are hosts of their own need root"
    if isolated and subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, env={"PATH": PATH}).returncode:
        return "this machine does not let root make namespaces"
    return None


@dataclass(frozen=True)
class QueueRow:
    """One job or array element as squeue shows it; recently ended ones included."""

    job: str  # 17 or 17_3
    job_id: int  # the element's own number, never that of its array
    array_id: int | None
    index: int | None
    name: str
    partition: str
    state: str  # PENDING, RUNNING, COMPLETING, COMPLETED, ...
    reason: str  # why it waits or how it ended
    node_list: str
    restarts: int


@dataclass(frozen=True)
class AccountingRow:
    """One incarnation of a job or array element as sacct shows it, seconds late at times; a requeued job has several."""

    job: str
    state: str  # CANCELLED comes without "by UID"
    exit_code: str  # status:signal
    node_list: str
    start: str
    end: str
    elapsed_s: int


class LocalCluster:
    """Settings are those of slurm/local/settings.sh: LocalCluster(NTRN=2, KILL_WAIT=5). Each cluster has a folder of its own."""

    def __init__(self, folder: Path | None = None, **settings: int | str) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="headway-slurm-"))
        self.settings = {name: str(value) for name, value in settings.items()}
        self._cut: set[str] = set()  # nodes whose network is, or has been, cut off

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to use this cluster and no other: this process's environment without anything of SLURM's."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN", "SACCT", "SQUEUE", "SINFO"))}
        return env | {"PATH": PATH, "SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    def _script(self, name: str, *arguments: str, timeout_s: float = 120) -> None:
        # Files, not pipes: a daemon that held on to a pipe would keep us waiting.
        with tempfile.TemporaryFile("w+") as output:
            env = self.env | self.settings | {"HEADWAY_SLURM_DIR": str(self.folder), "OWNER": str(os.getpid())}
            done = subprocess.run([SCRIPTS / name, *arguments], env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=timeout_s)
            output.seek(0)
            if done.returncode:
                raise RuntimeError(f"{name} {' '.join(arguments)} failed:\n{output.read()}")

    def up(self) -> None:
        """Returns when all nodes are idle. The cluster also ends when this process does, however it goes."""
        self._script("up.sh")

    def down(self) -> None:
        """Nothing of the cluster is left afterwards, its jobs' processes included."""
        self._script("down.sh")
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str | Path, timeout_s: float = 60, check: bool = True, cwd: Path | None = None) -> str:
        """What the command, run on the login node, wrote to its standard output."""
        words = [str(part) for part in command]
        done = subprocess.run(words, env=self.env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def sbatch(self, script: str, *options: str) -> int:
        """Submit what a shell runs, its output thrown away unless options say otherwise; returns the number of the job or of its array."""
        return int(self.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}").split(";")[0])

    # Nodes and the controller

    def nodes(self) -> dict[str, str]:
        """State of each node, in SLURM's long words without flags: idle, mixed, allocated, draining, drained, down."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=preemptible", "--format=%N %T").splitlines()
        return {name: state.rstrip("*~#!%$@^-") for name, state in map(str.split, lines)}

    def power_off(self, node: str) -> None:
        """A power cut: its processes are gone at once and say nothing to anybody. SLURM notices within a minute."""
        self._script("node.sh", "off", node)

    def power_on(self, node: str) -> None:
        """Back with the same files, without its processes. If SLURM had not noticed yet, it may take minutes to notice that jobs are lost."""
        self._script("node.sh", "on", node)

    def cut_network(self, node: str) -> None:
        """The node runs on, but reaches nobody but through the shared file system.

        SLURM does not end what runs there, not even when the network is back and the job has been requeued elsewhere meanwhile.
        """
        self._cut.add(node)
        self._script("node.sh", "cut", node)

    def restore_network(self, node: str) -> None:
        """Back, and in use again at once: by itself SLURM takes a node back when that registers anew, a minute or two later."""
        self.reconnect(node)
        self.resume(node)

    def reconnect(self, node: str) -> None:
        """Back; SLURM uses it again when it has seen that."""
        self._script("node.sh", "join", node)

    def service(self, action: str, name: str) -> None:
        """stop or start the controller, or the database of accounts: jobs run on."""
        self._script("node.sh", action, name)

    def shared_memory(self, node: str) -> list[str]:
        """What lies in the node's own /dev/shm; [] where it has no power."""
        try:
            daemon = psutil.Process(int((self.folder / "run" / f"{node}.pid").read_text()))
            inside = next(process for process in daemon.children(recursive=True) if process.name() == "slurmd")
            return os.listdir(f"/proc/{inside.pid}/root/dev/shm")
        except (FileNotFoundError, psutil.NoSuchProcess, StopIteration):
            return []

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """No squeue, sbatch or scontrol works inside this block; jobs run on."""
        self.service("stop", "controller")
        try:
            yield
        finally:
            self.service("start", "controller")

    def restart_controller(self) -> None:
        with self.without_controller():
            pass

    def set_partition(self, name: str, state: str) -> None:
        """UP; DOWN: takes jobs but starts none; DRAIN: refuses jobs, starts those it has; INACTIVE: neither."""
        self.run("scontrol", "update", f"PartitionName={name}", f"State={state}")

    def drain(self, node: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")

    def resume(self, node: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def has(self, process: psutil.Process) -> bool:
        """Whether it lives, and belongs to this cluster: a daemon, a job on any node, or a command that uses it. What a job starts may have an
        environment of its own, but stays below a daemon of its node."""
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE:
                return any(each.environ().get("SLURM_CONF") == self.env["SLURM_CONF"] for each in (process, *process.parents()))
        return False

    # Jobs

    def squeue(self, job: int | str | None = None) -> list[QueueRow]:
        """All jobs, one row for each array element, ended ones as long as SLURM remembers them (5 minutes); [] for one that it forgot."""
        form = "%i|%A|%F|%K|%j|%P|%T|%r|%N"
        chosen = [] if job is None else [f"--jobs={job}"]
        lines = self.run("squeue", "--noheader", "--array", "--states=all", f"--format={form}", *chosen, check=job is None).splitlines()
        rows = []
        for line in lines:
            name, number, array, index, title, partition, state, reason, nodes = line.split("|")
            in_array = index != "N/A"
            restarts = self._restarts(name) if state in ("PENDING", "RUNNING") else 0
            array_id, element = (int(array), int(index)) if in_array else (None, None)
            rows.append(QueueRow(name, int(number), array_id, element, title, partition, state, reason, nodes, restarts))
        return rows

    def _restarts(self, job: str) -> int:
        shown = self.run("scontrol", "show", "job", "--oneliner", job, check=False)
        return next((int(word.removeprefix("Restarts=")) for word in shown.split() if word.startswith("Restarts=")), 0)

    def sacct(self, job: int | str | None = None) -> list[AccountingRow]:
        """Every incarnation, also of jobs that were requeued meanwhile; without steps."""
        chosen = [] if job is None else [f"--jobs={job}"]
        columns = "JobID,State,ExitCode,NodeList,Start,End,ElapsedRaw"
        lines = self.run("sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--format={columns}", *chosen).splitlines()
        rows = []
        for line in lines:
            name, state, exit_code, nodes, start, end, elapsed = line.split("|")
            rows.append(AccountingRow(name, state.split()[0], exit_code, nodes, start, end, int(elapsed or 0)))
        return rows

    def cancel_all(self) -> None:
        """Every job, hard: none gets time to end in order (scancel alone leaves it KILL_WAIT for that, with any signal)."""
        jobs = sorted({str(row.array_id or row.job_id) for row in self.squeue() if row.state not in ENDED})
        if jobs:
            self.run("scancel", "--quiet", *jobs, check=False)
            for node in self.nodes():
                self._script("node.sh", "kill", node)
            self.run("scancel", "--quiet", *jobs, check=False)  # those that requeued themselves when they were told to end

    # Waiting

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        """Until the condition holds; otherwise TimeoutError with the queue and the nodes as they are."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                queue, nodes = self.run("squeue", check=False), self.run("sinfo", "--Node", check=False)
                raise TimeoutError(f"not within {timeout_s:.0f} s: {what}\n{queue}\n{nodes}")
            time.sleep(POLL_S)

    def wait_state(self, job: int | str, states: str | Sequence[str], timeout_s: float = 60) -> QueueRow:
        """Until this job or element (17 or 17_3) is in one of the states."""
        wanted = {states} if isinstance(states, str) else set(states)
        rows: list[QueueRow] = []

        def reached() -> bool:
            rows[:] = [row for row in self.squeue(job) if row.state in wanted]
            return bool(rows)

        self.wait(f"job {job} {' or '.join(sorted(wanted))}", reached, timeout_s)
        return rows[0]

    def idle(self) -> bool:
        """No job is there that has not ended, and every node is idle."""
        return not self.run("squeue", "--noheader").strip() and set(self.nodes().values()) == {"idle"}

    def wait_idle(self, timeout_s: float = 60) -> None:
        self.wait("an empty queue and idle nodes", self.idle, timeout_s)

    def reset(self, timeout_s: float = 90) -> None:
        """As after up(): no jobs, all nodes with power, network and idle, all partitions up."""
        self.cancel_all()
        while self._cut:
            self.power_off(self._cut.pop())  # with all that may still run there
        for node in self.nodes():
            self.power_on(node)
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        for partition in ("inference", "train", "short", "preemptible"):
            self.set_partition(partition, "UP")
        self.wait_idle(timeout_s)
