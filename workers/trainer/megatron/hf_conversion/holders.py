"""Which training ranks hold which part of the model, by the layout alone. Pure: no torch, no ranks.

    rank = tp + TP * (cp + CP * (dp + DP * pp));  where experts are, = tp + TP * (ep + EP * (dp + DP * pp)), with TP of experts and what is left as DP

That is Megatron-core's order (parallel_state.initialize_model_parallel).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workers.config import ParallelConfig
from workers.messages.broadcasts import Piece
from workers.model.architecture import Architecture
from workers.model.parallel_limits import expert_tensor_parallel
from workers.trainer.megatron.hf_conversion.names import HFTensors, Split, all_hf_tensors, expert_rank_of, share_of, stage_of


@dataclass(frozen=True)
class Shard:
    """What a rank sends at once of the parameter `tensors`: the share number `share`, which it holds, or (None) all of it, which is put together
    on it. `holders`: the ranks that can; `pieces`: in Hugging Face's terms."""

    tensors: HFTensors
    share: int | None
    holders: tuple[int, ...]
    pieces: tuple[Piece, ...]


def shards(architecture: Architecture, parallel: ParallelConfig, num_ranks: int, whole: bool) -> Iterator[Shard]:
    """The model once, in the order of its parameters: whole tensors, or the shares as they are held. `num_ranks` train."""
    shapes = architecture.tensor_shapes()
    for tensors in all_hf_tensors(architecture):
        by_share = _holders(tensors, architecture, parallel, num_ranks)
        if whole or tensors.split is Split.none or len(by_share) == 1:
            pieces = tuple(Piece(name, [0] * len(shapes[name]), list(shapes[name])) for name in tensors.names)
            yield Shard(tensors, None, tuple(sorted(rank for ranks in by_share for rank in ranks)), pieces)
            continue
        for share, ranks in enumerate(by_share):
            places = {name: share_of(shapes[name], tensors.split, share, len(by_share)) for name in tensors.names}
            pieces = tuple(Piece(name, [one.start for one in place], [one.stop - one.start for one in place]) for name, place in places.items())
            if all(pieces[0].shape):  # not of padding alone
                yield Shard(tensors, share, tuple(ranks), pieces)


def _holders(tensors: HFTensors, architecture: Architecture, parallel: ParallelConfig, num_ranks: int) -> list[range]:
    """The ranks that hold each share of `tensors`. With tied embeddings those of the first stage alone: that is the one which is published."""
    per_stage, stage = num_ranks // parallel.pp, stage_of(tensors, architecture.num_layers, parallel.pp, parallel.vpp)
    first = per_stage * stage
    split, step = parallel.tp, parallel.tp
    if tensors.expert is not None:
        split = expert_tensor_parallel(parallel)
        first, step = first + split * expert_rank_of(tensors, architecture, parallel.ep), split * parallel.ep
    return [range(first + share, per_stage * (stage + 1), step) for share in range(split)]
