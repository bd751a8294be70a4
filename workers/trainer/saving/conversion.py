"""A checkpoint as a Hugging Face folder, on one rank: for evaluations of steps that were not exported.

    checkpoints/7.120/trainer/ --dist_checkpointing--> Megatron model --hf_conversion--> FOLDER/, every tensor read again and compared

Called by workers/prepare.py, on CPUs: a login node has no GPU, or a small one. The rank holds the whole training state, optimizer
included: models that need more memory than this machine has are exported by the run itself (trainer.export_every_steps).
"""

from __future__ import annotations

from pathlib import Path

from workers.config import ConfigError, ParallelConfig, load
from workers.config.choices import Device
from workers.model.architecture import ModelError
from workers.run.folder import RunFolder
from workers.run.gpus import set_environment
from workers.trainer.megatron.checkpoint.checkpoint import CheckpointError
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.model.model import DTYPES
from workers.trainer.saving.export_folder import verify, write_model
from workers.weights.manifest import WeightsError


def convert(checkpoint: Path, folder: Path) -> None:
    """Write the model of `checkpoint` (a run's checkpoints/EPOCH.STEP) to `folder`, which must not exist, in the dtype of its training.

    Raises `ModelError` where the checkpoint, or the model that the run began with, is not there or not whole.
    """
    try:
        config = load(RunFolder(checkpoint.parent.parent).config)
        config.trainer.parallel, config.algorithm.kl_weight = ParallelConfig(), 0.0  # no reference model is needed
        config.trainer.device = Device.cpu
        set_environment(config)
        model = Path(config.model.path)
        engine = MegatronEngine(config, model)
        engine.load_state(checkpoint / "trainer")
        digests = write_model(folder, engine.iter_hf_tensors(), model, config.trainer.dtype)
        verify(folder, engine.architecture, DTYPES[config.trainer.dtype], digests)
        engine.close()
    except (CheckpointError, ConfigError, WeightsError, OSError) as error:
        raise ModelError(f"{checkpoint}: cannot be converted to a Hugging Face folder ({error}). Evaluate a step that the run has exported "
                         "(exports/, trainer.export_every_steps), or its final_model") from error
