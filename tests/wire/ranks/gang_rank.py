"""One rank of a training element of a whole run, as the tests start it without SLURM: python -m tests.wire.ranks.gang_rank RUN RANK WORLD"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from workers.config import load
from workers.run import incarnations
from workers.run.folder import RunFolder
from workers.slurm.job import SlurmElement
from workers.slurm.signals import Signals
from workers.trainer import follower, ranks
from workers.trainer.coordinator_link.client import CoordinatorLink
from workers.trainer.worker import TrainerWorker


def main() -> None:
    os.umask(0o077)
    path, rank, world = sys.argv[1:]
    run = RunFolder(Path(path))
    config, signals = load(run.config), Signals()
    element = SlurmElement("1", "1_0", "1", 0, int(rank), int(world), int(rank), float("inf"))
    if element.rank > 0:
        print("left:", follower.follow(run, config, element, signals))
        check_threads()
        return
    epoch = incarnations.claim(run, "", "", 0, socket.gethostname(), os.getpid(), 0)
    link = CoordinatorLink(run, config, epoch, None, signals, print)
    gang = ranks.gather(run, config, element, epoch, None)
    ending = TrainerWorker(run, config, link, epoch, None, gang).train()
    print(ending, "coordinator:", link.close())
    check_threads()


def check_threads() -> None:
    """Exit with an error if threads of gloo are left: one that is still busy when the interpreter is taken down aborts the process."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if left := [name for name in names if "gloo" in name]:
        sys.exit(f"rank {sys.argv[2]} leaves threads behind: {left}")


if __name__ == "__main__":
    main()
