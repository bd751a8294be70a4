"""Models of every family, loaded by several ranks that share them and exported again, in real processes over gloo: the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.model_folders import FAMILIES, write_random_model
from tests.wire.gangs import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All families, tied and not, in two files each; 53 tokens are no multiple of any number of ranks."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        for tied in (True, False):
            write_random_model(folder / f"{family}{'-tied' if tied else ''}", family, files=2, tie_word_embeddings=tied, vocab_size=53,
                               num_hidden_layers=4)
    return folder


@pytest.mark.parametrize(("world", "dense", "mixtures"), [(2, 4, 6), pytest.param(4, 2, 6, marks=pytest.mark.long)])
def test_every_layout_loads_and_exports_every_model(folder: Path, world: int, dense: int, mixtures: int) -> None:
    logs = run_ranks("tests.wire.ranks.conversion_rank", folder, world)
    converted = [line for line in logs[0].splitlines() if " ep=" in line]
    assert len(converted) == 2 * (4 * dense + 3 * mixtures), logs[0]
