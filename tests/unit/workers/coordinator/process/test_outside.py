"""What ends or pauses a run from outside of its messages."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.small_run import Prompts, make_config
from workers.config import Bound, ClusterKind
from workers.coordinator.core import Coordinator
from workers.coordinator.process.machine import Machine
from workers.coordinator.process.outside import Outside
from workers.run import incarnations
from workers.run.folder import RunFolder


@pytest.mark.parametrize(("kind", "trained_s", "drained"), [
    (ClusterKind.local, 3600.0, True), (ClusterKind.local, 3000.0, False), (ClusterKind.slurm, 3600.0, True), (ClusterKind.slurm, 3000.0, False)])
async def test_a_run_whose_time_is_up_saves_its_state(tmp_path: Path, kind: ClusterKind, trained_s: float, drained: bool) -> None:
    """On one machine it was killed, and what it had learned since the last checkpoint was lost; on SLURM the spare elements of its array ran on."""
    run, config = RunFolder.create(tmp_path / "run"), make_config(4, 2, Bound.admission, 9)
    config.run.max_hours, config.cluster.kind = 1.0, kind
    now = time.time()
    (run.epochs / "000001").write_bytes(msgspec.json.encode(incarnations.Claim(1, "", "", 0, "node", 1, now - 9000, 0)))
    (run.epochs / "000001.end").write_bytes(msgspec.json.encode(incarnations.End("walltime", "", 5, 5, now - 9000 + trained_s / 2)))
    (run.epochs / "000002").write_bytes(msgspec.json.encode(incarnations.Claim(2, "", "", 0, "node", 1, now - 5000, 5, trained_s / 2)))
    run.status.write_text(json.dumps({"time": now - 5000 + trained_s / 2}))
    epoch = incarnations.claim(run, "", "", 0, "node", 1, 0)
    assert incarnations.claim_of(run, epoch).trained_s == pytest.approx(trained_s), "of one that ended, and of one that was killed"
    machine = Machine(Coordinator(config, Prompts(), epoch, 0.0))
    outside = Outside(run, config, epoch, machine)
    for _ in range(2):
        await asyncio.sleep(0)
        outside.look()
    assert machine.core.drain_reason == ("run.max_hours=1 is used up, and a larger one is needed to go on" if drained else "")
    assert (run.stop_requested() or {"drain": False})["drain"] == drained and machine.core.ended is None
