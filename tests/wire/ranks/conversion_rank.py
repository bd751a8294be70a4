"""One rank of a gang that converts models: python -m tests.wire.ranks.conversion_rank FOLDER RANK WORLD PORT.

In every layout of `LAYOUTS` for this number of ranks, each model in FOLDER that can be split so is loaded and exported again, to rank 0, by
those who publish it and by those who could send it to engines, those with tied embeddings in bfloat16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from workers.config import ConfigError, ParallelConfig, TrainerConfig
from workers.model.architecture import Architecture, read_architecture
from workers.model.parallel_limits import check_parallel
from workers.trainer.megatron.hf_conversion import export, iter_held_tensors, iter_hf_tensors, iter_shards, own_source, pieces_of, sources
from workers.trainer.megatron.hf_conversion.holders import shards
from workers.trainer.megatron.hf_conversion.names import all_hf_tensors
from workers.trainer.megatron.model.model import build_model
from workers.trainer.megatron.parallel import collectives, cpu_backend, process_group
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.megatron.trained_model import in_dtype

LAYOUTS = {
    2: [ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(cp=2), ParallelConfig(ep=2), ParallelConfig(tp=2, ep=2),
        ParallelConfig(pp=2, vpp=2)],
    4: [ParallelConfig(tp=2, pp=2), ParallelConfig(tp=2), ParallelConfig(tp=2, ep=2), ParallelConfig(pp=2, ep=2), ParallelConfig(tp=2, ep=4),
        ParallelConfig(tp=2, pp=2, ep=2)],
}


def check_own(model: Any, architecture: Architecture, stored: dict[str, torch.Tensor]) -> None:
    """What the round trip does not show: the padding, and the second copy of a tied embedding."""
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    padded = architecture.padded_vocab_size(tp)
    names = {"embedding": "model.embed_tokens.weight", "output_layer": "model.embed_tokens.weight" if architecture.tied else "lm_head.weight"}
    for part, name in names.items():
        weight = next((value for piece in pieces_of(model) for key, value in piece.named_parameters() if key.startswith(part)), None)
        if weight is not None:
            whole = torch.cat([stored[name], torch.zeros(padded - architecture.vocab_size, architecture.hidden_size, dtype=weight.dtype)])
            assert torch.equal(weight, whole.chunk(tp)[rank]), part


def check_held(model: Any, architecture: Architecture, parallel: ParallelConfig, stored: dict[str, torch.Tensor]) -> None:
    """Every tensor comes on the rank that it is said to come on, and there only."""
    owners, own = sources(architecture, parallel), own_source()
    assert list(owners) == list(architecture.tensor_shapes())
    held = {name: tensor.clone() for name, tensor in iter_held_tensors(model, architecture)}
    assert held.keys() == {name for name, source in owners.items() if source == own}
    assert [name for name, tensor in held.items() if not torch.equal(tensor, stored[name])] == []
    assert collectives.sum_over_ranks(np.array([len(held), own is not None])).tolist() == [len(stored), parallel.pp * parallel.ep]
    assert own == 0 or process_group.rank() != 0


def check_shards(model: Any, architecture: Architecture, parallel: ParallelConfig, stored: dict[str, torch.Tensor]) -> None:
    """Each of those that are said to hold a shard can send it, whole tensors or slices, and nobody else is given anything."""
    for whole in (True, False):
        sending = [(shard, source) for shard in shards(architecture, parallel, process_group.world_size(), whole) for source in shard.holders]
        for (shard, source), tensors in zip(sending, iter_shards(model, architecture, sending), strict=True):
            assert len(tensors) == (len(shard.pieces) if source == process_group.rank() else 0)
            for tensor, piece in zip(tensors, shard.pieces, strict=False):
                where = tuple(slice(start, start + size) for start, size in zip(piece.starts, piece.shape, strict=True))
                assert torch.equal(tensor, stored[piece.name][where]), (piece, source)


def round_trip(folder: Path, parallel: ParallelConfig) -> None:
    architecture = read_architecture(folder)
    dtype = torch.bfloat16 if architecture.tied else torch.float32
    with cpu_backend.redirected():
        model = build_model(architecture, folder, dtype, 1.0, TrainerConfig(parallel=parallel))
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    stored = {name: tensor.to(dtype) for name, tensor in found.items() if name not in architecture.frozen_shapes()}
    for name, bias in [buffer for piece in pieces_of(model) for buffer in in_dtype(piece, dtype).named_buffers()]:
        if name.endswith("router.expert_bias"):
            assert any(torch.equal(bias, found[frozen]) for frozen in architecture.frozen_shapes()), "in float32, whatever the model is in"
    check_own(model, architecture, stored)
    check_held(model, architecture, parallel, stored)
    check_shards(model, architecture, parallel, stored)
    exported = list(iter_hf_tensors(model, architecture))
    if process_group.rank():
        assert exported == []
        return
    assert [name for name, _ in exported] == [name for tensors in all_hf_tensors(architecture) for name in tensors.names]
    assert {name for name, _ in exported} == stored.keys()
    assert [name for name, tensor in exported if not torch.equal(tensor, stored[name])] == []


def main() -> None:
    folder, rank, world, port = sys.argv[1:]
    torch.set_num_threads(1)
    gang = Gang(int(rank), int(world), local_rank=int(rank), master_addr="127.0.0.1", master_port=int(port), interface="lo")
    export.PIECE_BYTES = 1000  # so that everything comes in several pieces
    for parallel in LAYOUTS[int(world)]:
        process_group.initialize(gang, parallel)
        for model in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
            try:
                check_parallel(read_architecture(model), parallel)
            except ConfigError as error:
                assert "has no experts" in str(error) or parallel.vpp > 1, error
            else:
                round_trip(model, parallel)
                print(f"{model.name} tp={parallel.tp} pp={parallel.pp} vpp={parallel.vpp} cp={parallel.cp} ep={parallel.ep}")
        parallel_state.destroy_model_parallel()
    process_group.close()


if __name__ == "__main__":
    main()
