"""The trainer's state in a folder: saved and restored with Megatron's dist_checkpointing, in its torch_dist format.

    model (sharded)        weights in the parameters' dtype                       __R_0.distcp, written by rank R
    optimizer (sharded)    float32 master weights, Adam's moments                 .metadata: which tensor lies where
    common                 Adam's step, position in the schedule, RNG states      common.pt
    state.json             model it belongs to; size and BLAKE3 digest of every file above; written last

Every rank calls `save`, `check` and `load`. Sharded tensors carry their place in the whole, so a folder is loaded by any number of
ranks. Hyper-parameters are not part of the state: after a load they are those of the config, only positions are restored.
The schedule is a function of its position. All ranks go on with rank 0's RNG states, as data-parallel ranks do.

Nothing in a folder is unpickled before its digests have been found right. The folder must be private all the same.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint import save as save_dcp

from workers.files import write_atomic
from workers.trainer.megatron import cpu_backend, process_group
from workers.weights.architecture import Architecture

STATE_FILE = "state.json"
FORMAT = 1
_READ_BYTES = 8 * 2**20
# What reading and writing raises; torch's CheckpointException is no Exception but a BaseException.
_FAILURES = (CheckpointingException, CheckpointException, OSError, RuntimeError, ValueError, KeyError)


class CheckpointError(RuntimeError):
    """A folder that state cannot be saved to or loaded from. Its text names the folder, the rule and the remedy."""


class StateFile(msgspec.Struct, forbid_unknown_fields=True):
    """state.json: `model` names what the state is of, `files` gives (bytes, BLAKE3 digest in hex) by file name."""

    format: int
    model: dict[str, Any]
    files: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class TrainingState:
    """The objects that hold the trainer's state, and the model's `architecture` and `dtype` to recognise it by."""

    model: Any
    optimizer: Any
    scheduler: Any
    architecture: Architecture
    dtype: torch.dtype

    def identity(self) -> dict[str, Any]:
        """What a saved state must agree with, in the types of JSON."""
        own = {name: value for name, value in asdict(self.architecture).items() if name != "eos_token_ids"}
        return msgspec.json.decode(msgspec.json.encode(own | {"dtype": str(self.dtype).removeprefix("torch.")}))

    def sharded(self) -> dict[str, Any]:
        """The state in Megatron's sharded form; its tensors share memory with the model's and the optimizer's."""
        model = self.model.sharded_state_dict()
        # is_loading: Adam's moments are made at the first update; asked for here, they are zeros until then.
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=True)
        return {"model": model, "optimizer": optimizer, "num_steps": self.scheduler.num_steps, "rng": _rng_states()}

    def restore(self, loaded: dict[str, Any]) -> None:
        """Put back what `sharded` gave, after it was read into `loaded`."""
        own = [{name: value for name, value in group.items() if name not in ("params", "step")} for group in self.optimizer.param_groups]
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        for group, values in zip(self.optimizer.param_groups, own, strict=True):
            group.update(values)
        self.scheduler.num_steps = loaded["num_steps"]
        self.scheduler.step(0)
        _set_rng_states(loaded["rng"])


def save(folder: Path, state: TrainingState) -> None:
    """Write `state` into `folder` (there, empty, private) and return when it is on disk. All ranks call this together.

    Raises CheckpointError on all ranks where the folder cannot be used or writing fails; what lies there is then no
    state: `load` refuses it, as state.json is missing.
    """
    _agree(_unusable(folder) if process_group.rank() == 0 else "")
    reason = ""
    try:
        with cpu_backend.redirected():
            dist_checkpointing.save(state.sharded(), str(folder), _InThisProcess("torch_dist", 1),
                                    preprocess_common_before_consistancy_check=_same_on_all_ranks)
        if process_group.rank() == 0:
            _seal(folder, state.identity())
    except _FAILURES as error:
        reason = f"{folder}: the state could not be written ({_cause(error)}). Free space, or check the file system, and save into an empty folder"
    _agree(reason)


def check(folder: Path, state: TrainingState) -> None:
    """Read the whole folder and raise CheckpointError, on all ranks, unless `load` can restore `state` from it.

    It cannot where the folder is missing, incomplete, changed since it was written, or holds another model's state.
    """
    _agree(_why_not(folder, state.identity()))


def load(folder: Path, state: TrainingState) -> None:
    """Read what `save` wrote, and `check` has passed, into `state`'s objects. All ranks call both together.

    Raises CheckpointError, on all ranks, where reading fails; the objects are then partly loaded.
    """
    reason = ""
    try:
        with cpu_backend.redirected(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Megatron reads through an older name of torch's load
            state.restore(dist_checkpointing.load(state.sharded(), str(folder)))
    except _FAILURES as error:
        reason = f"{folder}: the state could not be read ({_cause(error)}). Check the file system, or resume from an older checkpoint"
    _agree(reason)


class _InThisProcess(SaveShardedStrategy):
    """Writes what Megatron's torch_dist strategy writes, from this process, through torch's synchronous writer.

    Megatron's own has a manager process started and forks its writers, beside the threads of gloo and CUDA.
    """

    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        save_dcp(
            mcore_to_pyt_state_dict(tensors, is_loading=False),
            storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _same_on_all_ranks(common: dict[str, Any]) -> dict[str, Any]:
    """What Megatron compares between the ranks: nothing here draws from torch's generators, so their seeds may differ."""
    return {name: value for name, value in common.items() if name != "rng"}


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_rng_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["tracker"]:
        get_cuda_rng_tracker().set_states(states["tracker"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _unusable(folder: Path) -> str:
    """Why nothing can be saved to `folder`, '' where it can."""
    if not folder.is_dir():
        return f"{folder}: is no folder, state is saved into one that is there and empty. Make it first"
    if any(folder.iterdir()):
        return f"{folder}: holds files already, state is saved into an empty folder. Give a new one"
    return ""


def _seal(folder: Path, model: dict[str, Any]) -> None:
    """Bring every file to disk, then record them all in state.json."""
    files = {path.name: (path.stat().st_size, _digest(path, sync=True)) for path in sorted(folder.iterdir())}
    write_atomic(folder / STATE_FILE, msgspec.json.encode(StateFile(FORMAT, model, files)))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path, sync: bool = False) -> str:
    digest = blake3()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _why_not(folder: Path, model: dict[str, Any]) -> str:
    """Why the state in `folder` cannot be loaded, '' where it can. The files are divided among the ranks."""
    remedy = "Resume from an older checkpoint"
    try:
        saved = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=StateFile)
    except OSError as error:
        return f"{folder}: holds no complete state, {STATE_FILE} cannot be read ({error.strerror}). {remedy}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"{folder}: {STATE_FILE} is broken ({error}). {remedy}"
    if saved.format != FORMAT:
        return f"{folder}: has format {saved.format}, this version reads {FORMAT}. Resume with the version that wrote it"
    different = sorted(name for name in model.keys() | saved.model.keys() if model.get(name) != saved.model.get(name))
    if different:
        values = ", ".join(f"{name} {saved.model.get(name)} (here {model.get(name)})" for name in different)
        return f"{folder}: is the state of another model: {values}. Resume with the model and trainer.dtype that it was saved with"
    for name, (size, digest) in sorted(saved.files.items())[process_group.rank()::process_group.world_size()]:
        path = folder / Path(name).name
        try:
            found = path.stat().st_size
            right = found == size and _digest(path) == digest
        except OSError as error:
            return f"{folder}: is incomplete, {name} cannot be read ({error.strerror}). {remedy}"
        if not right:
            what = f"has {found} bytes instead of {size}" if found != size else "does not have the digest in " + STATE_FILE
            return f"{folder}: is broken, {name} {what}. {remedy}"
    return ""


def _cause(error: BaseException) -> str:
    """One line for `error`; torch's CheckpointException holds those of the ranks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_cause(failure[0])}" for rank, failure in sorted(error.failures.items()))
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _agree(reason: str) -> None:
    """Raise CheckpointError on all ranks where any has a reason to: that of the lowest rank that has one."""
    agreed = process_group.first_text(reason)
    if agreed:
        raise CheckpointError(agreed)
