"""A coordinator that does not keep up slows a run down, and loses nothing: many workers' sockets, a process that stands still."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.control_plane.both_sides import make_run, start_coordinator
from benchmarks.control_plane.figures import Load
from benchmarks.control_plane.fleet import Fleet
from workers.coordinator.process.replay_run import audit

LOAD = Load(workers=300, leases_each=2, rate=60.0, samples=2, tokens=20, batch_groups=16)
STANDS_STILL_S, LIMIT_S = 30.0, 120.0


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_while_it_stands_still_for_half_a_minute_nothing_that_is_finished_is_refused_or_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path, LOAD)
    coordinator = start_coordinator(run)
    fleet = Fleet(run, LOAD)
    seen = fleet.seen
    playing = threading.Thread(target=fleet.play, args=(math.inf,))
    try:
        playing.start()
        wait_until(lambda: len(seen.acknowledged_s) >= 100)
        os.kill(coordinator.pid, signal.SIGSTOP)
        before, steps = len(seen.acknowledged_s), seen.num_steps
        time.sleep(STANDS_STILL_S)
        os.kill(coordinator.pid, signal.SIGCONT)
        wait_until(lambda: len(seen.acknowledged_s) >= before + LOAD.workers * LOAD.leases_each and seen.num_steps >= steps + 30)
    finally:
        fleet.over.set()
        playing.join()
        fleet.close()
        coordinator.kill()
        coordinator.wait()
    assert seen.num_refused == 0 and max(seen.acknowledged_s) > STANDS_STILL_S / 2, "what was finished meanwhile was taken"
    replayed = audit(run)
    assert replayed.sound, (replayed.difference, replayed.findings)
