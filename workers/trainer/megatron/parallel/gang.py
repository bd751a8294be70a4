"""Who the ranks of one training element are to each other."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gang:
    """This process's place among `world_size` ranks, one for each device, and where they meet.

    Rank 0 listens at `master_addr`:`master_port`, a fixed free port, and all others connect to it; `listener`: rank 0's socket
    that has been bound there (store_guard.reserve), None to bind one when they meet. `local_rank` counts on this node and names
    the device. `interface` is the network interface that the ranks talk over, such as "ib0"; '' leaves the choice to gloo and
    NCCL. `roster`: the folder in which ranks say where they come from (store_guard.py); None: connections come from anywhere.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    interface: str = ""
    roster: Path | None = None
    listener: socket.socket | None = None

    def __post_init__(self) -> None:
        """Raise ValueError on values that cannot be."""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}: ranks go from 0 to one less than their number. "
                             "Take both from SLURM_PROCID and SLURM_NTASKS of the same job step")
        if self.local_rank < 0:
            raise ValueError(f"local_rank={self.local_rank}: must be 0 or more. Take it from SLURM_LOCALID")
        if not self.master_addr or not 0 < self.master_port < 65536:
            raise ValueError(f"{self.master_addr!r}:{self.master_port}: must be a host and a port from 1 to 65535. "
                             "Give rank 0's address and a free port that all ranks know")
