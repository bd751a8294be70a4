"""The trainer's state in a folder: saved and restored with Megatron's dist_checkpointing, in its torch_dist format.

    model (sharded)        weights that are trained, in the parameters' dtype     __R_0.distcp, written by rank R
    optimizer (sharded)    Adam's moments, float32 weights where the model's      .metadata: which tensor lies where
                           are not                                                (optimizer_shards.py, state_copy.py)
    common                 Adam's step, position in the schedule, RNG states      common.pt
    state.json             model it belongs to; size and BLAKE3 digest of every file above; written last

Every rank calls `save` or `begin`, `check` and `load`. Tensors carry their place in the whole, so a folder is loaded by any number of
ranks in any layout. Hyper-parameters are not part of the state: after a load they are those of the config, only positions are
restored. The schedule is a function of its position. All ranks go on with rank 0's RNG states, from which nothing is drawn.

Training may go on while a state is written: `begin` copies it, `Saving.write` may run in a thread, and uses no collective.

Nothing in a folder is unpickled before its digests have been found right. The folder must be private all the same.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from workers.run.checkpoints import retried
from workers.run.digests import digest_file
from workers.run.files import sync, write_atomic
from workers.trainer.megatron.checkpoint.state_copy import Shard, WrittenPart, capture, write_index, write_part
from workers.trainer.megatron.checkpoint.training_state import TrainingState
from workers.trainer.megatron.parallel import collectives, cpu_backend, process_group
from workers.trainer.megatron.parallel.mailbox import Mailbox, MailboxError

STATE_FILE = "state.json"
FORMAT = 2
BROKEN = "is broken, "
WRITE_S = process_group.COLLECTIVE_TIMEOUT_S / 2  # ranks that have written wait for it in a collective
# What reading and writing raises; torch's CheckpointException is no Exception but a BaseException.
_FAILURES = (CheckpointingException, CheckpointException, MailboxError, OSError, RuntimeError, ValueError, KeyError)


class CheckpointError(RuntimeError):
    """A folder that state cannot be saved to or loaded from. Its text names the folder, the rule and the remedy."""


class BrokenState(CheckpointError):
    """One whose files can be read, and are not what was written."""


class StateFile(msgspec.Struct, forbid_unknown_fields=True):
    """state.json: `model` names what the state is of, `files` gives (bytes, BLAKE3 digest in hex) by file name."""

    format: int
    model: dict[str, Any]
    files: dict[str, tuple[int, str]]


class Saving:
    """A state that is to be written into a folder, as it was when this was made; see `begin`."""

    def __init__(self, folder: Path, shards: list[Shard], common: dict[str, Any], model: dict[str, Any]) -> None:
        self._folder, self._shards, self._common, self._model = folder, shards, common, model
        self._rank, self._mailbox = process_group.rank(), Mailbox()

    def write(self) -> dict[str, tuple[int, str]]:
        """Write this rank's part and bring it to disk; on rank 0 wait for the others' and complete the folder. Uses no collective.

        Returns (bytes, BLAKE3 digest) by file name, of all files on rank 0, of none elsewhere. Raises CheckpointError where writing
        fails, on rank 0 also for the others; what lies in the folder is then no state.
        """
        try:
            part = write_part(self._folder, self._rank, self._shards)
        except _FAILURES as error:
            part = WrittenPart(problem=_cause(error))
        self._shards = []
        self._mailbox.post(msgspec.msgpack.encode(part))
        if self._rank:
            self._raise_for([part])
            return {}
        try:
            parts = [msgspec.msgpack.decode(content, type=WrittenPart) for content in self._mailbox.collect(WRITE_S)]
            self._raise_for(parts)
            write_index(self._folder, parts, self._common)
            return _seal(self._folder, self._model, parts)
        except _FAILURES as error:
            raise error if isinstance(error, CheckpointError) else self._error(_cause(error)) from error

    def _raise_for(self, parts: list[WrittenPart]) -> None:
        for rank, part in enumerate(parts):
            if part.problem:
                raise self._error(f"rank {rank or self._rank}: {part.problem}")

    def _error(self, cause: str) -> CheckpointError:
        return CheckpointError(f"{self._folder}: the state could not be written ({cause}). Free space, or check the file system, and save "
                               "into an empty folder")


def begin(folder: Path, state: TrainingState, copy: bool = True) -> Saving:
    """Take `state` as it is now, to be written into `folder` (there, empty, private). All ranks call this together, and each writes.

    Unless `copy`, the tensors are the live ones: they must not change before they are written. The copies lie in the host's memory.
    Raises CheckpointError on all ranks where the folder cannot be used, or a copy cannot be made.
    """
    reason, shards = _unusable(folder) if process_group.rank() == 0 else "", []
    try:
        with cpu_backend.redirected():
            shards = capture(state.tensors(loading=False), copy)
    except _FAILURES as error:
        reason = reason or f"{folder}: the state could not be copied ({_cause(error)}). Set checkpoint.background=false to save without a copy"
    _agree(reason)
    return Saving(folder, shards, state.common(), state.identity())


def save(folder: Path, state: TrainingState) -> dict[str, tuple[int, str]]:
    """Write `state` into `folder` (there, empty, private) and return when it is on disk, as `Saving.write`. All ranks call this together.

    Raises CheckpointError on all ranks where the folder cannot be used or writing fails; what lies there is then no
    state: `load` refuses it, as state.json is missing.
    """
    saving, files, reason = begin(folder, state, copy=False), {}, ""
    try:
        files = saving.write()
    except CheckpointError as error:
        reason = str(error)
    _agree(reason)
    return files


def check(folder: Path, state: TrainingState) -> None:
    """Read the whole folder and raise CheckpointError, on all ranks, unless `load` can restore `state` from it.

    It cannot where the folder is missing, holds another model's state, or, `BrokenState`, where it is incomplete or changed since it was written.
    """
    if agreed := collectives.first_text(_why_not(folder, state.identity())):
        raise (BrokenState if agreed.startswith(f"{folder}: {BROKEN}") else CheckpointError)(agreed)


def load(folder: Path, state: TrainingState) -> None:
    """Read what was saved, and `check` has passed, into `state`'s objects. All ranks call both together.

    Raises CheckpointError, on all ranks, where reading fails; the objects are then partly loaded.
    """
    reason = ""
    try:
        with cpu_backend.redirected(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Megatron reads through an older name of torch's load
            state.restore(dist_checkpointing.load(state.tensors(loading=True), str(folder)))
    except _FAILURES as error:
        reason = f"{folder}: the state could not be read ({_cause(error)}). Check the file system, or resume from an older checkpoint"
    _agree(reason)


def _unusable(folder: Path) -> str:
    """Why nothing can be saved to `folder`, '' where it can."""
    try:
        if not folder.is_dir():
            return f"{folder}: is no folder, state is saved into one that is there and empty. Make it first"
        if any(folder.iterdir()):
            return f"{folder}: holds files already, state is saved into an empty folder. Give a new one"
    except OSError as error:  # told to all ranks: the others wait for what this one says
        return f"{folder}: cannot be read ({error.strerror}). Save again when it can be"
    return ""


def _seal(folder: Path, model: dict[str, Any], parts: list[WrittenPart]) -> dict[str, tuple[int, str]]:
    """Bring every file to disk, then record them all in state.json; the ranks' own are there and hashed already."""
    files = {part.file: (part.size, part.digest) for part in parts}
    for path in folder.iterdir():
        if path.name not in files:
            sync(path)
            files[path.name] = (path.stat().st_size, digest_file(path))
    write_atomic(folder / STATE_FILE, msgspec.json.encode(StateFile(FORMAT, model, dict(sorted(files.items())))))
    sync(folder)
    return files


def _why_not(folder: Path, model: dict[str, Any]) -> str:
    """Why the state in `folder` cannot be loaded, '' where it can. The files are divided among the ranks."""
    remedy = "Resume from an older checkpoint"
    try:
        saved = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=StateFile)
    except OSError as error:
        return f"{folder}: holds no complete state, {STATE_FILE} cannot be read ({error.strerror}). {remedy}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"{folder}: {BROKEN}{STATE_FILE} cannot be read ({error}). {remedy}"
    if saved.format != FORMAT:
        return f"{folder}: has format {saved.format}, this version reads {FORMAT}. Resume with the version that wrote it"
    different = sorted(name for name in model.keys() | saved.model.keys() if model.get(name) != saved.model.get(name))
    if different:
        values = ", ".join(f"{name} {saved.model.get(name)} (here {model.get(name)})" for name in different)
        return (f"{folder}: is the state of another model: {values}. Resume with the model and trainer.dtype that it was saved with, and with "
                "a critic (algorithm.advantage=gae) and adapters (trainer.lora) where it has them")
    for name, (size, digest) in sorted(saved.files.items())[process_group.rank()::process_group.world_size()]:
        try:
            problem = retried(partial(_difference, folder / Path(name).name, size, digest))
        except OSError as error:  # of this node, perhaps: that the file is broken is not known
            return f"{folder}: {name} cannot be read ({error.strerror}). {remedy}"
        if problem:
            return f"{folder}: {BROKEN}{name} {problem}. {remedy}"
    return ""


def _difference(path: Path, size: int, digest: str) -> str:
    """What a file is that is not as it was written, '' where it is. Raises OSError where it cannot be read now."""
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found} bytes instead of {size}"
        return "" if digest_file(path) == digest else f"does not have the digest in {STATE_FILE}"
    except FileNotFoundError:
        return "is not there"


def _cause(error: BaseException) -> str:
    """One line for `error`; torch's CheckpointException holds those of the ranks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_cause(failure[0])}" for rank, failure in sorted(error.failures.items()))
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _agree(reason: str) -> None:
    """Raise CheckpointError on all ranks where any has a reason to: that of the lowest rank that has one."""
    agreed = collectives.first_text(reason)
    if agreed:
        raise CheckpointError(agreed)
