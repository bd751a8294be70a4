"""What one program may take, and how it ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from workers.config import SandboxConfig

Status = Literal["ok", "error", "timeout", "memory", "output", "killed"]


class SandboxError(RuntimeError):
    """Programs cannot be run, whatever they are. Its text names what is missing and the remedy."""


@dataclass(frozen=True)
class Limits:
    """What one program may take: `wall_s`, `cpu_s` seconds (the latter rounded up to whole ones); `memory_mb` MiB of address space; `output_bytes`
    on standard output, error and in replies together; `num_files` files made, of up to `file_mb` MiB each."""

    wall_s: float
    cpu_s: float
    memory_mb: int
    output_bytes: int
    file_mb: int
    num_files: int

    @classmethod
    def of(cls, config: SandboxConfig) -> Limits:
        """The limits that the config names."""
        return cls(config.wall_s, config.cpu_s, config.memory_mb, config.output_kb * 1024, config.file_mb, config.num_files)


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and what it wrote: untrusted bytes, `output_bytes` of them at most.

    `status`: 'ok' (exit code 0, or a session that went to its end), 'error' (another exit code; a session that the program left, or spoke in out of
    turn), 'timeout' (wall clock or computing time), 'memory' (an uncaught MemoryError), 'output' (it wrote too much), 'killed' (by a signal that
    was not the sandbox's: a crash, or a forbidden kind of system call). `exit_code` is None unless it ended by itself. `wall_s`: from its first
    line to its end, in seconds. A program can feign 'memory', 'error', 'killed'; it can feign 'ok' only by ending with exit code 0.
    """

    status: Status
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float
    replies: list[bytes]


def judge(status: int, cpu_s: float, limits: Limits, stderr: bytes) -> Status:
    """How a program ended by itself: `status` is its exit code or, negative, the signal that ended it."""
    if status == 0:
        return "ok"
    if status > 0:
        last = stderr.rstrip().rpartition(b"\n")[2]
        return "memory" if last.startswith(b"MemoryError") else "error"
    if -status == signal.SIGXCPU or (-status == signal.SIGKILL and cpu_s >= limits.cpu_s):
        return "timeout"
    return "killed"


def shortened(output: str, max_chars: int) -> str:
    """At most `max_chars` of an output, beginning and end, with a word on what is left out."""
    if len(output) <= max_chars:
        return output
    half = max_chars // 2
    return f"{output[:max_chars - half]}\n... {len(output) - max_chars} characters left out ...\n{output[len(output) - half:]}"
