"""An autoregressive policy of which everything can be computed: a table of logits, a row for each prompt and each beginning of an answer.

    beginning of an answer (0 to length - 1 tokens) --its number--> row --softmax--> the next token

There are VOCAB ** length answers to a prompt. Which of them are right was drawn once, of each prompt as many. So the probability of a right answer,
and its gradient, are sums over all of them. Tables have a first dimension more: as many policies as there are seeds, trained side by side.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

VOCAB = 4


@dataclass(frozen=True)
class Task:
    """`right` float64 [prompts, answers]: 1 where an answer is right."""

    right: Tensor

    @staticmethod
    def draw(num_prompts: int, length: int, share: float, seed: int = 0) -> Task:
        """Of each prompt that share of the answers of `length` tokens is right."""
        generator, number = torch.Generator().manual_seed(seed), VOCAB**length
        order = torch.rand(num_prompts, number, generator=generator).argsort(-1)
        return Task((order < round(share * number)).double())

    def rewards(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """1.0 or 0.0 for answers int64 [..., length] to prompts int64 [...]."""
        return self.right[prompts, numbers(tokens)]


def start(num_seeds: int, num_prompts: int, length: int, generator: torch.Generator) -> Tensor:
    """Logits float64 [seeds, prompts, rows, vocab] near the uniform policy."""
    return 0.1 * torch.randn(num_seeds, num_prompts, first_row(length), VOCAB, generator=generator, dtype=torch.float64)


def numbers(tokens: Tensor) -> Tensor:
    """The number of each sequence [..., n] among those of its length."""
    number = torch.zeros(tokens.shape[:-1], dtype=torch.int64)
    for place in range(tokens.shape[-1]):
        number = number * VOCAB + tokens[..., place]
    return number


def first_row(length: int) -> int:
    """The row of the first beginning of that length."""
    return (VOCAB**length - 1) // (VOCAB - 1)


def length_of(logits: Tensor) -> int:
    """Of the answers that a table [..., rows, vocab] is for."""
    return next(length for length in itertools.count(1) if first_row(length) == logits.shape[-2])


def sample(logits: Tensor, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Answers int64 [seeds, n, length] to prompts int64 [seeds, n], and the rows that they went through, of the same shape."""
    seeds = torch.arange(len(logits))[:, None]
    beginning, tokens, rows = torch.zeros_like(prompts), [], []
    for place in range(length_of(logits)):
        row = beginning + first_row(place)
        noise = -torch.empty(*prompts.shape, VOCAB, dtype=torch.float64).exponential_(generator=generator).log()  # Gumbel's
        token = (logits[seeds, prompts, row] + noise).argmax(-1)
        tokens.append(token)
        rows.append(row)
        beginning = beginning * VOCAB + token
    return torch.stack(tokens, -1), torch.stack(rows, -1)


def logprobs(logits: Tensor, prompts: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Log-probs float64 [seeds, n, length] of answers, with gradient."""
    seeds = torch.arange(len(logits))[:, None, None]
    return logits[seeds, prompts[..., None], rows].log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def success(logits: Tensor, task: Task) -> Tensor:
    """The probability of a right answer float64 [seeds], mean over prompts; exact, with gradient."""
    reached = torch.ones(*logits.shape[:2], 1, dtype=torch.float64)
    for place in range(length_of(logits)):
        rows = logits[:, :, first_row(place): first_row(place + 1)].softmax(-1)
        reached = (reached[..., None] * rows).flatten(-2)
    return (reached * task.right).sum(-1).mean(-1)
