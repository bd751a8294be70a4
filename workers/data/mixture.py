"""A mixture of data sets: which part each training prompt comes from, in proportion to the parts' weights.

    index --> block of 1000, shuffled by the seed --> part, and the number of its prompts so far --> the part's own prompt

In every block each part has the same number of places, so that the shares are exact, the order follows from index and seed, and each part
walks through its own prompts in its own order, one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping

from workers.config import ConfigError
from workers.data.limits import MAX_TRIES, SPARE
from workers.data.mapping import MAX_ID
from workers.data.prompt import Prompt, PromptSource, check_index

BLOCK = 1000
"""Training prompts after which the shares are exact."""


def quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """How many of `BLOCK` prompts come from each part: in proportion to its weight (above 0), by largest remainder; the sum is `BLOCK`.

    Raises `ConfigError` for a part that would get none.
    """
    largest = max(weights.values())  # first, so that huge weights do not add up to infinity
    total = sum(weight / largest for weight in weights.values())
    exact = {name: weight / largest / total * BLOCK for name, weight in weights.items()}
    result = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(weights, key=lambda name: exact[name] - result[name], reverse=True)
    for name in by_remainder[:BLOCK - sum(result.values())]:
        result[name] += 1
    for name, quota in result.items():
        if not quota:
            raise ConfigError(f"data.parts.{name}.weight={weights[name]!r}: of all weights together that is less than 1 prompt in {BLOCK}. "
                              "Raise it, or leave the part out")
    return result


class Order:
    """From training index to part and the part's own index. A pure function of `weights` and `seed`."""

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        self._quotas, self._seed = quotas(weights), seed
        self._block = functools.lru_cache(maxsize=2)(self._make_block)

    def place(self, index: int) -> tuple[str, int]:
        """The part that training prompt `index` comes from, and how many prompts came from that part before."""
        check_index(index)
        block, offset = divmod(index, BLOCK)
        name, before = self._block(block)[offset]
        return name, block * self._quotas[name] + before

    def _make_block(self, block: int) -> list[tuple[str, int]]:
        names = [name for name, quota in self._quotas.items() for _ in range(quota)]
        random.Random(f"{self._seed}/mixture/{block}").shuffle(names)
        before = dict.fromkeys(self._quotas, 0)
        places = []
        for name in names:
            places.append((name, before[name]))
            before[name] += 1
        return places


class MixturePrompts:
    """Several sources as one; ids begin with the part's name. Raises `ConfigError` where one part trains on what another holds out."""

    def __init__(self, sources: Mapping[str, PromptSource], weights: Mapping[str, float], seed: int) -> None:
        self._sources, self._order = dict(sources), Order(weights, seed)
        self._heldout = {name: source.heldout() for name, source in sources.items()}
        for name, prompts in self._heldout.items():
            for prompt in prompts:
                _check_id(name, prompt)
        self._holder = {prompt.asked: name for name, prompts in self._heldout.items() for prompt in prompts}
        for name, source in sources.items():
            for prompt in source.preview(0):  # every one, of files; a question that is made up twice is replaced by `train`
                _check_id(name, prompt)
                if prompt.asked in self._holder:
                    raise ConfigError(f"data.parts.{name}: its training {prompt.where} is held out by data.parts.{self._holder[prompt.asked]}; "
                                      "a held-out prompt must not be trained on. Delete one of the two")

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`. Raises `ConfigError` if only held-out questions can be found for it."""
        name, own = self._order.place(index)
        for attempt in range(MAX_TRIES):
            prompt = self._sources[name].train(own + attempt * SPARE)
            if prompt.asked not in self._holder:
                return _named(name, prompt)
        raise ConfigError(f"data.parts.{name}: has too few different questions beside those that other parts hold out. Widen its options")

    def heldout(self) -> list[Prompt]:
        """The held-out prompts of all parts, one part after the other."""
        return [_named(name, prompt) for name, prompts in self._heldout.items() for prompt in prompts]

    def preview(self, count: int) -> Iterator[Prompt]:
        """Prompts of every part."""
        share = -(-count // len(self._sources))
        return (_named(name, prompt) for name, source in self._sources.items() for prompt in source.preview(share))

    def notes(self) -> list[str]:
        """What every part has to say."""
        return [f"{name}: {note}" for name, source in self._sources.items() for note in source.notes()]


def _check_id(name: str, prompt: Prompt) -> None:
    if len(f"{name}/{prompt.id}") > MAX_ID:
        raise ConfigError(f"data.parts.{name}: {prompt.where}: the id has {len(prompt.id)} characters; with the part's name before it, it must have "
                          f"at most {MAX_ID}. Shorten one of the two")


def _named(name: str, prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, id=f"{name}/{prompt.id}")
