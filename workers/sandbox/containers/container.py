"""One shell command in a container of its own, which begins with the files of a workspace and gives them back.

    files (tar) --stdin--> container: tar -x, command, kill -KILL -1, tar -c --stdout--> output, status, files (tar)
                               ^ usage.py looks every 20 ms: too much memory, processes, files --> killed, and the files are as before

Nothing lasts but the files, which nobody unpacks outside of a container: processes in the background end with their command. The kernel bounds each
process (memory, size of a file), their number and the file system; `usage.py` all of them together. Root's containers are made as an unprivileged
user, since Linux's limit of processes does not apply to root.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from workers.config import ContainerBackend, ContainerConfig
from workers.run import process_tree
from workers.sandbox.confinement import seccomp, syscall_policy
from workers.sandbox.confinement.syscalls import ARCHITECTURES
from workers.sandbox.containers import usage

POLL_S = 0.02
MAX_FILES = 65536
MAX_COMMAND_BYTES = 120_000  # of Linux's 131072 for an argument
SHOWN_BYTES = 1 << 16
"""So much of a command's output is given back: its end."""
OUTPUT_MB = 16
"""All of it lies in a file system of its own, so that it can be told that the other one is full."""
GRACE_S = 10.0
"""For packing and unpacking, beside the command's own time, which is bounded within."""
NOT_RUN, KILLED = 125, 137
COUNTED_APART = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) >= (5, 14)
SPARE = 1024
"""Before Linux 5.14 its limit of processes counts all that the user has on the node: it is `SPARE` above that, and `usage.py` bounds those of a
container, which cannot keep up with a program that starts ever more."""
UNPRIVILEGED = 65534 if os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"] else None
"""The user of containers, where it is another than this process's: of root, but not of one in a user namespace, who is bound as others are."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
HOME = "/tmp/repository"
ENVIRONMENT = {"PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
"""Also of what makes the container: inside, /proc/1/environ tells it."""
_INSIDE = f"""
case "$(readlink /proc/self/ns/pid)" in "$6" | "") echo "it has no process namespace of its own" >&2; exit {NOT_RUN};; esac
mkdir -p {HOME} && cd {HOME} || exit {NOT_RUN}
ulimit -c 0 -f $(($3 * 2048))
unpack() {{ tar --extract --ignore-zeros --no-same-owner --unlink-first --recursive-unlink; }}
head --bytes="$7" | unpack && unpack || exit {NOT_RUN}
[ -w /run ] && exec 3<> /run/output || exec 3<> /tmp/.output
(ulimit -n 256 -v $(($4 * 1024)) -u $5; exec timeout --signal=KILL $2 bash -c "$1" < /dev/null >&3 2>&1 3>&-)
status=$?
kill -KILL -1
size=$(stat -L -c %s /proc/$$/fd/3)
printf '%20d' $((size < {SHOWN_BYTES} ? size : {SHOWN_BYTES})); tail -c {SHOWN_BYTES} /proc/$$/fd/3
cd {HOME} && tar --create --sparse . || exit {NOT_RUN}
exit $((status == {NOT_RUN} ? 1 : status))
"""
"""$1: the command, $2: seconds, $3: MiB of a file, $4: MiB of memory, $5: processes, $6: the process namespace outside, in which nothing must be
killed; $7: bytes of the files: what comes behind them no file can swallow. Needs bash, coreutils and GNU tar."""

_BOUNDED = ("unshare", "--user", "--map-current-user", "--keep-caps", "--mount", "bash", "-c", f"""
mount -t tmpfs -o "size=$1m" tmpfs /tmp && mount -t tmpfs -o size={OUTPUT_MB}m tmpfs /run && mount -t tmpfs -o ro,size=4k tmpfs /dev/shm &&
mount -o remount,bind,ro /dev && echo 0 > /proc/sys/user/max_user_namespaces && shift && cd /tmp &&
exec setpriv --no-new-privs --inh-caps=-all --ambient-caps=-all --bounding-set=-all "$@"
""", "bash")
"""What Apptainer leaves open, closed within its container: file systems get bounds, no more namespaces can be made, and no capability is left. $1:
MiB; behind it, what runs then. Needs util-linux 2.36 or newer."""


@dataclass(frozen=True)
class Ran:
    """`output`: the end of what the command wrote; `status`: its exit status, or -1, and then `failure` says why; `files`: a tar, those from before
    where the container was killed, and not only the command for its time."""

    output: str
    status: int
    failure: str
    files: bytes


class Container:
    """Runs commands as `config` says, whose backend is settled (container_choice.py), by `program`, its path."""

    def __init__(self, config: ContainerConfig, program: str) -> None:
        self.config, self.program = config, program

    @property
    def backend(self) -> ContainerBackend:
        """What makes it."""
        return self.config.backend

    def run(self, files: bytes, command: str, over: bytes = b"") -> Ran:
        """Run `command` by bash in a container that begins with `files`, a tar, and `over`, one that takes the place of what is there. Raises
        `OSError` where none can be started."""
        config = self.config
        if len(command.encode()) > MAX_COMMAND_BYTES or "\0" in command:
            return Ran("", -1, f"a command of more than {MAX_COMMAND_BYTES} bytes, or with a null byte, cannot be run", files)
        limit = config.num_processes + (0 if COUNTED_APART else SPARE + usage.of_user(UNPRIVILEGED or os.geteuid()))
        inside = ["bash", "-c", _INSIDE, "bash", command, f"{config.wall_s:g}", str(config.disk_mb), str(config.memory_mb),
                  str(limit), os.readlink("/proc/self/ns/pid"), str(len(files))]
        with contextlib.ExitStack() as opened:
            source, result, errors = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            prefix, passed = opened.enter_context(self._prefix())
            source.write(files + (over or pack({})))  # GNU tar refuses an empty input, and takes an empty tar
            source.seek(0)
            process = subprocess.Popen([*prefix, *inside], stdin=source, stdout=result, stderr=errors, pass_fds=passed,
                                       env=ENVIRONMENT, start_new_session=True, user=UNPRIVILEGED, group=UNPRIVILEGED,
                                       extra_groups=None if UNPRIVILEGED is None else [])
            begun = time.monotonic()
            try:
                failure = self._watch(process)
            finally:
                _end(process, usage.OWN[self.backend])
            ran = _read(result, errors, process.returncode, failure, files)
        late = ran.status == KILLED and time.monotonic() - begun >= config.wall_s
        return replace(ran, status=-1, failure=f"no end in {config.wall_s:g} s") if late else ran

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for the end; why there is to be one now, '' where it came by itself."""
        config, ends = self.config, time.monotonic() + self.config.wall_s + GRACE_S
        most = config.num_processes + usage.OWN[self.backend]
        while time.monotonic() < ends:
            try:
                process.wait(POLL_S)
                return ""
            except subprocess.TimeoutExpired:
                used = usage.of(process.pid, most)
            if used.num_tasks > most:
                return f"more than {config.num_processes} processes at once"
            if used.memory_bytes > config.memory_mb << 20:
                return f"more than {config.memory_mb} MiB of memory"
            if used.num_files > MAX_FILES:
                return f"more than {MAX_FILES} files"
        return f"no end in {config.wall_s:g} s"

    @contextlib.contextmanager
    def _prefix(self) -> Iterator[tuple[list[str], list[int]]]:
        """What the command line begins with, and the descriptors that go with it."""
        if self.config.backend is ContainerBackend.apptainer:
            with tempfile.NamedTemporaryFile("w", prefix="headway-seccomp-", suffix=".json") as rules:
                os.chmod(rules.name, 0o644)
                rules.write(syscall_policy.profile_without_hidden_memory(os.uname().machine))
                rules.flush()
                yield [self.program, "--quiet", "exec", "--userns", "--containall", "--no-privs", "--no-home", "--net", "--network", "none",
                       "--security", f"seccomp:{rules.name}", "--pwd", "/tmp", self.config.image, *_BOUNDED, str(self.config.disk_mb)], []
            return
        block = syscall_policy.without_hidden_memory(ARCHITECTURES[os.uname().machine])
        with open(os.memfd_create("seccomp"), "wb", buffering=0) as rules:
            rules.write(seccomp.code_of(block))
            rules.seek(0)
            yield self._bubblewrap(rules.fileno()), [rules.fileno()]

    def _bubblewrap(self, rules: int) -> list[str]:
        seen = dict.fromkeys([*SYSTEM, sys.base_prefix])
        binds = ["--ro-bind", self.config.image, "/"] if self.config.image else [
            part for path in map(Path, seen) if _readable(path) for part in ("--ro-bind", str(path), str(path))]
        return [self.program, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
                "--seccomp", str(rules), *binds, "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev",
                "--size", str(self.config.disk_mb << 20), "--tmpfs", "/tmp", "--size", str(OUTPUT_MB << 20), "--tmpfs", "/run",
                "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _readable(path: Path) -> bool:
    """Whether the user of containers can see what is at `path`."""
    if UNPRIVILEGED is None:
        return os.access(path, os.R_OK)
    return path.exists() and all(part.stat().st_mode & 1 for part in path.parents) and bool(path.stat().st_mode & 4)


def _end(process: subprocess.Popen[bytes], num_makers: int) -> None:
    """Kill the container, with all that is in it: first what it was made by, since the kernel starts nothing more in a process namespace whose first
    process is gone, and looking for all the others may take long."""
    if process.poll() is None:
        for maker in itertools.islice(usage.below(process.pid), 1, 1 + num_makers):
            process_tree.send(maker, signal.SIGKILL)
        process_tree.kill(process.pid)
        process.wait()


def _read(result: IO[bytes], errors: IO[bytes], status: int, failure: str, before: bytes) -> Ran:
    """What a container gave back: the size of the output in 20 digits, the output, the files."""
    result.seek(0)
    head = result.read(20)
    if failure or not head.strip().isdigit():
        errors.seek(0)
        said = errors.read(SHOWN_BYTES).decode(errors="replace").strip()[-300:]
        return Ran("", -1, failure or f"the container ended too early, with status {status}{': ' * bool(said)}{said}", before)
    output = result.read(min(int(head), SHOWN_BYTES)).decode(errors="replace")
    files = result.read()
    if status == NOT_RUN:
        return Ran(output, -1, f"the files could not be read back: they have no room, one of them cannot be read, or {HOME} is gone", before)
    return Ran(output, status, "", files)


def pack(files: dict[str, str]) -> bytes:
    """A tar of text files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, text in files.items():
            content, entry = text.encode(), tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
