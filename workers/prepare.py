"""Makes a run ready to be submitted, and refuses what cannot work: `python -m workers.prepare RUN FD`.

    starting model (made on the spot if asked for; of an evaluation also converted from a checkpoint) -> architecture, tensors, tokenizer
    data set -> opened, its prompts measured against the context (of endless ones the first); what was left out is said on standard output
    the user's own functions -> imported, and tried on some of the prompts (trial.py)
    keys     -> made

The launcher runs this as a short process of its own, because it needs packages that the launcher must not import.
What is wrong is written to the file descriptor FD, which nothing of the user's writes to; exit status 2 then. Whatever the user's functions have
started ends with it. `--only-look`: nothing is made that takes time (headway --dry-run). `--no-trial`: the user's functions are only imported.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from workers.config import ClusterKind, Config, ConfigError, DataConfig, Dtype, ModelSource, RoutingShape, Transport, load, require
from workers.data.adapters import ADAPTERS
from workers.data.examples import Examples, end_token
from workers.data.limits import tokens_within
from workers.data.prompt import Prompt, PromptSource
from workers.data.prompts import open_prompts
from workers.model.adapter_shapes import pair_shapes
from workers.model.architecture import Architecture, ModelError, read_architecture
from workers.model.initialize import make_smollm2, make_tiny
from workers.model.parallel_limits import check_training
from workers.model.teacher import check_teacher
from workers.model.tensors import check_tensors
from workers.model.tokenizer import open_tokenizer, text_before
from workers.rollout.workflows.agents.environment_process import bring_tasks
from workers.run import process_tree
from workers.run.checkpoints import TRAINER
from workers.run.files import write_atomic
from workers.run.folder import RunFolder, RunFolderError
from workers.run.processes import adopt_orphans
from workers.tracking.tracker import check_installed
from workers.transport.keys import make_keys
from workers.weights.locations import places

NUM_CHECKED = 512
NUM_VERSIONS = 3
"""As many versions of the weights are there at once, at least."""
MERGED = 2
"""The same of whole ones where only adapters are published (workers/rollout/weights/merging.py)."""


def resolve_model(config: Config, run: RunFolder) -> Path:
    """The folder of the starting model, made now if it is one that is made. Raises `ModelError`."""
    if config.model.source is ModelSource.tiny:
        make_tiny(run.model, config.run.seed)
        return run.model
    folder = Path(config.model.path).expanduser().absolute()
    if config.model.source is ModelSource.smollm2:
        make_smollm2(folder)
    if config.evaluates and is_checkpoint(folder):
        from workers.trainer.saving.conversion import convert  # imports Megatron

        print(f"model: checkpoint {folder} is converted to a Hugging Face folder", flush=True)
        convert(folder, run.model)
        return run.model
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Whether this is a run's checkpoint, and no Hugging Face folder."""
    return (folder / TRAINER).is_dir() and not (folder / "config.json").exists()


def check_model(folder: Path, config: Config) -> Architecture:
    """Check architecture, tensors, split over ranks and context. Raises `ModelError`, `ConfigError`."""
    architecture = read_architecture(folder)
    check_tensors(folder, architecture)
    check_training(architecture, config.trainer)
    require(config.engine.context_length <= architecture.max_positions, "engine.context_length", config.engine.context_length,
            f"must be at most the model's max_position_embeddings={architecture.max_positions} (its sliding_window where that is less)", "Shorten it")
    require(config.replayed is None or architecture.mixture is not None, "algorithm.router_replay", config.algorithm.router_replay.value,
            "must be off with a dense model", "It has no experts to choose among: leave it out")
    longest = config.workflow.group_size * config.engine.context_length * architecture.routing.token_bytes
    require(config.replayed is None or longest <= config.transport.max_message_mb << 20, "transport.max_message_mb", config.transport.max_message_mb,
            f"a group's choices of experts may take {(longest >> 20) + 1} MiB (algorithm.router_replay=rollout)", "Raise it to twice that")
    return architecture


def check_prompts(config: Config, folder: Path, architecture: Architecture) -> list[Prompt]:
    """Settle what prompts begin with, and check that they fit the vocabulary and the context; returns some. Raises `ConfigError`, `ModelError`."""
    tokenizer = open_tokenizer(folder)
    config.data.settle_bos(text_before(tokenizer))
    for text in dict.fromkeys(source.text_before for source in config.data.sources() if source.text_before):
        print(f"data: prompts begin with {text!r} (data.bos)", flush=True)
    source = open_prompts(config.data, config.reward, config.run.seed, folder, responses=config.supervised)
    if config.supervised:
        _check_examples(config, folder, tokenizer, architecture, source)
        return []
    room = config.engine.context_length - config.workflow.max_new_tokens
    prompts = [*([] if config.evaluates else source.preview(NUM_CHECKED)), *source.heldout()]
    for prompt in prompts:
        tokens, number = tokens_within(tokenizer, prompt.text, room)
        if not 1 <= len(tokens) <= room:
            raise ConfigError(f"{prompt.where}: the prompt has {number}; it must have at least 1 and leave room for "
                              f"workflow.max_new_tokens={config.workflow.max_new_tokens} in engine.context_length="
                              f"{config.engine.context_length}. Raise engine.context_length, or leave such prompts out with data.filter=drop and "
                              f"data.max_prompt_tokens={room}")
        _check_vocabulary(tokens, architecture, folder / "tokenizer.json")
    _say(source)
    return prompts


def _check_examples(config: Config, folder: Path, tokenizer: Tokenizer, architecture: Architecture, source: PromptSource) -> None:
    """The same for prompts with the responses that a supervised run learns."""
    examples, limit = Examples(source, tokenizer, end_token(folder, tokenizer)), config.engine.context_length
    for prompt in itertools.chain(source.heldout(), (source.train(index) for index in range(NUM_CHECKED))):
        tokens, number = tokens_within(tokenizer, prompt.text + prompt.response, 2 * limit)
        if len(tokens) > 2 * limit:  # else `problem` counts to the end
            raise ConfigError(f"{prompt.where}: prompt and response have {number}, and engine.context_length={limit}. Raise that, or leave such "
                              "examples out")
        example = examples.of(prompt)
        if problem := example.problem(limit):
            raise ConfigError(f"{prompt.where}: {problem}")
        _check_vocabulary(example.prompt + example.response, architecture, folder / "tokenizer.json")
    _say(source)


def _say(source: PromptSource) -> None:
    for note in source.notes():
        print(f"data: {note}", flush=True)


def _check_vocabulary(tokens: list[int], architecture: Architecture, path: Path) -> None:
    if max(tokens) >= architecture.vocab_size:
        raise ModelError(f"{path}: token {max(tokens)} is outside the model's vocabulary of {architecture.vocab_size}. "
                         "Take tokenizer and model from the same folder")


def check_weights_folder(config: Config, run: RunFolder, architecture: Architecture) -> None:
    """Check that versions can be published, as far as this machine knows: on SLURM nodes have folders of their own. Raises `ConfigError`."""
    store, shared = places(run, config)
    local, disk = config.cluster.kind is ClusterKind.local, config.weights.transport is Transport.disk
    for folder in ([shared] if shared is not None and disk else []) + ([store] if local else []):
        parent = next(parent for parent in folder.parents if parent.exists())
        require(not folder.exists() and os.access(parent, os.W_OK), "weights.dir", config.weights.dir,
                f"{folder} must not exist, and {parent} must be writable", "Choose another weights.dir")
        merges = config.weights.adapter_only and folder == store
        number, shapes, dtype = MERGED if merges else NUM_VERSIONS, architecture.tensor_shapes(), config.engine.dtype
        if config.weights.adapter_only and not merges:
            shapes, dtype = {**pair_shapes(architecture, config.trainer.lora)}, config.trainer.dtype
        size = number * sum(map(math.prod, shapes.values())) * (4 if dtype is Dtype.float32 else 2)
        free = shutil.disk_usage(parent).free
        require(free >= size, "weights.dir", config.weights.dir,
                f"{number} versions of the weights take {size >> 20} MiB in {parent}, where {free >> 20} MiB are free",
                "Free some space there, or choose another weights.dir")


def try_adapters(data: DataConfig) -> None:
    """Try the user's own. Raises `ConfigError`."""
    if any(source.adapter and source.adapter not in ADAPTERS for source in data.sources()):
        from workers.trial import try_adapters  # imports what generates

        try_adapters(data)


def prepare(run: RunFolder, made: bool = True, tried: bool = True) -> None:
    """All of it; the config in the run folder then names the model's folder. `made`: what takes long to make is made, and else said not to have
    been looked at; `tried`: the user's own functions are tried, and not only imported."""
    config = load(run.config)
    config.data.make_absolute()
    check_installed(config.tracking)
    config.reward.settle()
    if config.workflow.env:
        bring_tasks(config, run)
    if not made and not _all_there(config, tried):
        return
    if tried:
        try_adapters(config.data)
    folder = resolve_model(config, run)
    architecture = check_model(folder, config)
    check_teacher(config, folder, architecture)
    require(config.model.vocab_size in (0, architecture.vocab_size), "model.vocab_size", config.model.vocab_size,
            f"is {architecture.vocab_size} of this model", "Leave it out")
    require(config.model.routing in (RoutingShape(), architecture.routing), "model.routing", config.model.routing,
            f"is {architecture.routing} of this model", "Leave it out")
    prompts = check_prompts(config, folder, architecture)
    if not config.supervised:
        from workers.trial import check_functions  # a supervised run needs nothing of what it imports

        check_functions(config, folder, prompts, tried)
    if config.evaluates:
        run.evaluation.mkdir(mode=0o700)
    elif not config.supervised:
        check_weights_folder(config, run, architecture)
    config.model.path, config.model.vocab_size, config.model.routing = str(folder), architecture.vocab_size, architecture.routing
    write_atomic(run.config, msgspec.json.format(msgspec.json.encode(config)))
    make_keys(run)


def _all_there(config: Config, tried: bool) -> bool:
    """Whether all can be looked at without making anything. Says what cannot be, and looks at the data where only the model is missing."""
    model = missing_model(config)
    data = next((path for path in config.data.paths() if not Path(path).exists()), "") if config.cluster.kind is ClusterKind.slurm else ""
    if model:
        print(f"not checked: the model, its memory, and whether prompts fit into it: {model}", flush=True)
    if data:
        print(f"not checked: the prompts, nor the tensors of the model: {data} is not on this machine. It must be where a run is started", flush=True)
    if model and not data:
        if tried:
            try_adapters(config.data)
        if not any(source.chat_template or source.max_prompt_tokens for source in config.data.sources()):
            _say(open_prompts(config.data, config.reward, config.run.seed, responses=config.supervised))
    return not (model or data)


def missing_model(config: Config) -> str:
    """Why the model cannot be looked at without making it; '' if it can. Where a run is started on this machine, its model must be here."""
    folder = Path(config.model.path).expanduser().absolute()
    if config.model.source is ModelSource.smollm2 and not (folder / "config.json").exists():
        return f"it is made in {folder} when a run starts"
    if config.evaluates and is_checkpoint(folder):
        return f"checkpoint {folder} is converted when the evaluation starts"
    for key, path in (("model.path", folder), ("algorithm.teacher", Path(config.algorithm.teacher or folder).expanduser())):
        if config.cluster.kind is ClusterKind.slurm and config.model.source is ModelSource.folder and not path.exists():
            return f"{key}={str(path)!r} is not on this machine. It must be where a run is started"
    return ""


def main(run: Path, answer: int, options: list[str]) -> int:
    """All of it; the exit status."""
    os.set_inheritable(answer, False)
    adopt_orphans()
    try:
        prepare(RunFolder.open(run), "--only-look" not in options, "--no-trial" not in options)
    except (ConfigError, ModelError, RunFolderError) as error:
        os.write(answer, str(error).encode())
        return 2
    finally:
        process_tree.sweep()
    return 0


if __name__ == "__main__":
    os.umask(0o077)
    status = main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    os._exit(status)  # whatever threads the user's modules have left behind
