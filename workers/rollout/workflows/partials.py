"""Unfinished groups: out of the records of a lease that was interrupted for good, and back into records where it goes on.

    record --park--> Partial --> GroupParked --> coordinator --> Lease.partial --restore--> record

`Turns` says what stands before each sample; without, every sample is an answer to the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from workers.messages.arrays import Bool, Float32, Int32, Uint8
from workers.messages.codec import MessageError
from workers.messages.groups import check_partial
from workers.messages.parts import Lease, Partial, Turns, Version
from workers.rollout.engines.sampler import Sample
from workers.rollout.workflows.transcript import EpisodeRecord, GroupRecord, Turn


class PartialError(ValueError):
    """A partial that does not fit its lease. Its text names the rule."""


def park(lease: Lease, record: GroupRecord) -> Partial:
    """What has been generated for `lease`."""
    entries = [entry for episode in range(len(record.episodes)) for entry in _entries(episode, record)]
    samples = [turn.sample for _, _, turn in entries]
    epochs, steps, run_lengths = flatten_versions([version for sample in samples for version in sample.versions])
    lasts = set(_lasts([entry[:2] for entry in entries], [sample.finished for sample in samples]).values())
    routing = b"".join(sample.routing for index, sample in enumerate(samples) if index in lasts)
    return Partial(
        group_id=lease.group_id, attempt=lease.attempt, purpose=lease.purpose, lengths=_integers([len(sample.tokens) for sample in samples]),
        finished=_flags([sample.finished for sample in samples]), tokens=_integers([token for sample in samples for token in sample.tokens]),
        logprobs=Float32.of(np.array([logprob for sample in samples for logprob in sample.logprobs], np.float32)),
        epochs=epochs, steps=steps, run_lengths=run_lengths, turns=_turns(entries, record.prompt),
        routing=Uint8.of(np.frombuffer(routing, np.uint8)) if routing else None)


def _lasts(conversations: Sequence[tuple[int, ...]], finished: Sequence[bool]) -> dict[tuple[int, ...], int]:
    """The place of the last finished sample of each of `conversations`, whose routing begins with that of those before."""
    return {conversation: index for index, conversation in enumerate(conversations) if finished[index]}


def flatten_versions(versions: Sequence[Version]) -> tuple[Int32, Int32, Int32]:
    """The versions of tokens, run-length coded: epochs, steps, run lengths."""
    runs = [(version, len(list(run))) for version, run in groupby(versions)]
    return (_integers([version.epoch for version, _ in runs]), _integers([version.step for version, _ in runs]),
            _integers([length for _, length in runs]))


def _entries(episode: int, record: GroupRecord) -> list[tuple[int, int, Turn]]:
    """Episode, dialogue and turn, for every turn that is given back; for an episode without any, the answer that it has not begun."""
    found = [(episode, number, turn) for number, turn in record.episodes[episode].held()]
    return found or [(episode, 0, Turn(record.prompt, Sample()))]


def _turns(entries: list[tuple[int, int, Turn]], prompt: list[int]) -> Turns:
    firsts = {entry[:2]: index for index, entry in reversed(list(enumerate(entries)))}
    prompted = [firsts[entry[:2]] == index and entry[2].outside[: len(prompt)] == prompt for index, entry in enumerate(entries)]
    outside = [turn.outside[len(prompt) if begins else 0:] for begins, (_, _, turn) in zip(prompted, entries, strict=True)]
    return Turns(
        episodes=_integers([episode for episode, _, _ in entries]), conversations=_integers([number for _, number, _ in entries]),
        prompted=_flags(prompted), outside_lengths=_integers([len(tokens) for tokens in outside]),
        outside=_integers([token for tokens in outside for token in tokens]), cut=_flags([turn.sample.cut for _, _, turn in entries]))


def restore(lease: Lease, prompt: list[int], num_episodes: int, max_new_tokens: int) -> list[EpisodeRecord]:
    """The records that `lease` begins with: those of its partial, or empty ones. Raises `PartialError` on a partial that does not fit."""
    partial = lease.partial
    if partial is None:
        return [EpisodeRecord() for _ in range(num_episodes)]
    _check(partial, lease, num_episodes, max_new_tokens)
    samples = _samples(partial, max_new_tokens)
    if partial.turns is None:
        _give_routing(partial, [len(prompt)] * len(samples), [(number,) for number in range(len(samples))], samples)
        return [EpisodeRecord([(prompt, sample)]) for sample in samples]
    turns = partial.turns
    ends = np.cumsum(turns.outside_lengths).tolist()
    outside = [turns.outside[start:end].tolist() for start, end in pairwise([0, *ends])]
    recorded: list[list[tuple[list[int], Sample]]] = [[] for _ in range(num_episodes)]
    said: dict[tuple[int, int], list[int]] = {}
    conversations = list(zip(turns.episodes.tolist(), turns.conversations.tolist(), strict=True))
    num_before = []
    for index, (episode, number) in enumerate(conversations):
        if partial.finished[index]:
            samples[index].cut = bool(turns.cut[index])
        before = [*said.get((episode, number), []), *(prompt if turns.prompted[index] else []), *outside[index]]
        said[episode, number] = before + samples[index].tokens
        recorded[episode].append((before, samples[index]))
        num_before.append(len(before))
    _give_routing(partial, num_before, conversations, samples)
    return [EpisodeRecord(calls) for calls in recorded]


def _give_routing(partial: Partial, num_before: list[int], conversations: Sequence[tuple[int, ...]], samples: list[Sample]) -> None:
    """Give the finished ones of `samples`, each with `num_before` tokens before it, their part of the partial's routing. Raises `PartialError`."""
    if partial.routing is None:
        return
    lasts = _lasts(conversations, partial.finished.tolist())
    fed = [before + len(sample.tokens) - 1 for before, sample in zip(num_before, samples, strict=True)]
    total = sum(fed[index] for index in lasts.values())
    content, (token_bytes, rest) = partial.routing.tobytes(), divmod(partial.routing.size, max(1, total))
    if rest:
        raise PartialError(f"group {partial.group_id}, given back in attempt {partial.attempt}: {len(content)} bytes of routing: must be as many "
                           f"for each of {total} tokens")
    begins = dict(zip(sorted(lasts.values()), np.cumsum([0, *(fed[index] for index in sorted(lasts.values()))]).tolist(), strict=False))
    for index, conversation in enumerate(conversations):
        if partial.finished[index]:
            start = begins[lasts[conversation]]
            samples[index].routing = content[start * token_bytes : (start + fed[index]) * token_bytes]


def _samples(partial: Partial, max_new_tokens: int) -> list[Sample]:
    runs = zip(partial.epochs.tolist(), partial.steps.tolist(), partial.run_lengths.tolist(), strict=True)
    versions = [version for epoch, step, length in runs for version in [Version(epoch, step)] * length]
    tokens, logprobs = partial.tokens.tolist(), partial.logprobs.tolist()
    samples, start = [], 0
    for length, finished in zip(partial.lengths.tolist(), partial.finished.tolist(), strict=True):
        end = start + length
        ended = finished or length == max_new_tokens
        begun = length > 0 and not ended
        samples.append(Sample(tokens[start:end], logprobs[start:end], versions[start:end], finished=ended, cut=length == max_new_tokens,
                              num_interruptions=int(begun), tokens_interrupted=length if begun else 0))
        start = end
    return samples


def _check(partial: Partial, lease: Lease, num_episodes: int, max_new_tokens: int) -> None:
    try:
        check_partial(partial)
    except MessageError as error:
        raise PartialError(str(error)) from error
    lengths, turns = np.asarray(partial.lengths), partial.turns
    rules = {
        f"must be of group {lease.group_id} and for {lease.purpose.value}":
            partial.group_id == lease.group_id and partial.purpose is lease.purpose,
        f"must have {num_episodes} samples": turns is not None or lengths.size == num_episodes,
        f"must have episodes below {num_episodes}": turns is None or bool((turns.episodes < num_episodes).all()),
        f"must have at most workflow.max_new_tokens={max_new_tokens} tokens a sample": bool((lengths <= max_new_tokens).all()),
        "a finished sample must have a token": not bool((np.asarray(partial.finished) & (lengths == 0)).any()),
    }
    for rule, holds in rules.items():
        if not holds:
            raise PartialError(f"group {partial.group_id}, given back in attempt {partial.attempt}: {rule}")


def _integers(values: list[int]) -> Int32:
    return Int32.of(np.array(values, np.int32))  # an empty list alone would be of float64


def _flags(values: list[bool]) -> Bool:
    return Bool.of(np.array(values, np.bool_))
