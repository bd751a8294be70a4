"""Sums: "a + b =" behind a few worked examples. Needs no file, and every prompt starts with the same tokens.

The examples are drawn once from the seed and are the same in every prompt, so that a prefix cache can reuse them.
Pairs used as examples or held out are never training questions, in neither order: 12 + 34 would give away 34 + 12.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from workers.config import DataConfig, require
from workers.data.prompt import Prompt, check_index

MIN_TRAINING_SHARE = 0.25
"""Of all pairs, at least this share must be left for training, so that drawing one by rejection is quick."""


class ArithmeticPrompts:
    """Sums of two numbers of exactly `data.digits` digits, drawn uniformly. Raises `ConfigError` if there are too few pairs."""

    def __init__(self, config: DataConfig, verifier: str, seed: int) -> None:
        self._operands = range(10 ** (config.digits - 1), 10**config.digits)
        self._verifier = verifier
        self._seed = seed
        num_pairs = len(self._operands) ** 2
        room = int(num_pairs * (1 - MIN_TRAINING_SHARE)) // 2 - config.num_examples
        require(config.num_heldout <= room, "data.num_heldout", config.num_heldout,
                f"must be at most {room} with data.digits={config.digits} ({num_pairs} pairs) and data.num_examples={config.num_examples}",
                "Hold out fewer or use more digits")
        reserved = self._draw(random.Random(f"{seed}/reserved"), config.num_examples + config.num_heldout)
        self._examples = "".join(f"{a} + {b} = {a + b}\n" for a, b in reserved[:config.num_examples])
        self._heldout = reserved[config.num_examples:]
        self._reserved = frozenset(reserved) | {(b, a) for a, b in reserved}

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`."""
        check_index(index)
        rng = random.Random(f"{self._seed}/train/{index}")
        pair = self._pair(rng)
        while pair in self._reserved:
            pair = self._pair(rng)
        return self._prompt(pair)

    def heldout(self) -> list[Prompt]:
        """`data.num_heldout` prompts, none of them a training prompt or twice in the list."""
        return [self._prompt(pair) for pair in self._heldout]

    def preview(self, count: int) -> Iterator[Prompt]:
        """The first `count` training prompts."""
        return (self.train(index) for index in range(count))

    def notes(self) -> list[str]:
        """Nothing."""
        return []

    def _draw(self, rng: random.Random, count: int) -> list[tuple[int, int]]:
        drawn: dict[tuple[int, int], None] = {}  # a set that keeps its order
        while len(drawn) < count:
            a, b = self._pair(rng)
            if (b, a) not in drawn:
                drawn[a, b] = None
        return list(drawn)

    def _pair(self, rng: random.Random) -> tuple[int, int]:
        return rng.choice(self._operands), rng.choice(self._operands)

    def _prompt(self, pair: tuple[int, int]) -> Prompt:
        a, b = pair
        return Prompt(id=f"{a}+{b}", text=f"{self._examples}{a} + {b} =", verifier=self._verifier, reference=str(a + b), response=f" {a + b}")
