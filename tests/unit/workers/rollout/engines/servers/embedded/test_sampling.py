"""The sampler draws from the distribution it claims to draw from, and reports that distribution's log-probs."""

from __future__ import annotations

import math

import pytest
import torch

from workers.rollout.engines.servers.embedded.requests import Sampling
from workers.rollout.engines.servers.embedded.sampling import SamplingBatch, sample, uniform

DRAWS = 20000


def draw(logits: torch.Tensor, sampling: Sampling, count: int) -> tuple[list[int], list[float]]:
    """`count` draws from one row of logits, at output positions 0, 1, ..."""
    batch = SamplingBatch.of([sampling] * count, logits.shape[0])
    return sample(logits.repeat(count, 1), batch, list(range(count)))


def kept_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution after temperature, top-k and top-p, by the textbook definition."""
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    order = probabilities.argsort(descending=True)
    kept = torch.zeros_like(probabilities)
    total = 0.0
    for rank, index in enumerate(order.tolist()):
        if total > sampling.top_p or (sampling.top_k > 0 and rank >= sampling.top_k):
            break
        kept[index] = probabilities[index]
        total += float(probabilities[index])
    return kept / kept.sum()


@pytest.mark.parametrize("vocab_size", [11, 128, 300])
@pytest.mark.parametrize("sampling", [
    Sampling(seed=1), Sampling(temperature=0.5, seed=2), Sampling(temperature=1.7, top_p=0.7, seed=3), Sampling(top_k=4, seed=4),
    Sampling(temperature=0.8, top_p=0.9, top_k=6, seed=5)])
def test_draws_follow_the_distribution(sampling: Sampling, vocab_size: int) -> None:
    logits = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    expected = kept_distribution(logits, sampling)
    tokens, logprobs = draw(logits, sampling, DRAWS)
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    large = expected * DRAWS >= 5
    observed = torch.cat([counts[large].double(), counts[~large].sum()[None].double()])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]]) * DRAWS
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    # Wilson and Hilferty's approximation: the cube root is normal. 4 standard deviations; the seed is fixed.
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert deviation < 4
    # Log-probs are of the tempered distribution, not renormalised after the cuts.
    tempered = torch.log_softmax(logits.double() / sampling.temperature, -1)[torch.tensor(tokens)]
    assert (tempered - torch.tensor(logprobs).double()).abs().max() < 1e-5


def test_greedy_takes_the_largest_and_reports_the_untempered_logprob() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(logits.clone(), Sampling(temperature=0), 3)
    assert tokens == [int(logits.argmax())] * 3
    assert abs(logprobs[0] - float(torch.log_softmax(logits, -1).max())) < 1e-6


def test_rows_do_not_affect_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator)
    kinds = [Sampling(seed=7), Sampling(temperature=0), Sampling(0.5, 0.8, 9, 8), Sampling(2.0, seed=9),
             Sampling(top_k=1), Sampling(top_p=1e-9)]
    positions = [4, 5, 6, 7, 8, 9]
    together, _ = sample(logits.clone(), SamplingBatch.of(kinds, 300), positions)
    alone = [sample(logits[i : i + 1].clone(), SamplingBatch.of([kinds[i]], 300), [positions[i]])[0][0] for i in range(6)]
    assert together == alone
    assert together[4] == int(logits[4].argmax()) and together[5] == int(logits[5].argmax())


def test_nucleus_wider_than_the_first_thousand_tokens() -> None:
    tokens, _ = draw(torch.zeros(5000), Sampling(top_p=0.9, seed=1), 4000)
    assert 1500 < len(set(tokens)) <= 4501


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((300,), -torch.inf)
    logits[[3, 131, 299]] = 0.0
    assert set(draw(logits, Sampling(seed=3), 3000)[0]) == {3, 131, 299}


def test_uniform_numbers_are_spread_and_repeatable() -> None:
    numbers = torch.tensor([uniform(seed, position) for seed in range(50) for position in range(200)])
    assert uniform(3, 4) == uniform(3, 4) and numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 45  # chi-square, 19 degrees of freedom, p < 0.001


def test_diverged_logits_give_a_logprob_that_is_not_finite() -> None:
    _, logprobs = draw(torch.full((300,), torch.nan), Sampling(), 2)
    assert not any(math.isfinite(logprob) for logprob in logprobs)
