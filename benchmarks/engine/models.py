"""The model of the engine's benchmarks, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def make_model(folder: Path) -> None:
    """A random Qwen3 of about 7 million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
