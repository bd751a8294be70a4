"""Models with random weights, in shapes that are published: no hub is needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from workers.model.initialize import make_tiny

QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
QWEN3_8B: dict[str, Any] = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False}
SMALL: dict[str, Any] = QWEN3_06B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16}


def write_model(folder: Path, shape: dict[str, Any], dtype: str = "bfloat16") -> Path:
    """A Qwen3 of that shape, in Hugging Face's form, without a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(max_position_embeddings=40960, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, eos_token_id=1,
                                      bos_token_id=None, pad_token_id=None, **shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).cpu().save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path, scratch: Path) -> Path:
    """Give a model the character tokenizer of model=tiny: its samples are nonsense, and its tokens beyond the characters are no text."""
    make_tiny(scratch, 0)
    for file in (*scratch.glob("tokenizer*"), scratch / "generation_config.json"):
        shutil.copy(file, folder)
    return folder
