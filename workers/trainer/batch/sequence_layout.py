"""The packed layout of a micro-batch, in which the samples of a group share the tokens that they have in common.

    prompt p0 p1 p2; responses a b c d, a b e f, g h       without each response's last token: a b c, a b e, g

    trunk           branches                               one copy of every token
    [p0 p1 p2]      [a b c]  [e]  [g]
    position 0 1 2   3 4 5    5    3                       [e] attends to p0 p1 p2 a b and itself
          |          | | |    |    |
          v          v v v    v    v
        a and g      b * d    f    h                       predicted tokens; * stands for c and e

A branch attends to the tokens that precede it in its own response and, causally, to itself; its positions go on from
there. Logits are wanted only where a response token is predicted: at the trunk's last token (for every first token at
once) and in the branches. A response's last token predicts nothing, so it is no input at all. Responses are taken in
lexicographic order, in which the longest beginning shared with any earlier one is that shared with the one just before.
Nothing of this changes the loss or its gradient: a hidden state depends only on the tokens attended to, and, where the engine's choice of experts
is replayed, on that. Then only what was sent to the same experts is shared.

A chunk with a single distinct response is one plain causal trunk, which is also the layout without sharing. Where several ranks
divide the tokens of a micro-batch evenly, a few tokens that nothing depends on fill it up, as a trunk of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.trainer.batch.group import TrainGroup
from workers.trainer.batch.packing import balance, pack

# A branch needs an attention mask of its length squared, a plain causal trunk needs none; and beside a long response the
# prompt is a small part of the work. Longer ones therefore get a copy of the prompt of their own.
MAX_BRANCH_TOKENS = 2048


@dataclass(frozen=True)
class Chunk:
    """Samples of one group that share one copy of the prompt. `cost` is its number of input tokens."""

    group: int
    samples: tuple[int, ...]
    cost: int


@dataclass(frozen=True)
class Branch:
    """Input tokens [start, start + length) that attend to those at `context` (int64, in order) and to themselves."""

    start: int
    length: int
    context: NDArray[np.int64]


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of T input tokens that predicts N response tokens at U distinct positions.

    `tokens` and `position_ids` int64 [T]; `trunks` (start, length) and `branches` for the attention; `predict_at` int64 [U]
    the positions whose logits are needed; `predict_index` int64 [N] into `predict_at` and `targets` int64 [N] for each
    predicted token; `samples` the (group, sample) in whose order the N tokens stand, with `sample_lengths`. `num_real` of the
    input tokens are no filling. `routing` uint8 or int16 [T, layers with experts, experts per token]: the engine's choice, to be replayed.
    """

    tokens: Tensor
    position_ids: Tensor
    trunks: list[tuple[int, int]]
    branches: list[Branch]
    predict_at: Tensor
    predict_index: Tensor
    targets: Tensor
    samples: list[tuple[int, int]]
    sample_lengths: list[int]
    num_real: int
    routing: Tensor | None = None

    def gather(self, value: Callable[[int, int], np.ndarray]) -> Tensor:
        """Per-token tensor [N] from `value(group, sample)`, arrays aligned with the samples' tokens."""
        return torch.from_numpy(np.concatenate([value(group, sample) for group, sample in self.samples])) if self.samples else torch.empty(0)

    def scatter(self, values: Tensor, into: list[list[np.ndarray]]) -> None:
        """Put `values` float32 [N] into `into[group][sample]`, as float32 arrays aligned with the samples' tokens."""
        pieces = np.split(values.numpy(), np.cumsum(self.sample_lengths))[:-1]
        for (group, sample), piece in zip(self.samples, pieces, strict=True):
            into[group][sample] = piece


def split_groups(groups: list[TrainGroup], indices: list[int], capacity: int, share_prompts: bool) -> list[Chunk]:
    """The chunks of the groups at `indices`."""
    return [chunk for index in indices for chunk in split_group(groups[index], index, capacity, share_prompts)]


def pack_chunks(groups: list[TrainGroup], chunks: list[Chunk], capacity: int, min_microbatches: int = 1, multiple: int = 1,
                even: bool = False) -> list[PackedBatch]:
    """Pack `chunks` into micro-batches of at most `capacity` input tokens (Algorithm 1; `even`: `balance`), each filled up to a multiple of
    `multiple` then.

    At least `min_microbatches` come back, some of them without any sample where there are too few chunks. Raises ValueError where
    one response with its prompt is over the budget.
    """
    packed = (balance if even else pack)([chunk.cost for chunk in chunks], capacity, min_microbatches)
    packed += [[] for _ in range(min_microbatches - len(packed))]
    return [build_batch(groups, [chunks[item] for item in microbatch], multiple) for microbatch in packed]


def split_group(group: TrainGroup, index: int, capacity: int, share_prompts: bool) -> list[Chunk]:
    """Chunks of one group, each within `capacity` input tokens where that is possible at all (else `pack` refuses)."""
    prompt = len(group.prompt)
    if not share_prompts:
        return [Chunk(index, (sample,), prompt + len(response) - 1) for sample, response in enumerate(group.responses)]
    chunks: list[Chunk] = []
    members: list[int] = []
    cost = prompt
    previous: int | None = None
    for sample in _lexicographic(group, range(group.num_samples)):
        inputs = group.responses[sample][:-1]
        if len(inputs) > MAX_BRANCH_TOKENS:
            chunks.append(Chunk(index, (sample,), prompt + len(inputs)))
            continue
        shared = _shared_length(group, previous, sample)
        added = len(inputs) - max(shared, 0)
        if members and (shared < 0 or cost + added > capacity):
            chunks.append(Chunk(index, tuple(members), cost))
            members, cost, added = [], prompt, len(inputs)
        members.append(sample)
        cost += added
        previous = sample
    return [*chunks, Chunk(index, tuple(members), cost)] if members else chunks


def _lexicographic(group: TrainGroup, samples: Iterable[int]) -> list[int]:
    """Those whose prompts went to other experts apart; of the rest the responses in order."""
    return sorted(samples, key=lambda sample: (_prompt_routing(group, sample), group.responses[sample][:-1].tolist()))


def _prompt_routing(group: TrainGroup, sample: int) -> bytes:
    return b"" if group.routing is None else group.routing[sample][: len(group.prompt)].tobytes()


def _shared_length(group: TrainGroup, first: int | None, second: int) -> int:
    """How many input tokens at the beginning of two responses are the same, and went to the same experts; -1: their prompts did not. 0: there is no
    first one."""
    if first is None:
        return 0
    if _prompt_routing(group, first) != _prompt_routing(group, second):
        return -1
    one, two = group.responses[first][:-1], group.responses[second][:-1]
    length, prompt = min(len(one), len(two)), len(group.prompt)
    same = one[:length] == two[:length]
    if group.routing is not None:
        same &= (group.routing[first][prompt : prompt + length] == group.routing[second][prompt : prompt + length]).all((1, 2))
    return length if same.all() else int(same.argmin())


@dataclass
class _Layout:
    """A micro-batch while it is being laid out; `end` is the number of input tokens so far."""

    tokens: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    trunks: list[tuple[int, int]] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    routing: list[np.ndarray] = field(default_factory=list)
    predictors: list[np.ndarray] = field(default_factory=list)
    end: int = 0

    def append(self, tokens: np.ndarray, first_position: int) -> NDArray[np.int64]:
        """Add input tokens; returns where they stand."""
        start, self.end = self.end, self.end + len(tokens)
        self.tokens.append(tokens)
        self.positions.append(np.arange(first_position, first_position + len(tokens)))
        return np.arange(start, self.end)

    def append_chunk(self, group: TrainGroup, samples: Sequence[int]) -> None:
        """Add one chunk; `samples` must be in lexicographic order."""
        prompt = self.append(group.prompt, 0)
        if group.routing is not None:
            self.routing.append(group.routing[samples[0]][: len(prompt)])
        start, num_branches = int(prompt[0]), len(self.branches)
        previous: int | None = None
        path = np.empty(0, np.int64)
        for sample in samples:
            inputs = group.responses[sample][:-1]
            shared = _shared_length(group, previous, sample)
            if group.routing is not None:
                self.routing.append(group.routing[sample][len(prompt) + shared:])
            added = self.append(inputs[shared:], len(prompt) + shared)
            if added.size:
                self.branches.append(Branch(int(added[0]), len(added), np.concatenate([prompt, path[:shared]])))
            previous, path = sample, np.concatenate([path[:shared], added])
            self.predictors.append(np.concatenate([prompt[-1:], path]))
        if len(self.branches) == num_branches + 1:
            self.branches.pop()
            self.trunks.append((start, self.end - start))
        else:
            self.trunks.append((start, len(prompt)))


def build_batch(groups: list[TrainGroup], chunks: list[Chunk], multiple: int = 1) -> PackedBatch:
    """Lay out `chunks` one after the other, see the top of this file, and fill up to a multiple of `multiple` tokens (at least one)."""
    layout = _Layout()
    samples: list[tuple[int, int]] = []
    for chunk in chunks:
        ordered = _lexicographic(groups[chunk.group], chunk.samples)
        layout.append_chunk(groups[chunk.group], ordered)
        samples += [(chunk.group, sample) for sample in ordered]
    num_real = layout.end
    if filling := -num_real % multiple if num_real else multiple:
        layout.trunks.append((num_real, filling))
        layout.append(np.zeros(filling, np.int32), 0)
    responses = [groups[group].responses[sample] for group, sample in samples]
    predictors = np.concatenate([np.empty(0, np.int64), *layout.predictors])
    predict_at, predict_index = np.unique(predictors, return_inverse=True)
    return PackedBatch(
        tokens=torch.from_numpy(np.concatenate(layout.tokens).astype(np.int64)),
        position_ids=torch.from_numpy(np.concatenate(layout.positions).astype(np.int64)),
        trunks=layout.trunks,
        branches=layout.branches,
        predict_at=torch.from_numpy(predict_at.astype(np.int64)),
        predict_index=torch.from_numpy(predict_index.astype(np.int64)),
        targets=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *responses]).astype(np.int64)),
        samples=samples,
        sample_lengths=[len(response) for response in responses],
        num_real=num_real,
        routing=_routing(layout),
    )


def _routing(layout: _Layout) -> Tensor | None:
    """That of all tokens; the filling goes to the first experts. None: of none of them."""
    if not layout.routing:
        return None
    known = np.concatenate(layout.routing)
    filling = np.broadcast_to(np.arange(known.shape[-1], dtype=known.dtype), (layout.end - len(known), *known.shape[1:]))
    chosen = np.concatenate([known, filling])
    return torch.from_numpy(chosen if chosen.itemsize == 1 else chosen.astype(np.int16))
