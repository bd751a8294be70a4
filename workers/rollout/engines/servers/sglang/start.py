"""Starts an SGLang server in this process. Run by its path, in the interpreter that has SGLang, which need not have anything of ours.

    PYTHON .../start.py --ready-fd FD -- FLAGS OF sglang.launch_server     reads the API key from stdin, which must stay open
    PYTHON .../start.py --check                                            only looks whether this interpreter has an SGLang that can be used

    worker --spawn, key--> attendant ----fork----> SGLang's main process ----> schedulers, detokenizer
           <-------------- {"port": N} ------------|  a process group, which ends with the attendant
The attendant waits for the end of the main process, or of the worker (stdin ends), removes all that is left, and ends as the main process
did. So nothing stays, however it ends: SIGKILL leaves SGLang no time to see to that. The API key is in no command line, no environment and no
log. Everything temporary is in a private folder (SGLang's local sockets among it: pickles travel there). Exit status 2: there is no SGLang
that can be used, with the reason.
"""

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import logging
import multiprocessing.resource_tracker
import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time

OLDEST, TOO_NEW = (0, 5, 21), (0, 6)
SHARED_MEMORY = "/dev/shm"
LEFT_BEHIND = ("sglang_", "sgl_", "psm_", "torch_", "nccl-", "cuda.shm.")
"""Beginnings of the names of shared memory that is SGLang's own."""
SOCKET = "/tmp/sglang_load_collector_"
"""Beginning of the one local socket that SGLang puts elsewhere than into the temporary folder."""
FIRST_LOOK_S, LOOK_S = 0.1, 5.0
DYING_S, KILLED_S = 2.0, 20.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# The worker has blocked the signals that end a job, for all that comes of this process. Python's resource tracker would let SIGTERM in again,
# here and in the processes that SGLang spawns, which import this file too.
multiprocessing.resource_tracker._HAVE_SIGMASK = False  # type: ignore[attr-defined]


def problem() -> str:
    """Why this interpreter's SGLang cannot be used, '' if it can."""
    wanted = f"SGLang {'.'.join(map(str, OLDEST))} or newer, before {'.'.join(map(str, TOO_NEW))}"
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return (f"engine.server=sglang: {sys.executable} has no SGLang. Install {wanted} there, or set engine.python to the interpreter "
                "of an environment that has it")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not OLDEST <= numbers < TOO_NEW:
        return (f"engine.server=sglang: {sys.executable} has SGLang {version}: must be {wanted}, for versions by token and updates of the "
                "weights of running requests. Install another one, or set engine.python to the interpreter of an environment that has it")
    return ""


def control(option: int, value: int) -> None:
    """Linux prctl(2) with one value, as workers.run.processes.control, which is not to be had here. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def attend(server: int, ended: int, folder: str) -> None:
    """Stay until `server`, a child that leads a group, or the worker has ended; then end what is left of the group, remove `folder`, shared
    memory and socket, and end as the server did. `ended`: a pipe that the server's end closes."""
    seen, pause_s = left_behind(server), FIRST_LOOK_S
    while not (ready := select.select([ended, 0], [], [], pause_s)[0]):
        seen, pause_s = seen | left_behind(server), min(LOOK_S, 2 * pause_s)
    if ended not in ready:
        seen |= left_behind(server)
        os.kill(server, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    bury(server)
    for path in seen:
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)
    if status < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        with contextlib.suppress(OSError):  # SIGKILL has no other action
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def left_behind(group: int) -> set:
    """The files of shared memory, and sockets outside the temporary folder, of SGLang's own that a process of the group uses."""
    found, bound = set(), sockets()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # not a process, or one that has just ended
            if os.getpgid(int(name)) == group:
                with open(f"/proc/{name}/maps") as maps:
                    used = {line.rstrip("\n").partition("/")[1:] for line in maps if SHARED_MEMORY in line}
                found |= {path for path in map("".join, used) if is_shared_memory(path)}
                if bound:
                    opened = {os.readlink(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd")}
                    found |= {path for inode, path in bound.items() if inode in opened}
    return found


def is_shared_memory(path: str) -> bool:
    """Whether `path` is shared memory that SGLang made."""
    return os.path.dirname(path) == SHARED_MEMORY and os.path.basename(path).startswith(LEFT_BEHIND)


def sockets() -> dict:
    """The local sockets of SGLang's own outside the temporary folder, of whatever process: by what /proc shows for a descriptor of each."""
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table if SOCKET in line]
    return {f"socket:[{row[6]}]": row[7] for row in rows if len(row) == 8 and row[7].startswith(SOCKET)}


def bury(group: int) -> None:
    """Wait until nothing is left of a group whose server has ended; what has not gone by itself by then is killed. Python's resource tracker is
    part of the group, and removes semaphores while it is let."""
    deadline, killed = time.monotonic() + DYING_S, False
    with contextlib.suppress(ProcessLookupError):
        while not killed or time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):  # they are all ours now that their parents are gone
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            os.killpg(group, 0)
            if not killed and time.monotonic() > deadline:
                os.killpg(group, signal.SIGKILL)
                deadline, killed = time.monotonic() + KILLED_S, True
            time.sleep(0.01)


def reserve_port() -> socket.socket:
    """A free port of the loopback interface. While this socket is open and does not listen, nobody is given its port by chance, and SGLang's
    HTTP server can still bind it: both say SO_REUSEADDR."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def hide(secret: str) -> None:
    """Keep `secret` out of this process's log: SGLang writes down all its arguments."""
    make = logging.getLogRecordFactory()

    def record(*args: object, **kwargs: object) -> logging.LogRecord:
        entry = make(*args, **kwargs)
        if secret in str(entry.msg):
            entry.msg = str(entry.msg).replace(secret, "(hidden)")
        return entry

    logging.setLogRecordFactory(record)


def surroundings(folder: str, port: int, spread: bool) -> None:
    """What SGLang and its libraries read of the environment; what a user has set stays. `spread`: over several nodes."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # The ranks of one server meet by a file, and gloo's on the loopback interface: torch's store would listen on all interfaces. Those of several
    # nodes meet at --dist-init-addr, and send each other Python objects by gloo alone, not over sockets of their own.
    if spread:
        os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    alone = (("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{folder}/ranks"), ("GLOO_SOCKET_IFNAME", "lo"))
    for name, value in (
            *(() if spread else alone),
            ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)),  # part of the names of shared memory between ranks on CPUs
            ("SGLANG_LOAD_SNAPSHOT_USE_ZMQ", "1"), ("HF_HUB_OFFLINE", "1"),
            ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")):  # by the positions that it keeps back (options.py)
        os.environ.setdefault(name, value)


def launch(flags: list, api_key: str, reserved: socket.socket) -> None:
    """Serve until the process ends."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    load_plugins()
    if "--attn-dp-size" in flags and "attn_dp_size" not in {field for kind in ServerArgs.__mro__ for field in getattr(kind, "__annotations__", ())}:
        place = flags.index("--attn-dp-size")  # its older name
        flags[place:place + 1] = ["--enable-dp-attention", "--dp-size"]
    arguments = prepare_server_args([*flags, "--host", "127.0.0.1", "--port", str(reserved.getsockname()[1])])
    hide(api_key)
    arguments.api_key = api_key
    run_server(arguments)


def main() -> None:
    """Read the command line; check, or serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    if words := problem():
        print(words, file=sys.stderr)
        sys.exit(2)
    if options.check:
        return
    api_key = sys.stdin.readline().strip()
    if not api_key:
        sys.exit("no API key on stdin: every request needs one. Write a random string and a line break to it, and leave it open")
    folder, parent = tempfile.mkdtemp(prefix="headway-sglang-"), os.getpid()
    ended, lives = os.pipe()  # which nothing that the server starts inherits
    control(_PR_SET_CHILD_SUBREAPER, 1)
    if server := os.fork():
        os.close(lives)
        os.close(options.ready_fd)
        attend(server, ended, folder)
    control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"parent process {parent} is gone: the parent of this process is {os.getppid()}")
    os.setpgid(0, 0)
    reserved = reserve_port()
    surroundings(folder, reserved.getsockname()[1], "--nnodes" in options.flags)
    with os.fdopen(options.ready_fd, "w") as ready:
        ready.write(json.dumps({"port": reserved.getsockname()[1]}) + "\n")
    launch(options.flags, api_key, reserved)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files are no modules for SGLang
    main()
