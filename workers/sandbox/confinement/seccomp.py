"""Seccomp: filters of system calls, written as classic BPF (https://docs.kernel.org/userspace-api/seccomp_filter.html).

A filter is a list of instructions; a block is one that ends in an answer on every way through it. Blocks look at the low 32 bits of arguments,
which is all that the kernel itself reads of the flags, ids and commands that the policy asks about.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable

from workers.sandbox.confinement.libc import syscall

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""
Block = list[Instruction]

ALLOW, NOTIFY, ERROR, KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
"""Answers. Of several filters the strictest wins: KILL, ERROR, NOTIFY, ALLOW. To ERROR the error number is added; NOTIFY asks the supervisor."""

SET_MODE_FILTER, GET_ACTION_AVAIL, GET_NOTIFICATION_SIZES = 1, 2, 3
NEW_LISTENER = 1 << 3

_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
X32 = 0x40000000
"""From here on numbers are those of x86_64's other convention."""


def answer(action: int) -> Block:
    """Always `action`."""
    return [(_RETURN, 0, 0, action)]


def one_of(argument: int, values: Iterable[int], then: int, other: int) -> Block:
    """`then` if the argument is one of `values`, else `other`."""
    block = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    for value in values:
        block += [(_EQUAL, 0, 1, value), *answer(then)]
    return block + answer(other)


def any_bit(argument: int, mask: int, then: Block, other: Block) -> Block:
    """`then` if the argument has a bit of `mask`, else `other`."""
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_ANY_BIT, 0, len(then), mask), *then, *other]


def is_null(argument: int, then: int, other: int) -> Block:
    """`then` if the argument, a pointer, is NULL, else `other`."""
    low = _ARGUMENTS + 8 * argument
    return [(_LOAD, 0, 0, low), (_EQUAL, 1, 0, 0), *answer(other), (_LOAD, 0, 0, low + 4), (_EQUAL, 1, 0, 0), *answer(other), *answer(then)]


def assemble(audit: int, calls: Iterable[tuple[int, Block]], newest: tuple[int, int], other: int) -> Block:
    """A filter: `calls` by number, every other one answered with `other`; numbers from `newest[0]` on with `newest[1]`.

    A call in another architecture's way, which would have other numbers, kills the process.
    """
    block: Block = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, audit), *answer(KILL), (_LOAD, 0, 0, _NUMBER),
                    (_GREATER_EQUAL, 0, 1, X32), *answer(KILL), (_GREATER_EQUAL, 0, 1, newest[0]), *answer(newest[1])]
    for number, decision in calls:
        block += [(_EQUAL, 0, len(decision), number), *decision]
    return block + answer(other)


def code_of(block: Block) -> bytes:
    """The filter as the kernel, and programs that install it for others, read it."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in block)


def install(seccomp: int, block: Block, flags: int = 0) -> int:
    """Put the filter on this process, for good; `seccomp` is that call's number. no_new_privs must be set.

    Returns the descriptor of the listener with `NEW_LISTENER`, else 0. Raises `OSError`.
    """
    code = code_of(block)
    buffer = ctypes.create_string_buffer(code, len(code))
    return syscall(seccomp, SET_MODE_FILTER, flags, struct.pack("@HxxxxxxQ", len(block), ctypes.addressof(buffer)))
