"""Log-probs over a vocabulary that is split over two real processes: as those of one, and so are the gradients."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from tests.wire.gangs import SETTLED_S, await_ranks, start_rank
from tests.wire.ranks.lm_head_rank import CASES

WORLD = 2
Results = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Results], Results]:
    """What the ranks found, and what one process with all rows does."""
    folder = tmp_path_factory.mktemp("lm_head")
    module, logs = "tests.wire.ranks.lm_head_rank", [folder / f"{rank}.log" for rank in range(WORLD)]
    ends = await_ranks([start_rank(module, log, str(folder), str(rank), str(WORLD)) for rank, log in enumerate(logs)], SETTLED_S)
    assert ends == [0] * WORLD, "\n".join(log.read_text() for log in logs)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(WORLD)], dict(np.load(folder / "whole.npz"))


def close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    scale = float(np.abs(expected).max(initial=0.0))
    return found.shape == expected.shape and bool(np.abs(found - expected).max(initial=0.0) <= tolerance * max(1.0, scale))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_what_one_gives(found: tuple[list[Results], Results], name: str) -> None:
    ranks, whole = found
    real, tolerance = CASES[name][3], 1e-6 if CASES[name][-1] == "float32" else 2**-7
    for key in ("logprobs", "entropy"):
        assert np.array_equal(ranks[0][f"{name}:{key}"], ranks[1][f"{name}:{key}"])
        assert close(ranks[0][f"{name}:{key}"], whole[f"{name}:{key}"], 1e-6), key
    weight = np.concatenate([rank[f"{name}:weight"] for rank in ranks])
    assert close(weight[:real], whole[f"{name}:weight"], tolerance)
    assert not weight[real:].any(), "padding has no gradient"
    assert close(ranks[0][f"{name}:hidden"] + ranks[1][f"{name}:hidden"], whole[f"{name}:hidden"], tolerance)
