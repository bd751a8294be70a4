"""Rotary position frequencies, in one place, so that engine and trainer cannot differ."""

from __future__ import annotations

import math

import torch

from workers.model.architecture import Architecture


def inverse_frequencies(architecture: Architecture) -> torch.Tensor:
    """Inverse frequencies, float32 [rotary_dim / 2], with Llama 3's or YaRN's scaling where the model has it.

    The arithmetic is that of transformers' `modeling_rope_utils` (`_compute_default_rope_parameters`,
    `_compute_llama3_parameters`, `_compute_yarn_parameters`), so that log-probs agree to rounding.
    """
    half = torch.arange(0, architecture.rotary_dim, 2, dtype=torch.int64).float() / architecture.rotary_dim
    frequencies = 1.0 / (architecture.rope_theta**half)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    if "beta_fast" in scaling:
        return _yarn(frequencies, architecture.rope_theta, architecture.rotary_dim, scaling)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(medium, smoothed, scaled)


def _yarn(frequencies: torch.Tensor, theta: float, dim: int, scaling: dict[str, float]) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, Section 3.2): frequencies that turn fast within the original context stay, slow ones are divided by the factor."""
    def index(turns: float) -> float:
        return dim * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index(scaling["beta_fast"])), 0), min(math.ceil(index(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling["factor"] * ramp + frequencies * (1 - ramp)
