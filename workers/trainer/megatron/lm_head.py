"""Log-probs of response tokens from hidden states, without ever holding [all tokens, vocabulary] logits.

Only positions that predict a response token come here, each once, however many samples share it. They are worked on in
chunks of at most `MAX_LOGITS_BYTES` of float32 logits; backward makes a chunk's logits again, except where one chunk was
all there was, whose softmax is kept. The gradient of the weight, the largest of the model, goes straight into the float32
gradient buffer where Megatron's data-parallel wrapper has one (as with its gradient_accumulation_fusion).

    hidden [U, H] --chunk--> logits [C, V] --> log-sum-exp, entropy [C]; logits of the targets --> log-probs [N]

A vocabulary split over ranks would need all-reduces at four places: maximum, sum, the targets' logits, and the gradient
of the hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_LOGITS_BYTES = 128 * 2**20


def token_logprobs(hidden: Tensor, weight: Tensor, index: Tensor, targets: Tensor, temperature: float,
                   max_logits_bytes: int = MAX_LOGITS_BYTES) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` under softmax(hidden @ weight.T / temperature), and the entropy where each is predicted.

    `hidden` [U, H] and `weight` [V, H] in one floating dtype, `index` int64 [N] into the U positions, `targets` int64 [N]
    token ids. Returns two float32 [N]; the entropy (nats) carries no gradient. Logits become float32 before the softmax.
    """
    chunk = max(1, max_logits_bytes // (4 * weight.shape[0]))
    order = torch.argsort(index, stable=True)
    bounds = torch.searchsorted(index[order], torch.arange(0, hidden.shape[0] + chunk, chunk, device=index.device)).tolist()
    return _TokenLogprobs.apply(hidden, weight, index, targets, 1.0 / temperature, chunk, order, bounds)


def _logits(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    logits = torch.matmul(hidden, weight.t()).float()
    return logits if scale == 1.0 else logits.mul_(scale)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, index: Tensor, targets: Tensor, scale: float, chunk: int,
                order: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
        lse = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(lse)
        logprobs = torch.empty(len(index), dtype=torch.float32, device=hidden.device)
        ctx.kept = None
        for number, start in enumerate(range(0, hidden.shape[0], chunk)):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, scale)
            highest = logits.amax(dim=-1, keepdim=True)
            shifted = logits.sub_(highest)
            exponents = shifted.exp()
            total = exponents.sum(dim=-1)
            lse[part] = highest[:, 0] + total.log()
            entropy[part] = total.log() - torch.einsum("cv,cv->c", exponents, shifted) / total
            tokens = order[bounds[number]:bounds[number + 1]]
            rows = index[tokens] - start
            logprobs[tokens] = shifted[rows, targets[tokens]] - total.log()[rows]
            if hidden.shape[0] <= chunk and ctx.needs_input_grad[0]:
                ctx.kept = (exponents, total)
        ctx.save_for_backward(hidden, weight, index, targets, order, lse)
        ctx.scale, ctx.chunk, ctx.bounds = scale, chunk, bounds
        ctx.main_grad = getattr(weight, "main_grad", None)
        entropy_at_tokens = entropy[index]
        ctx.mark_non_differentiable(entropy_at_tokens)
        return logprobs, entropy_at_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, index, targets, order, lse = ctx.saved_tensors
        summed = torch.zeros_like(lse).index_add_(0, index, grad).mul_(-ctx.scale)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.main_grad is None else ctx.main_grad
        for number, start in enumerate(range(0, hidden.shape[0], ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            # d logprob / d logit = onehot - softmax, summed over the tokens that the position predicts
            if ctx.kept is None:
                slope = _logits(hidden[part], weight, ctx.scale).sub_(lse[part, None]).exp_().mul_(summed[part, None])
            else:
                exponents, total = ctx.kept
                ctx.kept = None  # overwritten; a second backward makes the logits again
                slope = exponents.mul_((summed / total)[:, None])
            tokens = order[ctx.bounds[number]:ctx.bounds[number + 1]]
            slope.index_put_((index[tokens] - start, targets[tokens]), grad[tokens] * ctx.scale, accumulate=True)
            slope = slope.to(hidden.dtype)
            grad_hidden[part] = slope @ weight
            if hidden.dtype is torch.float32:
                grad_weight.addmm_(slope.t(), hidden[part])
            else:
                grad_weight.add_(slope.t() @ hidden[part])
        own = grad_weight.to(weight.dtype) if ctx.main_grad is None else None
        return grad_hidden, own, None, None, None, None, None, None
