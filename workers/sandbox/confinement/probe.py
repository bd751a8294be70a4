"""What this machine has to confine programs with (`probe`), and what that means for a config (`judge`)."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass

from workers.config import SandboxBackend, SandboxConfig, SandboxPolicy
from workers.sandbox.confinement import counting, landlock, libc, seccomp
from workers.sandbox.confinement.syscalls import ARCHITECTURES

_BUBBLEWRAP_S = 60.0


@dataclass(frozen=True)
class Machine:
    """`name`: the processor's; `release`: the kernel's; `landlock`: ABI, 0 for none; `seccomp`: whether filters are there; `notifications`: whether
    a supervisor can be asked; `bubblewrap`: path of a bwrap that works here, '' for none (asked only where it matters)."""

    name: str
    release: str
    landlock: int
    seccomp: bool
    notifications: bool
    bubblewrap: str


@dataclass(frozen=True)
class Verdict:
    """What a machine means for a config. `missing`: why no program can be run; `weaker`: what is not kept from programs, said at every start."""

    missing: list[str]
    weaker: list[str]


def probe(backend: SandboxBackend) -> Machine:
    """Ask the kernel, and where `backend` leaves it to bubblewrap, whether that works (some ms)."""
    system = os.uname()
    known = ARCHITECTURES.get(system.machine)
    number = known.numbers["seccomp"] if known else -1
    abi = landlock.abi() if known else 0
    asked = backend is SandboxBackend.bubblewrap or (backend is SandboxBackend.auto and not abi)
    return Machine(system.machine, system.release, abi, known is not None and _has(number, seccomp.ERROR),
                   known is not None and _has(number, seccomp.NOTIFY) and _sizes_fit(number), _bubblewrap() if asked else "")


def judge(config: SandboxConfig, machine: Machine) -> Verdict:
    """Whether programs can be run on `machine`, and how well confined."""
    if machine.name not in ARCHITECTURES or not machine.seccomp:
        return Verdict([f"system calls cannot be filtered on this machine ({machine.name}, Linux {machine.release}): seccomp is needed, on "
                        f"{' or '.join(ARCHITECTURES)}. Run rewards on other nodes (reward.placement=array), or take a verifier that runs no "
                        "programs"], [])
    guarded = (machine.landlock and config.backend is not SandboxBackend.bubblewrap) or (
        machine.bubblewrap and config.backend is not SandboxBackend.landlock)
    if guarded:
        return Verdict([], [])
    lack = _lack(config, machine)
    if config.policy is SandboxPolicy.weaken:
        return Verdict([], [f"{lack}: programs can read every file that this user can read, and what other processes of this user hold in memory. "
                            "They can write nothing, nor reach the network or start processes"])
    return Verdict([f"{lack}, so programs could read the files of others. Enable Landlock (lsm=landlock,... on the kernel's command line; Linux 5.13 "
                    "or newer), install bubblewrap where user namespaces are allowed, run rewards on other nodes (reward.placement=array), or "
                    "accept programs that read everything with sandbox.policy=weaken"], [])


def _lack(config: SandboxConfig, machine: Machine) -> str:
    no_landlock = f"this kernel (Linux {machine.release}) has no Landlock"
    no_bubblewrap = "bubblewrap (bwrap) is not installed, or does not work here"
    return {SandboxBackend.landlock: f"sandbox.backend=landlock: {no_landlock}",
            SandboxBackend.bubblewrap: f"sandbox.backend=bubblewrap: {no_bubblewrap}",
            SandboxBackend.auto: f"{no_landlock}, and {no_bubblewrap}"}[config.backend]


def _has(number: int, action: int) -> bool:
    try:
        libc.syscall(number, seccomp.GET_ACTION_AVAIL, 0, struct.pack("=I", action))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            return False
        raise
    return True


def _sizes_fit(number: int) -> bool:
    """Whether the kernel's notifications are those that we know, and can be answered with 'go on' (Linux 5.5)."""
    sizes = bytearray(6)
    try:
        libc.syscall(number, seccomp.GET_NOTIFICATION_SIZES, 0, (libc.ctypes.c_char * 6).from_buffer(sizes))
    except OSError:
        return False
    major, minor = (int("".join(filter(str.isdigit, part))) for part in os.uname().release.split(".")[:2])
    return struct.unpack("=HHH", sizes) == counting.NOTIFICATION_SIZES and (major, minor) >= (5, 5)


def _bubblewrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        return ""
    command = [path, "--unshare-all", "--ro-bind", "/", "/", "--", "/bin/true"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BUBBLEWRAP_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return path if done.returncode == 0 else ""
