"""Unfinished groups: out of the samples of a lease that was interrupted for good, and back into samples where it goes on.

    samples --park--> Partial --> GroupParked --> coordinator --> Lease.partial --restore--> samples
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.codec import MessageError
from workers.messages.groups import check_partial
from workers.messages.types import Lease, Partial, Version
from workers.rollout.sampler import Sample


class PartialError(ValueError):
    """A partial that does not fit its lease. Its text names the rule."""


def park(lease: Lease, samples: Sequence[Sample]) -> Partial:
    """What has been generated for `lease`."""
    lengths, tokens, logprobs, epochs, steps, run_lengths = flatten(samples)
    return Partial(group_id=lease.group_id, attempt=lease.attempt, purpose=lease.purpose, lengths=lengths,
                   finished=Bool.of([sample.finished for sample in samples]), tokens=tokens, logprobs=logprobs, epochs=epochs, steps=steps,
                   run_lengths=run_lengths)


def flatten(samples: Sequence[Sample]) -> tuple[Int32, Int32, Float32, Int32, Int32, Int32]:
    """Lengths, tokens and log-probs of all samples, one after the other, and their versions: epochs, steps, run lengths."""
    versions = [version for sample in samples for version in sample.versions]
    runs = [(version, len(list(run))) for version, run in groupby(versions)]
    return (_integers([len(sample.tokens) for sample in samples]), _integers([token for sample in samples for token in sample.tokens]),
            Float32.of(np.array([logprob for sample in samples for logprob in sample.logprobs], np.float32)),
            _integers([version.epoch for version, _ in runs]), _integers([version.step for version, _ in runs]),
            _integers([length for _, length in runs]))


def restore(lease: Lease, num_samples: int, max_new_tokens: int) -> list[Sample]:
    """The samples that `lease` begins with: those of its partial, or empty ones. Raises `PartialError` on a partial that does not fit."""
    partial = lease.partial
    if partial is None:
        return [Sample() for _ in range(num_samples)]
    _check(partial, lease, num_samples, max_new_tokens)
    runs = zip(partial.epochs.tolist(), partial.steps.tolist(), partial.run_lengths.tolist(), strict=True)
    versions = [version for epoch, step, length in runs for version in [Version(epoch, step)] * length]
    tokens, logprobs = partial.tokens.tolist(), partial.logprobs.tolist()
    samples, start = [], 0
    for length, finished in zip(partial.lengths.tolist(), partial.finished.tolist(), strict=True):
        end = start + length
        ended = finished or length == max_new_tokens
        begun = length > 0 and not ended
        samples.append(Sample(tokens[start:end], logprobs[start:end], versions[start:end], finished=ended,
                              num_interruptions=int(begun), tokens_interrupted=length if begun else 0))
        start = end
    return samples


def _check(partial: Partial, lease: Lease, num_samples: int, max_new_tokens: int) -> None:
    try:
        check_partial(partial)
    except MessageError as error:
        raise PartialError(str(error)) from error
    lengths = np.asarray(partial.lengths)
    rules = {
        f"must be of group {lease.group_id} and for {lease.purpose.value}":
            partial.group_id == lease.group_id and partial.purpose is lease.purpose,
        f"must have {num_samples} samples": lengths.size == num_samples,
        f"must have at most workflow.max_new_tokens={max_new_tokens} tokens a sample": bool((lengths <= max_new_tokens).all()),
        "a finished sample must have a token": not bool((np.asarray(partial.finished) & (lengths == 0)).any()),
    }
    for rule, holds in rules.items():
        if not holds:
            raise PartialError(f"group {partial.group_id}, given back in attempt {partial.attempt}: {rule}")


def _integers(values: list[int]) -> Int32:
    return Int32.of(np.array(values, np.int32))  # an empty list alone would be of float64
