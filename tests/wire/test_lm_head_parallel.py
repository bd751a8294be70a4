"""Log-probs over a vocabulary that is split over two real processes: as those of one, and so are the gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from tests.wire.lm_head_rank import CASES

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
Results = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Results], Results]:
    """What the ranks found, and what one process with all rows does."""
    folder = tmp_path_factory.mktemp("lm_head")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen([sys.executable, "-m", "tests.wire.lm_head_rank", str(folder), str(rank), str(WORLD)],
                                  cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for rank in range(WORLD)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * WORLD, "\n".join(outputs)
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
