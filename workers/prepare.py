"""Makes a run ready to be submitted, and refuses what cannot work: `python -m workers.prepare RUN`.

    starting model (made on the spot if asked for; of an evaluation also converted from a checkpoint) -> architecture, tensors, tokenizer
    data set -> opened, its prompts measured against the context (of endless ones the first); what was left out is said on standard output
    keys     -> made

The launcher runs this as a short process of its own, because it needs packages that the launcher must not import.
Errors are printed as one line; exit status 2.
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

from workers.checkpoints import TRAINER
from workers.config import ClusterKind, Config, ConfigError, DataConfig, Dtype, ModelSource, Transport, load, require
from workers.data.examples import Examples, end_token
from workers.data.prompts import PromptSource, open_prompts
from workers.files import write_atomic
from workers.rundir import RunFolder, RunFolderError
from workers.transport.keys import make_keys
from workers.weights.architecture import Architecture, ModelError, check_tensors, read_architecture
from workers.weights.places import places
from workers.weights.splitting import check_parallel
from workers.weights.starting import make_smollm2, make_tiny

NUM_CHECKED = 512
NUM_VERSIONS = 3
"""As many versions of the weights are there at once, at least."""


def resolve_model(config: Config, run: RunFolder) -> Path:
    """The folder of the starting model, made now if it is one that is made. Raises `ModelError`."""
    if config.model.source is ModelSource.tiny:
        make_tiny(run.model, config.run.seed)
        return run.model
    folder = Path(config.model.path).expanduser().absolute()
    if config.model.source is ModelSource.smollm2:
        make_smollm2(folder)
    if config.evaluates and is_checkpoint(folder):
        from workers.trainer.conversion import convert  # imports Megatron

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
    check_parallel(architecture, config.trainer.parallel)
    require(config.engine.context_length <= architecture.max_positions, "engine.context_length", config.engine.context_length,
            f"must be at most the model's max_position_embeddings={architecture.max_positions} (its sliding_window where that is less)", "Shorten it")
    return architecture


def check_prompts(config: Config, folder: Path, architecture: Architecture) -> None:
    """Check that prompts fit the vocabulary and the context. Raises `ConfigError`, `ModelError`."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: not a readable tokenizer ({error}). Give the folder of a Hugging Face model with its tokenizer.json") from error
    if config.supervised:
        _check_examples(config, folder, tokenizer, architecture)
        return
    prompts = open_prompts(config.data, config.reward, config.run.seed, folder)
    room = config.engine.context_length - config.workflow.max_new_tokens
    for prompt in itertools.chain(prompts.heldout(), () if config.evaluates else prompts.preview(NUM_CHECKED)):
        tokens = tokenizer.encode(prompt.text, add_special_tokens=False).ids
        if not 1 <= len(tokens) <= room:
            raise ConfigError(f"data: prompt {prompt.id} has {len(tokens)} tokens; it must have at least 1 and leave room for "
                              f"workflow.max_new_tokens={config.workflow.max_new_tokens} in engine.context_length="
                              f"{config.engine.context_length}. Raise engine.context_length, or leave such prompts out with data.filter=drop and "
                              f"data.max_prompt_tokens={room}")
        _check_vocabulary(tokens, architecture, path)
    _say(prompts)


def _check_examples(config: Config, folder: Path, tokenizer: Tokenizer, architecture: Architecture) -> None:
    """The same for prompts with the responses that a supervised run learns."""
    source = open_prompts(config.data, config.reward, config.run.seed, folder, responses=True)
    examples = Examples(source, tokenizer, end_token(folder, tokenizer))
    for example in itertools.chain(examples.heldout(), (examples.train(index) for index in range(NUM_CHECKED))):
        if problem := example.problem(config.engine.context_length):
            raise ConfigError(f"data: {problem}")
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
        size = sum(math.prod(shape) for shape in architecture.tensor_shapes().values()) * (2 if config.engine.dtype is Dtype.bfloat16 else 4)
        free = shutil.disk_usage(parent).free
        require(free >= NUM_VERSIONS * size, "weights.dir", config.weights.dir,
                f"{NUM_VERSIONS} versions of the weights take {NUM_VERSIONS * size >> 20} MiB in {parent}, where {free >> 20} MiB are free",
                "Free some space there, or choose another weights.dir")


def check_functions(config: Config) -> None:
    """Check that the functions of the user's own that workers will import are there. Raises `ConfigError`, and whatever importing them raises."""
    # Imported here: a supervised run needs neither.
    from workers.rollout.workflows.agent import load_agent
    from workers.rollout.workflows.keeping import Keeping
    from workers.rollout.workflows.runner import load as load_workflow

    load_workflow(config.workflow.name)
    if config.workflow.name == "agent" and config.workflow.agent:
        load_agent(config.workflow.agent)
    Keeping(config.workflow.keep)


def make_absolute(data: DataConfig) -> None:
    """Write the data's paths as they are seen from here: workers start elsewhere."""
    for part in (data, *data.parts.values()):
        part.path, part.heldout_path = (str(Path(path).expanduser().absolute()) if path else "" for path in (part.path, part.heldout_path))


def prepare(run: RunFolder) -> None:
    """All of it; the config in the run folder then names the model's folder."""
    config = load(run.config)
    make_absolute(config.data)
    folder = resolve_model(config, run)
    architecture = check_model(folder, config)
    check_prompts(config, folder, architecture)
    if not config.supervised:
        check_functions(config)
    if config.evaluates:
        run.evaluation.mkdir(mode=0o700)
    elif not config.supervised:
        check_weights_folder(config, run, architecture)
    config.model.path = str(folder)
    write_atomic(run.config, msgspec.json.format(msgspec.json.encode(config)))
    make_keys(run)


if __name__ == "__main__":
    os.umask(0o077)
    try:
        prepare(RunFolder.open(Path(sys.argv[1])))
    except (ConfigError, ModelError, RunFolderError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
