"""Hugging Face tensors <-> Megatron-core parameters, for all models of workers/model/architecture.py and all layouts of ranks.

    safetensors --slices of this rank's part--> join --> parameters         load.py
    parameters of all ranks --gathered, one at a time, on rank 0--> separate --> Hugging Face tensors     export.py
    parameters of a stage --gathered over tensor parallelism only--> separate --> those that this rank publishes, or sends to engines

Megatron-core keeps query, key and value of each key/value head next to each other in one matrix, and gate and up projections one
after the other; all else is a change of names and a split over ranks. Both directions only move numbers, so a round trip is exact to
the bit, over any two layouts.
"""

from workers.trainer.megatron.hf_conversion.export import (
    ExportError,
    iter_held_tensors,
    iter_hf_tensors,
    iter_other_tensors,
    iter_shards,
    own_source,
)
from workers.trainer.megatron.hf_conversion.holders import Shard
from workers.trainer.megatron.hf_conversion.load import load_hf
from workers.trainer.megatron.hf_conversion.names import sources
from workers.trainer.megatron.hf_conversion.shards import pieces_of

__all__ = ["ExportError", "Shard", "iter_held_tensors", "iter_hf_tensors", "iter_other_tensors", "iter_shards", "load_hf", "own_source", "pieces_of",
           "sources"]
