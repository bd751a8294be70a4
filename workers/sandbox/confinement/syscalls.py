"""Numbers of the system calls that the policy names, for each architecture. From the kernel's unistd_64.h and asm-generic/unistd.h."""

from __future__ import annotations

from typing import NamedTuple

# ruff: noqa: C408 - as literals the tables would be half as long again

X86_64 = dict(
    read=0, write=1, readv=19, writev=20, pread64=17, pwrite64=18, preadv=295, pwritev=296, preadv2=327, pwritev2=328, lseek=8, close=3,
    close_range=436, dup=32, dup2=33, dup3=292, pipe=22, pipe2=293, poll=7, ppoll=271, select=23, pselect6=270, epoll_create=213,
    epoll_create1=291, epoll_ctl=233, epoll_wait=232, epoll_pwait=281, epoll_pwait2=441, eventfd=284, eventfd2=290, timerfd_create=283,
    timerfd_settime=286, timerfd_gettime=287, signalfd4=289, stat=4, fstat=5, lstat=6, newfstatat=262, statx=332, statfs=137, fstatfs=138,
    access=21, faccessat=269, faccessat2=439, getdents=78, getdents64=217, getcwd=79, chdir=80, fchdir=81, readlink=89, readlinkat=267,
    unlink=87, unlinkat=263, rmdir=84, rename=82, renameat=264, renameat2=316, fsync=74, fdatasync=75, ftruncate=77, fallocate=285,
    fadvise64=221, sendfile=40, copy_file_range=326, umask=95, brk=12, munmap=11, mremap=25, mprotect=10, madvise=28, mincore=27, msync=26,
    rt_sigaction=13, rt_sigprocmask=14, rt_sigreturn=15, rt_sigpending=127, rt_sigtimedwait=128, rt_sigsuspend=130, sigaltstack=131,
    restart_syscall=219, pause=34, alarm=37, setitimer=38, getitimer=36, futex=202, futex_waitv=449, set_robust_list=273, set_tid_address=218,
    rseq=334, membarrier=324, sched_yield=24, sched_getaffinity=204, sched_getparam=143, sched_getscheduler=145, sched_get_priority_max=146,
    sched_get_priority_min=147, getcpu=309, getpid=39, getppid=110, gettid=186, getuid=102, geteuid=107, getgid=104, getegid=108, getgroups=115,
    getresuid=118, getresgid=120, getpgrp=111, getpgid=121, getsid=124, getpriority=140, capget=125, uname=63, sysinfo=99, getrusage=98,
    times=100, getrlimit=97, gettimeofday=96, time=201, clock_gettime=228, clock_getres=229, clock_nanosleep=230, nanosleep=35, getrandom=318,
    exit=60, exit_group=231, wait4=61, waitid=247, recvfrom=45, shutdown=48, getsockname=51, getpeername=52, getsockopt=55, open=2, openat=257,
    mkdir=83, mkdirat=258, clone=56, mmap=9, kill=62, tgkill=234, prctl=157, ioctl=16, fcntl=72, prlimit64=302, socketpair=53, sendto=44,
    clone3=435, openat2=437, capset=126, seccomp=317, memfd_create=319, memfd_secret=447, shmget=29, msgget=68, semget=64, io_uring_setup=425,
    add_key=248, request_key=249, keyctl=250, bpf=321, perf_event_open=298, userfaultfd=323)

AARCH64 = dict(
    read=63, write=64, readv=65, writev=66, pread64=67, pwrite64=68, preadv=69, pwritev=70, preadv2=286, pwritev2=287, lseek=62, close=57,
    close_range=436, dup=23, dup3=24, pipe2=59, ppoll=73, pselect6=72, epoll_create1=20, epoll_ctl=21, epoll_pwait=22, epoll_pwait2=441,
    eventfd2=19, timerfd_create=85, timerfd_settime=86, timerfd_gettime=87, signalfd4=74, fstat=80, newfstatat=79, statx=291, statfs=43,
    fstatfs=44, faccessat=48, faccessat2=439, getdents64=61, getcwd=17, chdir=49, fchdir=50, readlinkat=78, unlinkat=35, renameat=38,
    renameat2=276, fsync=82, fdatasync=83, ftruncate=46, fallocate=47, fadvise64=223, sendfile=71, copy_file_range=285, umask=166, brk=214,
    munmap=215, mremap=216, mprotect=226, madvise=233, mincore=232, msync=227, rt_sigaction=134, rt_sigprocmask=135, rt_sigreturn=139,
    rt_sigpending=136, rt_sigtimedwait=137, rt_sigsuspend=133, sigaltstack=132, restart_syscall=128, setitimer=103, getitimer=102, futex=98,
    futex_waitv=449, set_robust_list=99, set_tid_address=96, rseq=293, membarrier=283, sched_yield=124, sched_getaffinity=123,
    sched_getparam=121, sched_getscheduler=120, sched_get_priority_max=125, sched_get_priority_min=126, getcpu=168, getpid=172, getppid=173,
    gettid=178, getuid=174, geteuid=175, getgid=176, getegid=177, getgroups=158, getresuid=148, getresgid=150, getpgid=155, getsid=156,
    getpriority=141, capget=90, uname=160, sysinfo=179, getrusage=165, times=153, getrlimit=163, gettimeofday=169, clock_gettime=113,
    clock_getres=114, clock_nanosleep=115, nanosleep=101, getrandom=278, exit=93, exit_group=94, wait4=260, waitid=95, recvfrom=207,
    shutdown=210, getsockname=204, getpeername=205, getsockopt=209, openat=56, mkdirat=34, clone=220, mmap=222, kill=129, tgkill=131, prctl=167,
    ioctl=29, fcntl=25, prlimit64=261, socketpair=199, sendto=206, clone3=435, openat2=437, capset=91, seccomp=277,
    memfd_create=279, memfd_secret=447, shmget=194, msgget=186, semget=190, io_uring_setup=425, add_key=217, request_key=218, keyctl=219, bpf=280,
    perf_event_open=241, userfaultfd=282)


class Architecture(NamedTuple):
    """`audit`: AUDIT_ARCH_*, by which a filter knows that a call was made in this way and not, say, in the 32-bit one."""

    audit: int
    numbers: dict[str, int]


ARCHITECTURES = {"x86_64": Architecture(0xC000003E, X86_64), "aarch64": Architecture(0xC00000B7, AARCH64)}
"""By `os.uname().machine`."""
