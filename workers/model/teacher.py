"""Whether a teacher (`algorithm.teacher`) can be asked about the tokens of the model in training: looked at before anything is submitted."""

from __future__ import annotations

import json
from pathlib import Path

from workers.config import Advantage, Config, ConfigError, require
from workers.model.architecture import Architecture, ModelError, read_architecture
from workers.model.parallel_limits import check_parallel
from workers.model.tensors import check_tensors


def check_teacher(config: Config, folder: Path, architecture: Architecture) -> None:
    """Check the teacher's model, its split over ranks, its context, and that its token ids mean what they mean in `folder`, the model in training.
    Writes its folder as it is seen from here. Raises `ConfigError`, `ModelError`."""
    if not config.algorithm.teacher:
        require(config.algorithm.advantage is not Advantage.none, "algorithm.teacher", "", "must name a folder with algorithm.advantage=none",
                "Give the Hugging Face folder of the model to learn from, with the same tokenizer")
        return
    teacher = Path(config.algorithm.teacher).expanduser().absolute()
    config.algorithm.teacher = str(teacher)
    theirs = read_architecture(teacher)
    check_tensors(teacher, theirs)
    check_parallel(theirs, config.trainer.parallel)
    require(theirs.vocab_size >= architecture.vocab_size, "algorithm.teacher", str(teacher),
            f"knows {theirs.vocab_size} tokens, and the model in training {architecture.vocab_size}", "Take a teacher of the same family")
    require(config.engine.context_length <= theirs.max_positions, "engine.context_length", config.engine.context_length,
            f"must be at most the teacher's max_position_embeddings={theirs.max_positions}", "Shorten it")
    own, other = _tokens(folder), _tokens(teacher)
    if own != other:
        token = min(own.items() ^ other.items(), key=lambda item: (item[1], item[0]))
        raise ConfigError(f"algorithm.teacher={str(teacher)!r}: its tokenizer is another one: only one of them has {token[0]!r} as {token[1]}. "
                          "It is asked about the tokens that the model in training has sampled: take a teacher with the same tokenizer")


def _tokens(folder: Path) -> dict[str, int]:
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_bytes())
        vocabulary = content["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((entry[0], number) for number, entry in enumerate(vocabulary))
        return dict(pairs) | {added["content"]: added["id"] for added in content.get("added_tokens", ())}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{path}: not a readable tokenizer ({error}). Give the folder of a Hugging Face model with its tokenizer.json") from error
