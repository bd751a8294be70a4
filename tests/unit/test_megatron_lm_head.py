"""Log-probs from hidden states in chunks: against log_softmax with autograd, whatever the chunk size."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from workers.trainer.megatron.lm_head import token_logprobs

POSITIONS, HIDDEN, VOCAB = 11, 6, 20


@pytest.mark.parametrize("chunk", [1, 4, 5, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_against_log_softmax(chunk: int, temperature: float) -> None:
    torch.manual_seed(0)
    index = torch.randint(0, POSITIONS, (40,))  # several tokens for some positions, none for others
    targets = torch.randint(0, VOCAB, (40,))
    slopes = torch.randn(40)
    results = []
    for chunked in (True, False):
        torch.manual_seed(1)
        hidden = torch.randn(POSITIONS, HIDDEN).requires_grad_()
        weight = torch.randn(VOCAB, HIDDEN).requires_grad_()
        if chunked:
            logprobs, entropy = token_logprobs(hidden, weight, index, targets, temperature, max_logits_bytes=4 * VOCAB * chunk)
            assert not entropy.requires_grad
        else:
            table = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
            logprobs, entropy = table[index, targets], -(table.exp() * table).sum(-1)[index]
        results.append([logprobs, entropy, *torch.autograd.grad((logprobs * slopes).sum(), (hidden, weight))])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 100])
def test_bfloat16_gives_float32_logprobs(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    index, targets = torch.arange(POSITIONS), torch.randint(0, VOCAB, (POSITIONS,))
    logprobs, entropy = token_logprobs(hidden, weight, index, targets, 1.0, max_logits_bytes=4 * VOCAB * chunk)
    logits = (hidden @ weight.t()).float()
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1)[index, targets], atol=1e-5)
    logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
