"""Publishing by real ranks: whatever the layout, what all of them serve together is the model, bit for bit; and what happens when one cannot."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import write_model
from tests.wire.gangs import run_ranks
from tests.wire.ranks.publishing_rank import LAYOUTS
from workers.run.folder import RunFolder
from workers.transport.keys import make_keys
from workers.weights.store import NodeStore

MODULE = "tests.wire.ranks.publishing_rank"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind in {kind for kind, _ in LAYOUTS.values()}:
        write_model(kind, tmp_path / kind)
    return tmp_path


def make_runs(folder: Path, *scenarios: str) -> None:
    for scenario in scenarios:
        make_keys(RunFolder.create(folder / scenario))


@pytest.mark.parametrize(("world", "scenarios"), [(1, ["one"]), (2, ["pp2", "tp2", "dp2", "ep2", "tp2ep2", "pp2.disk", "pp2.full"]), (4, ["tp2pp2"])])
def test_what_the_ranks_publish_together_is_the_model(folder: Path, world: int, scenarios: list[str]) -> None:
    make_runs(folder, *scenarios)
    printed = run_ranks(MODULE, folder, world, *scenarios)
    assert [line for line in printed[0].splitlines() if line.startswith("done")] == [f"done {scenario}" for scenario in scenarios]
    left = [RunFolder(folder / scenario).store(where) for scenario in scenarios for where in ("auto", str(folder / "stores"))]
    assert [store for store in left if store.exists()] == [], "the last one that leaves a store removes it"


def test_who_comes_after_a_trainer_that_was_killed_in_mid_publish_cleans_up(folder: Path) -> None:
    make_runs(folder, "one.dies")
    store = NodeStore(RunFolder(folder / "one.dies").store(str(folder / "stores")))  # as a rollout worker of that node does
    run_ranks(MODULE, folder, 1, "one.dies", codes=[-signal.SIGKILL])
    left = {path.name for path in (store.root / "published").iterdir()}
    assert {"1.0", "1.1"} <= left, "whole, and begun"
    run_ranks(MODULE, folder, 1, "one.dies")
    assert store.root.exists() and not list((store.root / "published").iterdir())
    store.leave()
    assert not store.root.exists()
