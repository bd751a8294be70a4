"""How SLURM writes nodes, times and resources. Pure."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping

NOT_GIVEN = ("", "N/A", "NONE", "UNKNOWN", "NONE ASSIGNED", "(NULL)", "INVALID", "NOT_SET", "UNLIMITED", "PARTITION_LIMIT")


def expand_hosts(text: str) -> tuple[str, ...]:
    """'inf[0-2,7],trn01' -> inf0 inf1 inf2 inf7 trn01."""
    if text.upper() in NOT_GIVEN:
        return ()
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = [_numbers(part[1:-1]) if part.startswith("[") else [part] for part in re.findall(r"\[[^\]]*\]|[^\[]+", item)]
        hosts += ["".join(combination) for combination in itertools.product(*parts)]
    return tuple(hosts)


def _numbers(text: str) -> list[str]:
    numbers = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def seconds(text: str) -> float | None:
    """'1-02:03:04', '03:04', '45:00' -> seconds; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def clock(text: str) -> float | None:
    """'2026-11-21T15:53:56', local time -> seconds since 1970; None for N/A and the like."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def gpus(text: str, kind: str = "") -> int:
    """GPUs in a node's gres ('gpu:h100:8(S:0-1),nvme:1') or in allocated resources ('cpu=4,gres/gpu=2,gres/gpu:h100=2'). `kind`: in a gres, only
    those of this type."""
    if kind:
        return sum(map(int, re.findall(rf"(?i)(?:^|,)gpu:{re.escape(kind)}:(\d+)(?=[,(]|$)", text)))
    allocated = dict(re.findall(r"gres/(gpu(?::[^=,]+)?)=(\d+)", text))
    if allocated:
        return int(allocated.get("gpu", 0)) or sum(map(int, allocated.values()))
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)(?=[,(]|$)", text))


def max_array_size(config: Mapping[str, str]) -> int:
    """How many elements an array may have, by `scontrol show config`: MaxArraySize, or SchedulerParameters=max_array_tasks where that is less; 1001,
    SLURM's default, where it says neither."""
    tasks = re.search(r"\bmax_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
    return min([int(config.get("MaxArraySize", "1001")), *([int(tasks[1])] if tasks else [])])
