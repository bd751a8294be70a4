"""A rank of a tensor-parallel engine: python -m tests.wire.ranks.receiving_rank STORE_PORT RANK SCENARIO...

It joins lanes and takes buckets as SGLang's ranks do, keeps its part as they do, and compares that with the same part of what is published
(sending_rank.py). In the first turn of "slices" the last rank dies in the middle.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.wire.ranks.sending_rank import TP, WAIT_S
from workers.messages.broadcasts import Bucket, UpdateGroupOpened, lane_name
from workers.weights.update_group import BroadcastGroup, GroupError, store_at

COLUMNS = ("o_proj.weight", "down_proj.weight")


def part(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """What rank `rank` of `TP` keeps: rows or columns of matrices, heads of keys and values that several ranks share, whole experts."""
    if ".experts." in name:
        return tensor if int(name.split(".experts.")[1].split(".")[0]) * TP // 4 == rank else None
    if (tensor.dim() == 1 and "_proj" not in name) or "mlp.gate." in name:
        return tensor
    if "k_proj" in name or "v_proj" in name:  # two heads for four ranks
        return tensor.chunk(2)[rank // 2]
    dim = 1 if name.endswith(COLUMNS) else 0
    size = -(-tensor.shape[dim] // TP)
    return tensor.narrow(dim, min(rank * size, tensor.shape[dim]), max(0, min(size, tensor.shape[dim] - rank * size)))


def receive(groups: list[BroadcastGroup], buckets: list[Bucket], shapes: dict[str, torch.Size], dies: bool) -> dict[str, torch.Tensor]:
    found = {name: torch.full(shape, torch.nan, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for number, bucket in enumerate(buckets):
        if dies and number == len(buckets) // 2:
            os._exit(0)
        sizes = [torch.Size(piece.shape).numel() for piece in bucket.pieces]
        flat = torch.empty(sum(sizes), dtype=torch.bfloat16)
        groups[bucket.lane].broadcast([flat.view(torch.uint8)])
        for piece, values in zip(bucket.pieces, flat.split(sizes), strict=True):
            where = tuple(slice(start, start + size) for start, size in zip(piece.starts, piece.shape, strict=True))
            assert found[piece.name][where].isnan().all(), f"{piece.name} has come twice"
            found[piece.name][where] = values.view(piece.shape)
    return found


def take(store: dist.Store, turn: str, rank: int, dies: bool) -> None:
    opened = msgspec.msgpack.decode(store.get(f"{turn}/opened").decode("utf8").encode("latin1"), type=UpdateGroupOpened)
    lanes = range(1 + max(bucket.lane for bucket in opened.buckets))
    groups = [BroadcastGroup(opened.address, opened.port, 1 + rank, 1 + TP, lane_name(opened.group, lane), "gloo", WAIT_S) for lane in lanes]
    folder = Path(store.get(f"{turn}/published").decode())
    published = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    try:
        found = receive(groups, opened.buckets, {name: tensor.shape for name, tensor in published.items()}, dies and rank == TP - 1)
    except GroupError as error:
        assert dies, error
        print("in the middle:", error)
    else:
        for name, tensor in published.items():
            own, expected = part(name, found[name], rank), part(name, tensor, rank)
            assert (own is None) == (expected is None) and (own is None or expected is None or torch.equal(own, expected)), name
        store.set(f"{turn}/{rank}", "same")
    for group in groups:
        group.close()


def main() -> None:
    port, rank, *scenarios = sys.argv[1:]
    torch.set_num_threads(1)
    store = store_at("127.0.0.1", int(port), WAIT_S)
    for scenario in scenarios:
        for step in range(2):
            dies = scenario.endswith("slices") and step == 0
            if dies and int(rank) == TP - 1 and os.fork() > 0:  # the one that dies is a copy
                os.wait()
                continue
            take(store, f"{scenario}/{step}", int(rank), dies)


if __name__ == "__main__":
    main()
