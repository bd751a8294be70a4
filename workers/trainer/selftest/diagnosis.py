"""Why the log-probs of engine and trainer may differ: what the tokens themselves say. Pure.

    log-probs of the same tokens: the engine's; the trainer's, at several temperatures --> evidence --> likely causes, most likely first

Causes are told apart by where the gap lies: at another temperature it vanishes; in some responses only, it is some of the engines; along the
sequence, it is the positions. What the tokens speak against is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workers.algorithms.agreement import Agreement
from workers.config import Config, Dtype, Interrupt, Server
from workers.model.architecture import Architecture
from workers.trainer.batch.group import TrainGroup

FEW = 32
"""Fewer tokens show no trend."""
TREND = 0.3
UNRELATED = 0.5
ALMOST_ALL = 0.95
FAR = 3.0
HALF_PRECISION_NATS = 0.3
USUAL_TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.0)


class Cause(NamedTuple):
    """`weight`: how much speaks for it; 1 is as good as seen, 0 only not excluded."""

    weight: float
    text: str


@dataclass(frozen=True)
class ComparedTokens:
    """Tokens that engine and trainer have computed log-probs of, float32 [N] each, one response after the other.

    `at`: the trainer's at other temperatures. `position`: in the sequence, `index`: in the response, `response`: its number, int64 [N];
    `continued`: its response was begun by older weights, bool [N].
    """

    engine: np.ndarray
    trainer: np.ndarray
    at: Mapping[float, np.ndarray]
    position: np.ndarray
    index: np.ndarray
    response: np.ndarray
    continued: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        """|engine - trainer|, float32 [N]."""
        return np.abs(self.engine - self.trainer)


@dataclass(frozen=True)
class Circumstances:
    """What is known besides the tokens. `agreed`: how far both agreed before weights were updated, None where that is not known."""

    config: Config
    architecture: Architecture
    agreed: Agreement | None


def temperatures(given: float) -> list[float]:
    """Those at which log-probs are looked at: the given one, its square (divided by it twice), and what engines may take by themselves."""
    return list(dict.fromkeys([given, given**2, *USUAL_TEMPERATURES]))


def compared_tokens(groups: list[TrainGroup], fresh: list[list[np.ndarray]], logprobs: Mapping[float, list[list[np.ndarray]]],
                    given: float) -> ComparedTokens:
    """The `fresh` tokens that are trained on, of those responses for which there are `logprobs` (by temperature; elsewhere arrays are empty)."""
    picked = [(group, sample, np.flatnonzero(fresh[group][sample] & groups[group].loss_mask[sample]))
              for group, rows in enumerate(logprobs[given]) for sample, row in enumerate(rows) if len(row)]

    def flat(rows: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *rows])

    def at(values: list[list[np.ndarray]]) -> np.ndarray:
        return flat([values[group][sample][index] for group, sample, index in picked], np.float32)

    return ComparedTokens(
        at([group.behavior_logprobs for group in groups]), at(logprobs[given]),
        {temperature: at(values) for temperature, values in logprobs.items() if temperature != given},
        flat([len(groups[group].prompt) + index for group, _, index in picked], np.int64), flat([index for _, _, index in picked], np.int64),
        flat([np.full(len(index), number) for number, (_, _, index) in enumerate(picked)], np.int64),
        flat([np.full(len(index), not fresh[group][sample].all()) for group, sample, index in picked], np.bool_))


def likely_causes(tokens: ComparedTokens, known: Circumstances) -> list[str]:
    """What may be wrong, most likely first; at least one."""
    found = [cause for rule in RULES if len(tokens.gap) and (cause := rule(tokens, known)) is not None]
    found.sort(key=lambda cause: -cause.weight)
    return [cause.text for cause in found] or [
        "nothing in the tokens points to one: compare model.path, engine.dtype and workflow.temperature with what the engine's log says"]


def _temperature(tokens: ComparedTokens, known: Circumstances) -> Cause | None:
    gaps = {temperature: float(np.abs(values - tokens.engine).mean()) for temperature, values in tokens.at.items()}
    best = min(gaps, key=lambda temperature: gaps[temperature])
    if gaps[best] > max(known.config.mean_tolerance, 0.2 * float(tokens.gap.mean())):
        return None
    return Cause(1.0, f"temperature: the engine's log-probs are those at a temperature of {best:.4g} (they differ by {gaps[best]:.2g} then), "
                      f"workflow.temperature is {known.config.workflow.temperature:g}. {_about_temperature(best)}")


def _about_temperature(found: float) -> str:
    if found == 1:
        return "The engine samples at its temperature, but reports log-probs without it"
    return "It is applied twice, or the engine takes another one, of generation_config.json for example"


def _cut(tokens: ComparedTokens, known: Circumstances) -> Cause | None:
    higher, workflow = float((tokens.engine > tokens.trainer).mean()), known.config.workflow
    if higher < ALMOST_ALL or len(tokens.gap) < FEW:
        return None
    cut = workflow.top_p < 1 or workflow.top_k > 0
    return Cause(0.9 if cut else 0.6, f"top-p or top-k: {higher:.0%} of the engine's log-probs are higher, as if they were those of what a cut has "
                                      f"left (workflow.top_p={workflow.top_p:g}, workflow.top_k={workflow.top_k})")


def _some_engines(tokens: ComparedTokens, known: Circumstances) -> Cause | None:
    number = int(tokens.response.max()) + 1
    means = np.bincount(tokens.response, tokens.gap, number) / np.maximum(1, np.bincount(tokens.response, minlength=number))
    agree = means <= known.config.mean_tolerance
    within = int(agree.sum())
    if not 0.1 * number <= within <= 0.9 * number or means[~agree].mean() < FAR * known.config.mean_tolerance:
        return None
    return Cause(0.8, f"some of the engines: {within} of {number} responses agree, the others are off by {means[~agree].mean():.2g}. Their servers "
                      "hold other weights than they say, or compute otherwise")


def _cache(tokens: ComparedTokens, known: Circumstances) -> Cause | None:
    if not tokens.continued.any() or tokens.continued.all():
        return None
    continued, begun = (float(tokens.gap[which].mean()) for which in (tokens.continued, ~tokens.continued))
    if continued < FAR * begun:
        return None
    kept = " (engine.interrupt=in_place does that)" if known.config.engine.interrupt is Interrupt.in_place else ""
    return Cause(0.9, f"KV cache: responses that older weights have begun are off by {continued:.2g}, others by {begun:.2g}. The engine keeps the "
                      f"cache of older weights in an update{kept}")


def _stale(tokens: ComparedTokens, known: Circumstances) -> Cause | None:
    if known.agreed is None:
        return None
    return Cause(0.85, f"stale weights: before an update both agreed ({known.agreed}). The engine says that it holds the new weights and computes "
                       "with older ones, or with a prefix cache of theirs that was not flushed")


def _other_model(tokens: ComparedTokens, known: Circumstances) -> Cause | None:
    related = _correlation(tokens.engine, tokens.trainer)
    if related >= UNRELATED or known.agreed is not None:
        return None
    if known.config.engine.server is Server.synthetic:
        return Cause(1.0, "engine.server=synthetic holds no model, its log-probs are made up. selftest.action=off trains on them")
    tied = " The model's embeddings are tied (tie_word_embeddings): an engine may take lm_head from somewhere else" if known.architecture.tied else ""
    return Cause(0.7, f"other weights or another model: the log-probs have little to do with each other (correlation {related:.2f}). Look at what "
                      f"the engine has loaded.{tied}")


def _positions(tokens: ComparedTokens, known: Circumstances) -> Cause | None:
    trend = _correlation(tokens.gap, tokens.position)
    if trend < TREND or len(tokens.gap) < FEW:
        return None
    scaled = "the model's rope_scaling" if known.architecture.rope_scaling else f"rope_theta={known.architecture.rope_theta:g}"
    return Cause(0.75, f"positions: the gap grows along the sequence (correlation {trend:.2f}). The engine reads {scaled} otherwise, or extends the "
                       "context")


def _prompt(tokens: ComparedTokens, known: Circumstances) -> Cause | None:
    trend = _correlation(tokens.gap, tokens.index)
    if trend > -TREND or len(tokens.gap) < FEW:
        return None
    return Cause(0.7, f"prompt: the gap is largest where responses begin (correlation {trend:.2f}). The engine was given other prompt tokens than "
                      "those that came with the response (chat template, begin-of-sequence token)")


def _precision(tokens: ComparedTokens, known: Circumstances) -> Cause | None:
    engine, trainer = known.config.engine.dtype, known.config.trainer.dtype
    if (engine is trainer is Dtype.float32) or float(tokens.gap.mean()) > HALF_PRECISION_NATS:
        return None
    same = "" if engine is trainer else ". Make both the same"
    return Cause(0.5, f"arithmetic: engine.dtype={engine.value}, trainer.dtype={trainer.value}; half precision, quantisation of weights or of the "
                      f"cache make gaps of this size{same}. Where that is meant, raise selftest.mean_tolerance")


RULES = (_temperature, _cut, _some_engines, _cache, _stale, _other_model, _positions, _prompt, _precision)


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's; 0 where one of them does not vary."""
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first.astype(np.float64), second.astype(np.float64))[0, 1])
