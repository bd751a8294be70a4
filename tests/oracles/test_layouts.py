"""Algorithms that need whole responses, or the whole batch, in every layout of two ranks, against the papers' losses in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.oracles.layout_rank import ALGORITHMS, LAYOUTS
from tests.oracles.whole_case import KIND, PaperTraining, Results, assert_equal, setup, write_behavior
from tests.support.megatron_case import write_model
from tests.wire.gangs import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = write_model(KIND, tmp_path_factory.mktemp("layouts"))
    write_behavior(folder)
    run_ranks("tests.oracles.layout_rank", folder, 2, *LAYOUTS)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Results]:
    return {name: PaperTraining(folder, name, setup(name)).run(folder) for name in ALGORITHMS}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_the_paper_says(folder: Path, expected: dict[str, Results], layout: str, name: str) -> None:
    assert_equal(dict(np.load(folder / f"{layout}.{name}.npz")), expected[name])
