"""Draws tokens from logits: temperature, top-p, top-k, seeded per request.

A draw needs one uniform number per token, and that number is a hash of (request seed, output position). So a request's
random stream depends neither on which requests share its batch nor on pauses and retractions. The token is found by
inverting the distribution function in two levels (blocks of 128 tokens, then within one block), which costs one pass
over the probabilities; Gumbel noise would cost a random number per vocabulary entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.rollout.engines.servers.embedded.requests import Sampling

BLOCK = 128
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` and `position` only (splitmix64's output function, applied twice)."""
    return (_mix(_mix(seed & _MASK) + position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of one decode batch as tensors; made once for as long as the batch's requests stay the same."""

    parameters: Sequence[Sampling]
    inverse_temperatures: torch.Tensor | None  # float32 [batch, 1]; None if all are 1
    greedy: torch.Tensor | None  # bool [batch]; None if none is greedy
    cut: list[int]  # rows with top-p or top-k
    top_p: torch.Tensor  # float32 [len(cut), 1]
    top_k: torch.Tensor  # int64 [len(cut), 1]

    @classmethod
    def of(cls, parameters: Sequence[Sampling], vocab_size: int) -> SamplingBatch:
        """Collect `parameters` (one per row)."""
        temperatures = [sampling.temperature or 1.0 for sampling in parameters]
        cut = [index for index, sampling in enumerate(parameters)
               if sampling.temperature > 0 and (sampling.top_p < 1 or 0 < sampling.top_k < vocab_size)]
        greedy = [sampling.temperature == 0 for sampling in parameters]
        return cls(
            parameters=parameters,
            inverse_temperatures=None if set(temperatures) == {1.0} else 1.0 / torch.tensor(temperatures)[:, None],
            greedy=torch.tensor(greedy) if any(greedy) else None,
            cut=cut,
            top_p=torch.tensor([parameters[index].top_p for index in cut])[:, None],
            top_k=torch.tensor([parameters[index].top_k if parameters[index].top_k > 0 else vocab_size for index in cut],
                               dtype=torch.int64)[:, None],
        )


@torch.inference_mode()
def sample(logits: torch.Tensor, batch: SamplingBatch, positions: Sequence[int]) -> tuple[list[int], list[float]]:
    """One token per row of `logits` (float32 [rows, vocabulary], overwritten) and its log-prob.

    The log-prob is that of the temperature-scaled distribution before any top-p or top-k cut (SGLang's meaning); for a
    greedy row that of the untempered one. `positions` are output positions. A row whose logits are not all finite gets a
    log-prob that is not finite.
    """
    if batch.inverse_temperatures is not None:
        logits.mul_(batch.inverse_temperatures)
    probabilities = torch.softmax(logits, dim=-1)
    numbers = torch.tensor([uniform(sampling.seed, position) for sampling, position in zip(batch.parameters, positions, strict=True)],
                           dtype=torch.float64)
    tokens = _invert(probabilities, numbers)
    if batch.cut:
        rows = torch.tensor(batch.cut)
        tokens[rows] = _draw_cut(probabilities[rows], batch.top_p, batch.top_k, numbers[rows])
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, probabilities.argmax(-1), tokens)
    logprobs = probabilities.gather(1, tokens[:, None]).log_()[:, 0]
    return tokens.tolist(), logprobs.tolist()


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index drawn per row in proportion to `weights` (float32 [rows, n]), by `numbers` (float64 [rows] in [0, 1)); int64 [rows].

    An index of weight 0 is never returned: the first index whose running sum exceeds the target has a positive weight.
    """
    padding = -weights.shape[1] % BLOCK
    if padding:
        weights = F.pad(weights, (0, padding))
    blocks = weights.view(weights.shape[0], -1, BLOCK)
    sums = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = numbers[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks[torch.arange(len(blocks)), block[:, 0]].cumsum(-1, dtype=torch.float64)
    # Block sums are rounded otherwise than this running sum: keep the target below its end.
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 1e-12))
    index = torch.searchsorted(inner, rest, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + index)[:, 0].clamp_(max=weights.shape[1] - padding - 1)


def _draw_cut(probabilities: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw from the `top_k` most likely tokens, of which only the smallest set reaching `top_p` is kept; int64 [rows]."""
    width = min(probabilities.shape[1], 1024)
    values, ids = probabilities.topk(width, sorted=True)
    if bool(((values.sum(-1, keepdim=True) < top_p) & (top_k > width)).any()):
        values, ids = probabilities.sort(dim=-1, descending=True)
    before = values.cumsum(-1) - values
    values = values.masked_fill((before > top_p) | (torch.arange(values.shape[1]) >= top_k), 0.0)
    return ids.gather(1, _invert(values, numbers)[:, None])[:, 0]
