"""Rotary position frequencies, in one place, so that engine and trainer cannot differ."""

from __future__ import annotations

import math

import torch

from workers.model.architecture import Architecture


def inverse_frequencies(architecture: Architecture) -> torch.Tensor:
    """Inverse frequencies, float32 [head_dim / 2], with Llama 3's scaling where the model has it.

    The arithmetic is that of transformers' `modeling_rope_utils` (`_compute_default_rope_parameters`,
    `_compute_llama3_parameters`), so that log-probs agree to rounding.
    """
    half = torch.arange(0, architecture.head_dim, 2, dtype=torch.int64).float() / architecture.head_dim
    frequencies = 1.0 / (architecture.rope_theta**half)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(medium, smoothed, scaled)
