"""What the filters answer, by a small machine that runs them: also those of the architecture that this is not."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.sandbox.confinement import landlock, seccomp, syscall_policy
from workers.sandbox.confinement.counting import MAX_THREADS, Allowance
from workers.sandbox.confinement.seccomp import ALLOW, KILL, NOTIFY, Block
from workers.sandbox.confinement.syscall_policy import CHANGING, REFUSED, UNKNOWN
from workers.sandbox.confinement.syscalls import AARCH64, ARCHITECTURES, X86_64

PID = 4242
HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), "aarch64": Path("/usr/include/asm-generic/unistd.h")}
MACHINES = sorted(ARCHITECTURES)
words = st.integers(0, 2**64 - 1)


def answer(block: Block, audit: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel would make of `block` (Linux, Documentation/networking/filter.rst)."""
    data = struct.pack("<IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    place, register = 0, 0
    while True:
        code, if_true, if_false, constant = block[place]
        place += 1
        if code == 0x20:
            register = struct.unpack_from("<I", data, constant)[0]
        elif code == 0x06:
            return constant
        else:
            jump = {0x15: register == constant, 0x35: register >= constant, 0x45: bool(register & constant)}[code]
            place += if_true if jump else if_false


def decide(machine: str, name: str, *arguments: int, counted: bool = True, writes: bool = True) -> int:
    there = ARCHITECTURES[machine]
    return answer(syscall_policy.policy(there, PID, counted=counted, writes=writes), there.audit, there.numbers[name], arguments)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_all_that_is_not_listed_is_refused(machine: str, writes: bool, counted: bool) -> None:
    there = ARCHITECTURES[machine]
    block = syscall_policy.policy(there, PID, counted=counted, writes=writes)
    allowed = {there.numbers[name] for name in syscall_policy.ALLOWED if name in there.numbers and (writes or name not in CHANGING)}
    conditional = {there.numbers[name] for name in syscall_policy._conditions(PID, counted=counted, writes=writes) if name in there.numbers}
    assert len(block) <= 4096, "the kernel's limit"
    for number in range(syscall_policy.FIRST_UNKNOWN):
        if number not in conditional:
            assert answer(block, there.audit, number) == (ALLOW if number in allowed else REFUSED)
    assert answer(block, there.audit, syscall_policy.FIRST_UNKNOWN) == answer(block, there.audit, 1000) == UNKNOWN


@given(machine=st.sampled_from(MACHINES), number=st.integers(0, 2**32 - 1), audit=st.integers(0, 2**32 - 1), arguments=st.tuples(*[words] * 6))
def test_another_way_into_the_kernel_kills(machine: str, number: int, audit: int, arguments: tuple[int, ...]) -> None:
    there = ARCHITECTURES[machine]
    for block in (syscall_policy.policy(there, PID, counted=True, writes=True), syscall_policy.counting(there)):
        if audit != there.audit:
            assert answer(block, audit, number, arguments) == KILL
        assert answer(block, there.audit, number | seccomp.X32, arguments) == KILL


@given(machine=st.sampled_from(MACHINES), flags=words, writes=st.booleans(), counted=st.booleans(), place=words)
def test_opening(machine: str, flags: int, writes: bool, counted: bool, place: int) -> None:
    """Nothing is made that is not counted; nothing is written where nothing keeps a program to its folder."""
    decision = decide(machine, "openat", place, place, flags, counted=counted, writes=writes)
    there = ARCHITECTURES[machine]
    asked = answer(syscall_policy.counting(there), there.audit, there.numbers["openat"], (place, place, flags))
    makes = bool(flags & (os.O_CREAT | syscall_policy.TMPFILE))
    changes = makes or bool(flags & (os.O_ACCMODE | os.O_TRUNC))
    assert asked == (NOTIFY if makes else ALLOW)
    assert decision in (ALLOW, REFUSED)
    if decision == ALLOW:
        assert not (makes and not counted) and not (changes and not writes)
    elif not changes:
        raise AssertionError("reading is always allowed here: what may be read is Landlock's")


@given(machine=st.sampled_from(MACHINES), flags=words, counted=st.booleans())
def test_only_threads_are_started(machine: str, flags: int, counted: bool) -> None:
    decision = decide(machine, "clone", flags, counted=counted)
    assert decision in (ALLOW, REFUSED)
    if decision == ALLOW:
        assert flags & 0x10000 and not flags & 0x7E020000 and counted
    assert decide(machine, "clone", 0x3D0F00) == ALLOW, "pthread_create"
    there = ARCHITECTURES[machine]
    assert answer(syscall_policy.counting(there), there.audit, there.numbers["clone"], (flags,)) == NOTIFY


@given(machine=st.sampled_from(MACHINES), pid=words, call=st.sampled_from(["kill", "tgkill"]))
def test_signals_reach_the_program_alone(machine: str, pid: int, call: str) -> None:
    assert (decide(machine, call, pid) == ALLOW) == (pid % 2**32 == PID)


@given(machine=st.sampled_from(MACHINES), family=st.integers(0, 50), kind=words)
def test_pairs_are_local_streams(machine: str, family: int, kind: int) -> None:
    assert decide(machine, "socketpair", family, kind) == (ALLOW if family == 1 and kind % 2**32 in (1, 0x801, 0x80001, 0x80801) else REFUSED)
    assert decide(machine, "socketpair", 1, 1) == ALLOW


@given(machine=st.sampled_from(MACHINES), place=words)
def test_sending_takes_no_address(machine: str, place: int) -> None:
    assert decide(machine, "sendto", 0, 0, 0, 0, place, 0) == (REFUSED if place else ALLOW)


@given(machine=st.sampled_from(MACHINES), flags=words)
def test_shared_memory_without_a_file_is_refused(machine: str, flags: int) -> None:
    assert decide(machine, "mmap", 0, 0, 0, flags) == (REFUSED if flags & 1 and flags & 0x20 else ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
def test_structures_that_a_filter_cannot_see_are_not_used(machine: str) -> None:
    assert decide(machine, "clone3") == decide(machine, "openat2") == UNKNOWN
    assert not {"socket", "connect", "bind", "listen", "accept", "sendmsg", "sendmmsg", "execve", "execveat", "fork", "vfork", "ptrace", "truncate",
                "chmod", "fchmod", "chown", "fchown", "utimensat", "setxattr", "link", "symlink", "mknod", "memfd_create", "io_uring_setup",
                "pidfd_open", "mount", "unshare", "setns", "keyctl", "bpf", "shmget", "setsid", "flock"} & set(syscall_policy.ALLOWED)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_the_kernels(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"no {header} here")
    found = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())}
    for name, number in ARCHITECTURES[machine].numbers.items():
        known = found.get(name, found.get({"newfstatat": "fstatat"}.get(name, name)))
        assert known in (number, None), name
    assert sum(name in found for name in ARCHITECTURES[machine].numbers) > 90


def test_every_name_has_a_number() -> None:
    names = {*syscall_policy.ALLOWED, *syscall_policy._conditions(PID, counted=True, writes=True), *syscall_policy.COUNTED_FILES,
             *syscall_policy.COUNTED_THREADS}
    names |= {"seccomp", "capset", *syscall_policy.HIDDEN_MEMORY, *syscall_policy.KERNEL}
    assert names == set(X86_64)
    old = {"dup2", "pipe", "poll", "select", "epoll_create", "epoll_wait", "eventfd", "stat", "lstat", "access", "getdents", "readlink", "unlink",
           "rmdir", "rename", "pause", "alarm", "getpgrp", "time", "open", "mkdir"}
    assert names - set(AARCH64) == old, "those that newer architectures never had"
    for table in (X86_64, AARCH64):
        assert len(set(table.values())) == len(table)


@given(version=st.integers(1, 20))
def test_landlock_asks_for_what_its_version_knows(version: int) -> None:
    files, network, scopes = landlock.handled(version)
    assert files & landlock.handled(1)[0] == 0x1FFF
    newer = [bool(files & right) for right in (landlock.REFER, landlock.TRUNCATE, landlock.IOCTL_DEV)]
    assert newer == [version >= 2, version >= 3, version >= 5]
    assert (network, scopes) == (3 if version >= 4 else 0, 3 if version >= 6 else 0)
    assert not landlock.READ_WRITE & (landlock.EXECUTE | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12), "no sockets, pipes, devices, links"


@given(machine=st.sampled_from(MACHINES), num_files=st.integers(0, 50), calls=st.lists(st.sampled_from(["clone", "openat", "mkdirat"]), max_size=300))
def test_an_allowance_is_used_up(machine: str, num_files: int, calls: list[str]) -> None:
    there = ARCHITECTURES[machine]
    allowance = Allowance(there, num_files)
    given_out = [name for name in calls if allowance.ask(there.numbers[name]) == 0]
    assert given_out.count("clone") == min(calls.count("clone"), MAX_THREADS)
    assert len(given_out) - given_out.count("clone") == min(len(calls) - calls.count("clone"), num_files)


def test_sizes_of_the_kernels_structures() -> None:
    assert sys.byteorder == "little" and ctypes.sizeof(ctypes.c_void_p) == 8, "as on both architectures"
