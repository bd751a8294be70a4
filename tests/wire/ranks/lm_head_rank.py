"""One tensor-parallel rank, as the test starts it: python -m tests.wire.ranks.lm_head_rank FOLDER RANK WORLD.

Its shard's log-probs, entropies and gradients go to FOLDER/RANK.npz, those of the whole vocabulary, from the same function
without a shard, to FOLDER/whole.npz.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from workers.trainer.megatron.model.lm_head import VocabularyShard, token_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# positions, tokens, hidden, real ids, rows of all ranks, positions in a chunk, gradient buffer, dtype
CASES = {
    "one chunk": (9, 20, 8, 32, 32, 100, True, "float32"),
    "chunks": (23, 40, 8, 32, 32, 5, True, "float32"),
    "padded": (23, 40, 8, 27, 32, 5, False, "float32"),
    "a rank of padding": (7, 9, 8, 5, 64, 3, True, "float32"),
    "a rank of padding, one chunk": (7, 9, 8, 5, 64, 100, False, "float32"),
    "nothing predicted": (5, 0, 8, 32, 32, 2, True, "float32"),
    "no position": (0, 0, 8, 32, 32, 2, False, "float32"),
    "far apart": (9, 20, 8, 30, 32, 4, True, "float32"),
    "bfloat16": (23, 40, 8, 27, 32, 5, True, "bfloat16"),
    "entropy, one chunk": (9, 20, 8, 32, 32, 100, True, "float32"),
    "entropy, padded": (23, 40, 8, 27, 32, 5, False, "float32"),
    "entropy, a rank of padding": (7, 9, 8, 5, 64, 3, True, "float32"),
    "entropy, far apart": (9, 20, 8, 30, 32, 4, True, "float32"),
    "entropy, no position": (0, 0, 8, 32, 32, 2, False, "float32"),
    "entropy, bfloat16": (23, 40, 8, 27, 32, 5, True, "bfloat16"),
}


def results(name: str, rank: int, world: int, vocab: bool) -> dict[str, np.ndarray]:
    """Everything that comes out of one case, on this rank's rows, or on all of the real ones."""
    positions, tokens, size, real, rows, chunk, buffer, dtype = CASES[name]
    torch.manual_seed(len(name))
    hidden = torch.randn(positions, size).to(DTYPES[dtype]).requires_grad_()
    whole = torch.randn(rows, size)
    if name.endswith("far apart"):
        whole[rows // 2:] *= 30
    index, targets, slopes = torch.randint(0, max(1, positions), (tokens,)), torch.randint(0, real, (tokens,)), torch.randn(tokens)
    own = slice(rank * rows // world, (rank + 1) * rows // world) if vocab else slice(0, real)
    weight = whole[own].to(DTYPES[dtype]).requires_grad_()
    if buffer:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    shard = VocabularyShard(dist.group.WORLD, own.start, real) if vocab else None
    with_entropy = name.startswith("entropy")
    logprobs, entropy = token_logprobs(hidden, weight, index, targets, 0.7, shard, 4 * chunk * weight.shape[0], with_entropy)
    ((logprobs * slopes).sum() + ((entropy * slopes.flip(0)).sum() if with_entropy else 0.0)).backward()
    gradient: Tensor | None = weight.main_grad if buffer else weight.grad  # type: ignore[attr-defined]
    assert gradient is not None and hidden.grad is not None and (not buffer or weight.grad._nnz() == 0)
    found = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "hidden": hidden.grad.float(), "weight": gradient.float()}
    return {f"{name}:{key}": value.numpy() for key, value in found.items()}


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = {key: value for name in CASES for key, value in results(name, rank, world, vocab=True).items()}
    np.savez(folder / f"{rank}.npz", **found)
    if rank == 0:
        np.savez(folder / "whole.npz", **{key: value for name in CASES for key, value in results(name, 0, 1, vocab=False).items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
