"""Attacks, as programs. Each attempts what must be refused, by as many ways as there are, and says how each went.

`attempt` prints 'NAME refused' only for the errors by which the kernel refuses: a mistake in an attack (a wrong path, a wrong type) is no refusal.
"""

from __future__ import annotations

PRELUDE = '''
import ctypes, errno, os, socket, struct, sys
host = {facts!r}
refusals = {{errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EXDEV}} | set({more!r})
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def call(number, *arguments):
    """A system call by its number, past the C library and Python."""
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(value) if isinstance(value, int) else value for value in arguments])
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result

def attempt(name, action, *arguments):
    try:
        result = action(*arguments)
    except OSError as error:
        print(name, "refused" if error.errno in refusals else f"FAILED {{error!r}}")
    else:
        print(name, f"ESCAPED {{result!r:.200}}")
'''

REFUSED = {
    "network": '''
def kind(family, type, protocol=0):
    return lambda: socket.socket(family, type, protocol)
for name, family, type in (("tcp", 2, 1), ("tcp6", 10, 1), ("udp", 2, 2), ("udp6", 10, 2), ("unix", 1, 1), ("unix datagram", 1, 2), ("raw", 2, 3),
                           ("netlink", 16, 3), ("packet", 17, 3), ("vsock", 40, 1), ("kernel crypto", 38, 5), ("bluetooth", 31, 3)):
    attempt(name, kind(family, type))
attempt("connect", socket.create_connection, host["tcp"], 5)
attempt("resolve by hand", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", host["udp"]))
attempt("datagram pair", socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)
attempt("inet pair", lambda: socket.socketpair(socket.AF_INET, socket.SOCK_STREAM))
pair = socket.socketpair()
attempt("a pair's other address", pair[0].sendto, b"x", host["local"])
attempt("a pair connected anew", pair[0].connect, host["abstract"])
attempt("a pair bound", pair[0].bind, "name")
attempt("a pair that listens", pair[0].listen)
attempt("descriptors along a pair", pair[0].sendmsg, [b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))])
''',
    "reading outside": '''
def read(path):
    with open(path, "rb", buffering=0) as file:
        return file.read(10)
victim, parent = host["victim"], os.getppid()
paths = [host["secret"], "/etc/passwd", f"/proc/{victim}/environ", f"/proc/{victim}/mem", f"/proc/{victim}/maps",
         f"/proc/{victim}/cmdline", f"/proc/{parent}/environ", f"/proc/{parent}/mem", f"/proc/{parent}/maps", "/proc/1/environ", "/proc/1/cmdline",
         "/proc/self/environ", "/proc/self/mem", "/proc/self/maps", "/proc/self/status", f"/proc/self/root{host['secret']}", "/proc/cpuinfo",
         "/dev/zero",
         f"/proc/{parent}/root{host['secret']}", f"/proc/{victim}/cwd{host['secret']}", os.path.relpath(host["secret"])]
paths += [path for path in ("/etc/hostname", "/proc/sysvipc/shm", "/proc/net/unix", "/proc/self/net/tcp",
                            "/sys/kernel/mm/transparent_hugepage/enabled") if os.path.exists(path)]
for path in paths:
    attempt(path, read, path)
for path in ("/", "/home", "/tmp", "/proc", "/sys", "/etc", "/dev/shm", host["folder"], "..", "../..", f"/proc/{parent}/fd", "/proc/self/fd"):
    attempt(f"list {path}", os.listdir, path)
os.chdir("/")
attempt("relative", read, host["secret"].lstrip("/"))
root = os.open("/", os.O_PATH)
attempt("by folder descriptor", lambda: os.open(host["secret"].lstrip("/"), os.O_RDONLY, dir_fd=root))
name = os.open(host["secret"], os.O_PATH)
attempt("read by name only", lambda: os.pread(name, 10, 0) if False else read(f"/proc/self/fd/{name}"))
attempt("openat2", call, 437, -100, ctypes.c_char_p(host["secret"].encode()), (ctypes.c_uint64 * 3)(), 24)
attempt("map", lambda: __import__("mmap").mmap(os.open(host["secret"], os.O_RDONLY), 4, access=1))
''',
    "writing outside": '''
import sysconfig
secret, folder = host["secret"], host["folder"]
library = sysconfig.get_paths()["stdlib"] + "/os.py"
def opened(path, mode):
    with open(path, mode) as file:
        file.write("x")
for path in (secret, folder + "/new", "/tmp/headway-evil", "../evil", "../canary", "/dev/shm/headway-evil", library, library + "c",
             f"/proc/{os.getppid()}/mem", f"/proc/{host['victim']}/mem", f"/proc/{host['victim']}/oom_score_adj", "/proc/self/oom_score_adj",
             "/proc/sys/kernel/hostname", "/proc/self/comm", "/dev/full", "/dev/tty"):
    for mode in ("w", "a", "r+") if os.path.exists(path) else ("w", "a"):
        attempt(f"{mode} {path}", opened, path, mode)
for path in (secret, library):
    descriptor = os.open(library, os.O_RDONLY)
    attempt("truncate", os.truncate, path, 0)
    attempt("truncate on opening", os.open, path, os.O_RDONLY | os.O_TRUNC)
    attempt("chmod", os.chmod, path, 0o777)
    attempt("chown", os.chown, path, os.getuid(), os.getgid())
    attempt("times", os.utime, path, (0, 0))
    attempt("remove", os.unlink, path)
    attempt("rename away", os.rename, path, path + "2")
    attempt("rename into", os.rename, path, "mine")
    attempt("link", os.link, path, "mine")
    attempt("symbolic link", os.symlink, path, "mine")
    attempt("attribute", os.setxattr, path, "user.evil", b"x")
    attempt("fchmod", os.fchmod, descriptor, 0o777)
    attempt("fchown", os.fchown, descriptor, os.getuid(), os.getgid())
    attempt("times by descriptor", os.utime, descriptor, (0, 0))
    attempt("attribute by descriptor", os.setxattr, descriptor, "user.evil", b"x")
    attempt("flags", lambda: __import__("fcntl").ioctl(descriptor, 0x40086602, struct.pack("l", 16)))
    attempt("lock", lambda: __import__("fcntl").flock(descriptor, 2))
open("own", "w").close()
attempt("rename over", os.rename, "own", secret)
attempt("own mode", os.chmod, "own", 0o4777)
attempt("rename out", os.rename, "own", folder + "/own")
attempt("folder outside", os.mkdir, folder + "/new")
attempt("remove the folder outside", os.rmdir, folder)
attempt("pipe", os.mkfifo, "pipe")
attempt("device", os.mknod, "device", 0o020600, os.makedev(1, 5))
attempt("nameless file", os.open, folder, os.O_TMPFILE | os.O_RDWR)
own = os.open("own", os.O_RDWR | os.O_CREAT)
fallocate, renameat2 = (47, 276) if os.uname().machine == "aarch64" else (285, 316)
attempt("blocks past the end", call, fallocate, own, 1, 0, 1 << 28)
attempt("a whiteout that nobody counts", call, renameat2, -100, ctypes.c_char_p(b"own"), -100, ctypes.c_char_p(b"other"), 4)
''',
    "processes": '''
import subprocess, multiprocessing
attempt("fork", os.fork)
attempt("forkpty", os.forkpty)
attempt("vfork", lambda: call(58) if os.uname().machine == "x86_64" else os.fork())
attempt("spawn", os.posix_spawn, "/bin/true", ["true"], {})
attempt("subprocess", subprocess.run, ["/bin/true"])
attempt("system", lambda: (_ for _ in ()).throw(PermissionError(1, "")) if os.system("true") else "ran")
attempt("multiprocessing", lambda: multiprocessing.get_context("fork").Process(target=print).start())
for path in ("/bin/sh", "/usr/bin/su", "/usr/bin/passwd", sys.executable):
    attempt(f"exec {path}", os.execv, path, [path])
attempt("exec by descriptor", os.execve, os.open(os.__file__, os.O_RDONLY), ["x"], {})
attempt("own session", os.setsid)
attempt("own group", os.setpgid, 0, 0)
attempt("user", os.setuid, os.getuid())
attempt("group", os.setgid, os.getgid())
attempt("groups", os.setgroups, [])
clone = 56 if os.uname().machine == "x86_64" else 220
for name, flags in (("process", 17), ("vfork", 0x4111), ("shared memory", 0x100 | 17), ("user namespace", 0x10000000 | 17),
                    ("mount namespace", 0x20000), ("network namespace with thread", 0x40000000 | 0x10f00),
                    ("traced thread", 0x2000 | 0x10f00), ("sibling", 0x8000 | 17)):
    attempt(f"clone {name}", call, clone, flags, 0, 0, 0, 0)
attempt("clone3", call, 435, (ctypes.c_uint64 * 11)(), 88)
attempt("unshare", lambda: libc.unshare(0x10000000) and call(272 if os.uname().machine == "x86_64" else 97, 0x10000000))
''',
    "other processes": '''
import fcntl, resource, signal
victim, parent = host["victim"], os.getppid()
for name, pid in (("victim", victim), ("server", parent), ("owner", host["server_owner"]), ("init", 1), ("everybody", -1), ("own group", 0),
                  ("server's group", -parent)):
    for number in (0, signal.SIGKILL, signal.SIGSTOP):
        attempt(f"kill {name}", os.kill, pid, number)
attempt("group", os.killpg, parent, 9)
information = ctypes.create_string_buffer(128)
x86 = os.uname().machine == "x86_64"
for name, number, arguments in (
        ("tgkill", 234 if x86 else 131, (victim, victim, 9)), ("tkill", 200 if x86 else 130, (victim, 9)),
        ("queued signal", 129 if x86 else 138, (victim, 9, information)),
        ("queued to a thread", 297 if x86 else 240, (victim, victim, 9, information)),
        ("pidfd", 434, (victim, 0)), ("signal by pidfd", 424, (0, 9, 0, 0)), ("descriptor by pidfd", 438, (0, 0, 0)),
        ("attach", 101 if x86 else 117, (16, victim, 0, 0)), ("seize", 101 if x86 else 117, (0x4206, parent, 0, 0)),
        ("traceme", 101 if x86 else 117, (0, 0, 0, 0)), ("read memory", 310 if x86 else 270, (victim, 0, 0, 0, 0, 0)),
        ("write memory", 311 if x86 else 271, (victim, 0, 0, 0, 0, 0)), ("advise", 440, (0, 0, 0, 0, 0)),
        ("compare", 312 if x86 else 272, (victim, 1, 0, 0, 0)),
        ("move pages", 279 if x86 else 239, (victim, 0, 0, 0, 0, 0)), ("migrate pages", 256 if x86 else 238, (victim, 0, 0, 0)),
        ("reap memory", 448, (0, 0)), ("robust list", 274 if x86 else 100, (victim, information, information)),
        ("io priority", 251 if x86 else 30, (1, victim, 0))):
    attempt(name, call, number, *arguments)
attempt("limits", resource.prlimit, victim, resource.RLIMIT_NOFILE, (0, 0))
attempt("see limits", resource.prlimit, victim, resource.RLIMIT_NOFILE)
attempt("priority", os.setpriority, os.PRIO_PROCESS, victim, 19)
attempt("own priority", os.nice, 1)
attempt("processors", os.sched_setaffinity, victim, {0})
attempt("scheduling", os.sched_setscheduler, victim, os.SCHED_IDLE, os.sched_param(0))
reader, writer = os.pipe()
attempt("signals of a pipe", fcntl.fcntl, reader, fcntl.F_SETOWN, victim)
attempt("which signal", fcntl.fcntl, reader, 10, 9)
attempt("signals of a pipe to a thread", fcntl.fcntl, reader, 15, struct.pack("ii", 1, victim))
attempt("large pipe", fcntl.fcntl, reader, 1031, 1 << 20)
attempt("lease", fcntl.fcntl, os.open(os.__file__, 0), fcntl.F_SETLEASE, fcntl.F_RDLCK)
attempt("watch", fcntl.fcntl, os.open("/", os.O_PATH), fcntl.F_NOTIFY, 1)
''',
    "own leash": '''
import resource
for name, option, value in (("death with the server", 1, 0), ("traceable", 4, 1), ("secure bits", 28, 0), ("any tracer", 0x59616D61, -1),
                            ("capability", 47, 2), ("subreaper", 36, 1), ("name of the executable", 35, 13), ("another filter", 22, 1)):
    attempt(name, lambda: libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) and (_ for _ in ()).throw(OSError(ctypes.get_errno(), name)))
for limit in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_MEMLOCK"):
    number = getattr(resource, limit)
    def more():
        hard = resource.getrlimit(number)[1]
        try:
            resource.setrlimit(number, (hard + 1, hard + 1))
        except ValueError:  # so Python says EPERM
            raise PermissionError(errno.EPERM, limit)
    attempt(limit, more)
''',
}
"""Every line that these print must say 'refused'."""

EXOTIC = '''
for name, number in (
        ("io_uring_setup", 425), ("io_uring_enter", 426), ("io_uring_register", 427), ("bpf", 321), ("perf_event_open", 298), ("userfaultfd", 323),
        ("keyctl", 250), ("add_key", 248), ("request_key", 249), ("memfd_create", 319), ("memfd_secret", 447), ("mount", 165), ("umount2", 166),
        ("pivot_root", 155), ("chroot", 161), ("swapon", 167), ("reboot", 169), ("init_module", 175), ("finit_module", 313), ("kexec_load", 246),
        ("sethostname", 170), ("settimeofday", 164), ("clock_settime", 227), ("adjtimex", 159), ("iopl", 172), ("ioperm", 173), ("shmget", 29),
        ("shmat", 30), ("semget", 64), ("msgget", 68), ("mq_open", 240), ("inotify_init", 253), ("inotify_init1", 294), ("fanotify_init", 300),
        ("seccomp", 317), ("personality", 135), ("arch_prctl", 158), ("modify_ldt", 154), ("landlock_create_ruleset", 444), ("quotactl", 179),
        ("acct", 163), ("syslog", 103), ("vhangup", 153), ("setns", 308), ("unshare", 272), ("name_to_handle_at", 303), ("open_by_handle_at", 304),
        ("fsopen", 430), ("open_tree", 428), ("move_mount", 429), ("mount_setattr", 442), ("sync", 162), ("capset", 126), ("setfsuid", 122),
        ("remap_file_pages", 216), ("mbind", 237), ("timer_create", 222), ("vmsplice", 278), ("mlockall", 151), ("execveat", 322), ("creat", 85),
        ("uselib", 134), ("_sysctl", 156), ("nfsservctl", 180), ("future", 600)):
    attempt(name, call, number, 0, 0, 0, 0, 0)
import mmap
attempt("shared anonymous memory", mmap.mmap, -1, 4096)
'''
"""x86_64's numbers; every line must say 'refused'."""

MACHINE_CODE = '''
import ctypes, mmap
code = bytes.fromhex({code!r})
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
place = libc.mmap(None, 4096, 7, 0x22, -1, 0)
ctypes.memmove(place, code, len(code))
print("ready", flush=True)
print("ESCAPED", ctypes.CFUNCTYPE(ctypes.c_int)(place)(), flush=True)
'''
INT_80 = "b814000000cd80c3"
"""mov eax, 20 (getpid of 32-bit programs); int 0x80; ret"""
X32 = "b8270000400f05c3"
"""mov eax, 0x40000000 | 39 (getpid); syscall; ret"""

FORK_BOMB = '''
import os
started = 0
for _ in range(1000):
    try:
        os.fork()
        started += 1
    except PermissionError:
        pass
print(started)
'''

THREAD_BOMB = '''
import threading, time
started = 0
try:
    while True:
        threading.stack_size(65536)
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        started += 1
except RuntimeError as error:
    print(started, flush=True)
'''

DISK_BOMB = '''
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_long
made = total = 0
try:
    while True:
        with open("file", "wb", buffering=0) as file:
            made += 1
            try:
                while True:
                    total += file.write(bytes(1 << 18))
            except OSError as error:
                assert error.errno == 27, error
        with open("file", "r+b") as file:
            assert libc.mmap(None, 4096, 1, 1, file.fileno(), 0) != -1  # its blocks stay, though the file goes
        os.unlink("file")
except OSError as error:
    print(made, total, error.errno)
'''

FOLDER_BOMB = '''
import os
made = 0
try:
    while True:
        os.mkdir("x" * 200)
        os.chdir("x" * 200)
        made += 1
except OSError as error:
    print(made, error.errno)
'''

DESCRIPTORS = '''
import os
found = []
for number in range(4096):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(found, sorted(os.environ))
'''

SABOTAGE = '''
import builtins, os, sys, threading
os._exit = os.write = os.close = sys.exit = lambda *arguments: None
frame = sys._getframe()
while frame is not None:  # all that is left of what started us
    frame.f_globals.update(os=None, program=None, Server=None)
    frame = frame.f_back
threading.enumerate = lambda: 1 / 0
for name in list(vars(builtins)):
    delattr(builtins, name)
'''

# The statuses that several versions of the interpreter, and machines of any speed, may come to; with 'timeout' the limits are short.
BOMBS = {
    "memory": ("blocks = []\nwhile True: blocks.append(bytearray(1 << 20))", {"memory"}),
    "memory at once": ("bytearray(1 << 40)", {"memory"}),
    "address space": ("import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_long\n"
                      "while libc.mmap(None, ctypes.c_size_t(1 << 24), 0, 0x4022, -1, 0) != -1: pass\nraise MemoryError", {"memory"}),
    "endless loop": ("while True: pass", {"timeout"}),
    "deaf loop": ("import signal\nfor number in set(signal.Signals) - {9, 19}: signal.signal(number, signal.SIG_IGN)\nwhile True: pass", {"timeout"}),
    "sleep": ("import time\ntime.sleep(3600)", {"timeout"}),
    "deaf sleep": ("import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
                   "while True: time.sleep(1)", {"timeout"}),
    "waiting thread": ("import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()", {"timeout"}),
    "waiting at exit": ("import atexit, time\natexit.register(time.sleep, 3600)", {"timeout"}),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}),
    "main thread gone": ("import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n"
                         "ctypes.CDLL(None).syscall(60 if __import__('os').uname().machine == 'x86_64' else 93, 0)", {"timeout"}),
    "huge output": ("while True: print('x' * 100000)", {"output"}),
    "huge errors": ("import os\nwhile True: os.write(2, b'x' * 100000)", {"output"}),
    "deep recursion": ("def f(): f()\nf()", {"error"}),
    "deeper recursion": ("import sys\nsys.setrecursionlimit(1 << 30)\ndef f(): return f()\nf()", {"memory", "killed", "error", "timeout"}),
    "recursion in C": ("import sys\nsys.setrecursionlimit(1 << 30)\nx = []\nfor _ in range(3000000): x = [x]\nrepr(x)",
                       {"memory", "killed", "error", "timeout"}),
    "recursion in the compiler": ("eval('-' * 1000000 + '1')", {"memory", "killed", "error"}),
    "crash": ("import ctypes\nctypes.string_at(0)", {"killed"}),
    "suicide": ("import os\nos.kill(os.getpid(), 9)", {"killed"}),
    "compile": ("x = " + "(" * 5000 + "1" + ")" * 5000, {"error", "memory"}),
    "a huge number": ("9**9**9", {"timeout", "memory"}),
}
"""By name: the program, and how it may end."""
