"""What this rank publishes of every version: its part of the model, with adapters merged; or, with weights.adapter_only, rank 0 all adapters, which
ranks gather as for final_adapter/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from workers.config import Config, Dtype
from workers.model.adapter_shapes import pair_shapes
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.hf_conversion import own_source, sources
from workers.trainer.megatron.parallel import process_group
from workers.weights.layout import ShardFile, lay_out, lay_out_file, small_files
from workers.weights.peft_folder import ADAPTER_CONFIG, ADAPTERS, PREFIX, named, peft_config


class Content(NamedTuple):
    """The `files` and `small` ones, by name, of `source`, None on a rank that publishes nothing; `tensors` gives what is in them, in `dtype`: all
    ranks call it together, and go through to the end."""

    source: int | None
    files: list[ShardFile]
    small: dict[str, bytes]
    dtype: Dtype
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


def content_of(config: Config, engine: MegatronEngine) -> Content:
    """This rank's."""
    model, architecture, lora = Path(config.model.path), engine.architecture, config.trainer.lora
    if config.weights.adapter_only:  # in the dtype that they are trained in: whoever merges them rounds as training would
        shapes, dtype = {PREFIX + name: shape for name, shape in pair_shapes(architecture, lora).items()}, config.trainer.dtype
        return Content(None if process_group.rank() else 0, [lay_out_file(ADAPTERS, 0, shapes, dtype)], {ADAPTER_CONFIG: peft_config(lora, model)},
                       dtype, lambda: named(engine.iter_adapter_tensors()))
    source, dtype = own_source(), config.engine.dtype
    files = lay_out(architecture.tensor_shapes(), dtype, sources(architecture, config.trainer.parallel))
    small = small_files(files, model, dtype) if source == 0 else {}
    return Content(source, [file for file in files if file.source == source], small, dtype, lambda: engine.iter_held_tensors())
