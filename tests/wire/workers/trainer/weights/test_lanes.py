"""Weights from training ranks to those of a tensor-parallel engine, over gloo: whatever the layouts, each has to the bit what it would keep of the
published version; and an engine rank that dies in the middle leaves training, and the next group, as they were."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import write_model
from tests.wire.gangs import await_ranks, run_ranks, start_rank
from tests.wire.ports import free_port
from tests.wire.ranks.sending_rank import LAYOUTS, TP, WAIT_S


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_engine_rank_has_its_part_of_what_is_published(tmp_path: Path, layout: str) -> None:
    kind, _, world = LAYOUTS[layout]
    write_model(kind, tmp_path / kind)
    scenarios = [f"{layout}.whole", f"{layout}.slices"]
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=WAIT_S))
    logs = [tmp_path / f"engine.{rank}.log" for rank in range(TP)]
    engine = [start_rank("tests.wire.ranks.receiving_rank", log, str(store.port), str(rank), *scenarios) for rank, log in enumerate(logs)]
    printed = run_ranks("tests.wire.ranks.sending_rank", tmp_path, world, str(store.port), *scenarios)
    assert await_ranks(engine, WAIT_S) == [0] * TP, "\n".join(log.read_text() for log in logs)
    assert [line.split()[1] for line in printed[0].splitlines() if line.startswith("done")] == scenarios
    assert all(text.count("not sent:") == 1 for text in printed[1:]), "every rank knows"
