"""Experts of a mixture on one rank and on two, over gloo: some with no tokens, some with all, ranks with unequal numbers of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import write_model
from tests.wire.gangs import run_ranks


@pytest.mark.parametrize("world", [1, 2])
def test_outputs_and_gradients_are_those_of_each_experts_formula(tmp_path: Path, world: int) -> None:
    write_model("qwen3moe", tmp_path / "qwen3moe")
    run_ranks("tests.wire.ranks.experts_rank", tmp_path, world)
