"""Runs an agent's program and leaves nothing of it: `python -I -S process_guard.py PARENT_PID PROGRAM ARGUMENT ...`

    worker --HUP, or its death--> guard --KILL--> the program and all that it has started

The guard is the subreaper of all of them (prctl(2)), so that whatever leaves its parent, its session or its process group stays within reach.
It ends as the program ends (128 + N where signal N killed that), after the rest is killed. The signals by which SLURM tells a job to end reach
every process of it on some clusters: the guard leaves them to the worker, and once it has got one, the program's end says nothing of the program
(NODE_FAILED). It imports nothing of ours, to start quickly.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDING = (signal.SIGHUP, signal.SIGINT)
FOR_THE_WORKER = (signal.SIGTERM, signal.SIGUSR2)
NOT_FOUND, TOLD = 127, 129
NODE_FAILED = os.EX_TEMPFAIL
"""The exit status by which a program, or the guard, says that it is not the agent that has failed: no score of 0 stands for that."""
SOON_S = 1.0
"""So much later than the program the guard may get a signal that went to both."""


def main(parent: int, command: list[str]) -> int:
    """Run `command`; returns the exit status."""
    for number in ENDING:
        signal.signal(number, _told)
    signal.pthread_sigmask(signal.SIG_SETMASK, FOR_THE_WORKER)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        return _run(command) if os.getppid() == parent else TOLD
    finally:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        _end_all()


def _run(command: list[str]) -> int:
    try:
        program = os.posix_spawnp(command[0], command, os.environ, setsigmask=[], setsigdef=[signal.SIGPIPE])
    except OSError as error:
        print(f"{command[0]}: cannot be run ({error.strerror})", flush=True)
        return NOT_FOUND
    while True:
        ended, status = os.wait()
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            told = signal.sigtimedwait(FOR_THE_WORKER, SOON_S if -code in FOR_THE_WORKER else 0)
            if told is not None:
                print(f"{signal.Signals(told.si_signo).name} has told all of this job to end", flush=True)
                return NODE_FAILED
            return code if code >= 0 else 128 - code


def _told(number: int, frame: object) -> None:
    sys.exit(TOLD)


def _end_all() -> None:
    """Kill children until there are none: those of a killed one become ours."""
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    parent = stat.read().rpartition(")")[2].split()[1]
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # of somebody else, where /proc is mounted with hidepid
                continue
            if int(parent) == os.getpid():
                found.append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
