"""Log-probs from hidden states in chunks: against log_softmax with autograd, whatever the shapes and the chunk size."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("megatron.core")

from workers.trainer.megatron.model.lm_head import VocabularyShard, token_logprobs
from workers.trainer.megatron.parallel import process_group


class Case(NamedTuple):
    """Sizes: positions, tokens (several for some positions, none for others), hidden, ids, rows of padding; logits in a chunk."""

    positions: int
    tokens: int
    hidden: int
    ids: int
    padding: int
    chunk: int

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        tokens = self.tokens if self.positions else 0
        return (torch.randn(self.positions, self.hidden, dtype=dtype).requires_grad_(),
                torch.randn(self.ids + self.padding, self.hidden, dtype=dtype).requires_grad_(),
                torch.randint(0, max(1, self.positions), (tokens,)), torch.randint(0, self.ids, (tokens,)))

    @property
    def max_logits_bytes(self) -> int:
        return 4 * self.chunk * (self.ids + self.padding)


def expected(hidden: Tensor, weight: Tensor, index: Tensor, targets: Tensor, temperature: float, ids: int) -> tuple[Tensor, Tensor]:
    table = torch.log_softmax((hidden @ weight[:ids].t()).float() / temperature, dim=-1)
    return table[index, targets], -(table.exp() * table).sum(-1)[index]


CASES = st.builds(Case, positions=st.integers(0, 12), tokens=st.integers(0, 30), hidden=st.integers(1, 9), ids=st.integers(1, 40),
                  padding=st.just(0), chunk=st.integers(1, 14))
PADDED = st.builds(lambda case, padding: case._replace(padding=padding), CASES, st.integers(0, 9))


@pytest.fixture(scope="module")
def alone() -> None:
    """This process as a tensor-parallel group of one."""
    process_group.initialize()


def check(case: Case, temperature: float, vocab: VocabularyShard | None, with_entropy: bool) -> None:
    results = []
    for ours in (True, False):
        hidden, weight, index, targets = case.tensors()
        if ours:
            logprobs, entropy = token_logprobs(hidden, weight, index, targets, temperature, vocab, case.max_logits_bytes, with_entropy)
            assert entropy.requires_grad is with_entropy
        else:
            logprobs, entropy = expected(hidden, weight, index, targets, temperature, case.ids)
        slopes = torch.linspace(-1, 2, len(index))
        total = (logprobs * slopes).sum() + ((entropy * slopes.flip(0).square()).sum() if with_entropy else 0.0)
        results.append([logprobs, entropy, *torch.autograd.grad(total, (hidden, weight))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


@settings(deadline=None)
@given(CASES, st.sampled_from([1.0, 0.6]), st.booleans())
def test_against_log_softmax(case: Case, temperature: float, with_entropy: bool) -> None:
    check(case, temperature, None, with_entropy)


@settings(deadline=None)
@given(PADDED, st.booleans())
def test_padding_counts_for_nothing(alone: None, case: Case, with_entropy: bool) -> None:
    check(case, 0.6, VocabularyShard(dist.group.WORLD, 0, case.ids), with_entropy)


@pytest.mark.parametrize(("first", "rows", "real"), [(0, 8, 8), (8, 8, 4), (16, 8, 0)])
def test_real_rows_of_a_shard(alone: None, first: int, rows: int, real: int) -> None:
    assert VocabularyShard(dist.group.WORLD, first, num_real=12).num_real_rows(rows) == real


@pytest.mark.parametrize("chunk", [3, 100])
def test_bfloat16_gives_float32_logprobs(chunk: int) -> None:
    case = Case(positions=11, tokens=11, hidden=6, ids=20, padding=0, chunk=chunk)
    hidden, weight, index, targets = case.tensors(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, index, targets, 1.0, max_logits_bytes=case.max_logits_bytes)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs, expected(hidden, weight, index, targets, 1.0, case.ids)[0], atol=1e-5)
    logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("chunk", [3, 100])
def test_the_gradient_of_the_weight_is_added_to_megatrons_buffer(chunk: int) -> None:
    case = Case(positions=11, tokens=20, hidden=6, ids=20, padding=0, chunk=chunk)
    hidden, weight, index, targets = case.tensors()
    expected(hidden, weight, index, targets, 1.0, case.ids)[0].sum().backward()
    wanted = weight.grad
    weight.grad, weight.main_grad = None, torch.ones_like(weight)  # type: ignore[attr-defined]
    token_logprobs(hidden, weight, index, targets, 1.0, max_logits_bytes=case.max_logits_bytes)[0].sum().backward()
    assert weight.grad is not None and weight.grad._nnz() == 0 and wanted is not None
    torch.testing.assert_close(weight.main_grad, wanted + 1, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_backward_twice_is_the_same(with_entropy: bool) -> None:
    case = Case(positions=5, tokens=9, hidden=6, ids=20, padding=0, chunk=100)
    hidden, weight, index, targets = case.tensors()
    logprobs, entropy = token_logprobs(hidden, weight, index, targets, 1.0, entropy_gradient=with_entropy)
    total = (logprobs + entropy).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    for kept, again in zip(first, torch.autograd.grad(total, (hidden, weight)), strict=True):
        torch.testing.assert_close(kept, again)
