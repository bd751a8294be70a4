"""Faults between engine and trainer are told by the tokens: each of them, made on a random model, comes first among the likely causes."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from workers.algorithms.agreement import Agreement
from workers.config import Config, Dtype, Interrupt, Server
from workers.model.architecture import Architecture
from workers.trainer.batch.group import TrainGroup
from workers.trainer.selftest.diagnosis import Circumstances, ComparedTokens, compared_tokens, likely_causes, temperatures

ARCHITECTURE = Architecture("llama", 50, 8, 8, 1, 1, 1, 8, 512, 1e-5, True, 10000.0, {"factor": 8.0}, (1,))
RESPONSES, LENGTH, VOCABULARY, PROMPT = 40, 20, 50, 7
AGREED = Agreement(256, 1.0, 2e-6, 1e-5)


class Sampled:
    """Tokens drawn from random logits [responses, length, vocabulary] at a temperature, and what engine and trainer say of them."""

    def __init__(self, temperature: float = 0.7, seed: int = 0) -> None:
        self.rng, self.temperature = np.random.default_rng(seed), temperature
        self.logits = self.rng.normal(0, 2, (RESPONSES, LENGTH, VOCABULARY))
        noise = self.rng.gumbel(size=self.logits.shape)
        self.tokens = np.argmax(self.logits / temperature + noise, -1)
        self.engine = self.trainer(temperature)

    def trainer(self, temperature: float, logits: np.ndarray | None = None) -> np.ndarray:
        scaled = (self.logits if logits is None else logits) / temperature
        return np.take_along_axis(scaled, self.tokens[..., None], -1)[..., 0] - np.logaddexp.reduce(scaled, -1)

    def compared(self, continued: np.ndarray | None = None) -> ComparedTokens:
        index = np.broadcast_to(np.arange(LENGTH), (RESPONSES, LENGTH))
        response = np.broadcast_to(np.arange(RESPONSES)[:, None], (RESPONSES, LENGTH))
        others = {other: self.trainer(other).ravel() for other in temperatures(self.temperature) if other != self.temperature}
        begun = np.zeros(RESPONSES, np.bool_) if continued is None else continued
        return ComparedTokens(self.engine.ravel(), self.trainer(self.temperature).ravel(), others, (PROMPT + index).ravel(), index.ravel(),
                              response.ravel(), np.repeat(begun, LENGTH))


def known(agreed: Agreement | None = None, **changes: object) -> Circumstances:
    config = Config()
    config.workflow.temperature = 0.7
    for key, value in changes.items():
        part, name = key.split("__")
        setattr(getattr(config, part), name, value)
    return Circumstances(config, ARCHITECTURE, agreed)


def first(sampled: Sampled, circumstances: Circumstances, continued: np.ndarray | None = None) -> str:
    tokens = sampled.compared(continued)
    assert tokens.gap.mean() > circumstances.config.mean_tolerance, "the fault is one"
    return likely_causes(tokens, circumstances)[0]


@pytest.mark.parametrize(("temperature", "reported", "words"), [
    (0.7, 1.0, "at a temperature of 1 .*workflow.temperature is 0.7. The engine samples at its temperature"),
    (0.7, 0.49, "at a temperature of 0.49 .*applied twice"), (1.0, 0.6, "at a temperature of 0.6 .*workflow.temperature is 1. .*generation_config"),
])
def test_a_temperature_that_was_not_taken_into_account(temperature: float, reported: float, words: str) -> None:
    sampled = Sampled(temperature)
    sampled.engine = sampled.trainer(reported) + sampled.rng.normal(0, 1e-5, sampled.engine.shape)
    assert re.match("temperature: .*" + words, first(sampled, known(workflow__temperature=temperature)))


def test_log_probs_of_what_a_cut_has_left() -> None:
    sampled = Sampled()
    kept = np.where(sampled.logits >= np.sort(sampled.logits, -1)[..., -5:-4], sampled.logits, -np.inf)
    sampled.tokens = np.argmax(kept / 0.7 + sampled.rng.gumbel(size=kept.shape), -1)
    sampled.engine = sampled.trainer(0.7, kept)
    assert "top-p or top-k: 100%" in first(sampled, known(workflow__top_k=5))


def test_some_engines_only() -> None:
    sampled = Sampled()
    sampled.engine[::4] += sampled.rng.normal(0, 1, sampled.engine[::4].shape)
    assert "some of the engines: 30 of 40 responses agree" in first(sampled, known())


def test_stale_weights_and_kept_caches_show_after_an_update() -> None:
    sampled = Sampled()
    sampled.engine = sampled.trainer(0.7, sampled.logits + sampled.rng.normal(0, 0.3, sampled.logits.shape))
    assert "stale weights: before an update both agreed (2e-06 nats" in first(sampled, known(AGREED))
    sampled = Sampled()
    continued = np.arange(RESPONSES) % 2 == 0
    sampled.engine[continued] += sampled.rng.normal(0, 0.3, sampled.engine[continued].shape)
    kept = known(AGREED, engine__interrupt=Interrupt.in_place)
    assert "KV cache: responses that older weights have begun are off by" in first(sampled, kept, continued)


def test_another_model() -> None:
    sampled = Sampled()
    sampled.engine = sampled.trainer(0.7, sampled.rng.normal(0, 2, sampled.logits.shape))
    found = first(sampled, known())
    assert "other weights or another model" in found and "tied" in found
    untied = dataclasses.replace(known(), architecture=dataclasses.replace(ARCHITECTURE, tied=False))
    assert "tied" not in likely_causes(sampled.compared(), untied)[0]
    sampled.engine = np.full_like(sampled.engine, -np.log(VOCABULARY))
    assert "holds no model" in first(sampled, known(engine__server=Server.synthetic))


@pytest.mark.parametrize(("shape", "words"), [
    (np.arange(LENGTH) / LENGTH, "positions: .*rope_scaling"), (0.5 ** np.arange(LENGTH), "prompt: .*chat template")])
def test_gaps_that_grow_or_fade_along_a_response(shape: np.ndarray, words: str) -> None:
    sampled = Sampled()
    sampled.engine = sampled.engine + shape * sampled.rng.normal(0, 0.5, sampled.engine.shape)
    assert re.match(words, first(sampled, known()))


def test_small_gaps_in_half_precision_are_its_own() -> None:
    sampled = Sampled()
    sampled.engine = sampled.engine + sampled.rng.normal(0, 0.15, sampled.engine.shape)
    found = first(sampled, known(engine__dtype=Dtype.bfloat16, selftest__mean_tolerance=0.01))
    assert "arithmetic: engine.dtype=bfloat16, trainer.dtype=float32" in found and "Make both the same" in found
    assert "nothing in the tokens" in first(sampled, known()), "in float32 that is no explanation"


def test_tokens_are_picked_where_there_are_log_probs_and_positions_count_the_prompt() -> None:
    def group(prompt: int, lengths: list[int]) -> TrainGroup:
        return TrainGroup("g", np.zeros(prompt, np.int32), [np.zeros(length, np.int32) for length in lengths],
                          [np.arange(length, dtype=np.float32) for length in lengths], [np.arange(length) != 1 for length in lengths],
                          np.zeros(len(lengths), np.float32), [np.zeros(length, np.int32) for length in lengths])

    groups = [group(3, [2]), group(5, [3, 4])]
    fresh = [[np.ones(2, np.bool_)], [np.array([True, True, True]), np.array([False, False, True, True])]]
    values = [[np.zeros(0, np.float32)], [np.full(3, 10, np.float32), np.full(4, 20, np.float32)]]
    doubled = [[2 * row for row in rows] for rows in values]
    found = compared_tokens(groups, fresh, {0.7: values, 1.0: doubled}, 0.7)
    assert found.engine.tolist() == [0, 2, 2, 3] and found.trainer.tolist() == [10, 10, 20, 20] and found.at[1.0].tolist() == [20, 20, 40, 40]
    assert found.position.tolist() == [5, 7, 7, 8] and found.index.tolist() == [0, 2, 2, 3]
    assert found.response.tolist() == [0, 0, 1, 1] and found.continued.tolist() == [False, False, True, True]
    nothing = compared_tokens(groups, fresh, {0.7: [[np.zeros(0, np.float32)]] * 2, 1.0: [[np.zeros(0, np.float32)]] * 2}, 0.7)
    assert len(nothing.gap) == 0 and likely_causes(nothing, known())
