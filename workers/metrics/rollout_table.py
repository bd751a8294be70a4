"""Groups as rows that people and programs read: a row a sample, texts beside tokens.

    Group, log-probs from before the step --Reader--> rows --> table (rollout_files.py writes it)

Columns, of kind `train` (groups that a step was trained on) and `heldout` (all groups of an evaluation); lists have one item a response token:

    step                 the step that was trained on the sample (1 for the first); the version that was evaluated
    kind, group, prompt_id, sample, episode
    prompt, response, reference    texts, special tokens shown
    reward, score, num_tokens
    part_scores          of a weighted sum of verifiers each one's mean over the group
    age                  train: steps between the sample's first token and the weights that the step began with
    tokens, token_ends   ids; where in `response` each ends (characters; empty where the tokenizer cannot say)
    logprobs             of the policy that sampled, nats
    proximal_logprobs    of the weights from before the step, where the objective has needed them (else null): e**(this - logprobs) is the weight w
    trained_on           whether the loss counts the token: what tools and users said it does not
    versions             the step whose weights sampled the token
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers.decoders import DecodeStream

from workers.messages.groups import group_episodes, samples
from workers.messages.parts import Group
from workers.model.architecture import ModelError
from workers.model.tokenizer import open_tokenizer

TRAIN, HELDOUT = "train", "heldout"
SCHEMA = pa.schema([
    ("step", pa.int32()), ("kind", pa.string()), ("group", pa.string()), ("prompt_id", pa.string()), ("sample", pa.int32()), ("episode", pa.int32()),
    ("prompt", pa.string()), ("response", pa.string()), ("reference", pa.string()), ("reward", pa.float32()), ("score", pa.float32()),
    ("num_tokens", pa.int32()), ("part_scores", pa.map_(pa.string(), pa.float32())), ("age", pa.int32()),
    ("tokens", pa.list_(pa.int32())), ("token_ends", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float32())), ("proximal_logprobs", pa.list_(pa.float32())), ("trained_on", pa.list_(pa.bool_())),
    ("versions", pa.list_(pa.int32()))])


@dataclass(frozen=True)
class Kept:
    """A group to be kept. `proximal`: log-probs from before the step of all its tokens, float32 [sum(lengths)], or None."""

    step: int
    kind: str
    group: Group
    reference: str
    proximal: np.ndarray | None = None


class Reader:
    """Reads tokens with the tokenizer in `folder`, the model's. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = open_tokenizer(folder)
        except ModelError as error:
            raise OSError(str(error)) from error

    def text(self, ids: list[int]) -> tuple[str, list[int]]:
        """The text of `ids`, special tokens shown, and where in it each token ends; a token that is a part of a character ends before it."""
        stream, text, ends = DecodeStream(skip_special_tokens=False), "", list[int]()
        whole = self._tokenizer.decode(ids, skip_special_tokens=False)
        try:
            for token in ids:
                text += stream.step(self._tokenizer, token) or ""
                ends.append(len(text))
        except Exception:  # noqa: BLE001 -- the library raises nothing narrower where a tokenizer's texts do not grow by their ends
            return whole, []
        return (whole, ends) if whole.startswith(text) else (whole, [])

    def rows(self, kept: Kept) -> Iterator[dict[str, Any]]:
        """A row of each sample."""
        group, begins, first = kept.group, kept.step - 1, 0
        prompt = self.text(np.asarray(group.prompt).tolist())[0]
        for number, (view, episode) in enumerate(zip(samples(group), group_episodes(group).tolist(), strict=True)):
            tokens = view.tokens.tolist()
            response, ends = self.text(tokens)
            proximal = None if kept.proximal is None else kept.proximal[first:first + len(tokens)]
            first += len(tokens)
            yield {
                "step": kept.step, "kind": kept.kind, "group": group.group_id, "prompt_id": group.prompt_id, "sample": number, "episode": episode,
                "prompt": prompt, "response": response, "reference": kept.reference, "reward": view.reward, "score": float(group.scores[number]),
                "num_tokens": len(tokens), "part_scores": list(group.part_scores.items()),
                "age": begins - int(view.steps[0]) if kept.kind == TRAIN else 0, "tokens": tokens, "token_ends": ends,
                "logprobs": view.logprobs, "proximal_logprobs": proximal, "trained_on": view.loss_mask, "versions": view.steps}


def table(rows: list[dict[str, Any]]) -> pa.Table:
    """The rows, in columns."""
    return pa.Table.from_pylist(rows, SCHEMA)
