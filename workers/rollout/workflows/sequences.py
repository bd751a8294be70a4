"""Finished episodes to a group: every dialogue that is trained on is one sequence of tokens.

    dialogues    prompt | sampled | tool's answer | sampled          question about the prompt | sampled
                 \\___ what all begin with: Group.prompt ___/        the rest: tokens, of which the sampled ones are trained on
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from workers.config import RewardConfig, WorkflowConfig
from workers.messages.arrays import Bool, Float32, Int32, Uint8
from workers.messages.parts import Group, Lease, Purpose, Version
from workers.reward import shaping
from workers.rollout.workflows.episode import WorkflowError
from workers.rollout.workflows.partials import flatten_versions
from workers.rollout.workflows.transcript import Dialogue, EpisodeRecord


@dataclass(frozen=True)
class Finished:
    """An episode that has ended, its score in [0, 1], seconds that it generated and was judged, the beginning of what the model said, of an
    evaluation the answer in what was judged, and the scores of the verifiers that judged it last."""

    record: EpisodeRecord
    score: float
    generation_s: float
    reward_s: float
    first_text: str
    answer: str = ""
    part_scores: dict[str, float] = field(default_factory=dict)

    @property
    def longest_turn(self) -> int:
        """Tokens of the longest turn."""
        return max(len(sample.tokens) for sample in self.record.samples)


@dataclass(frozen=True)
class Sequence:
    """Tokens after a group's prompt, with the version that sampled each, or that stood when it was added."""

    tokens: list[int]
    logprobs: list[float]
    mask: list[bool]
    versions: list[Version]


def assemble(lease: Lease, finished: list[Finished], workflow: WorkflowConfig, reward: RewardConfig) -> Group:
    """The group of all episodes of `lease`. Raises `WorkflowError` where the workflow left nothing to train on."""
    name = workflow.name
    trained = [(number, dialogue) for number, episode in enumerate(finished) for dialogue in _trained(episode.record, name)]
    prompt = _common_beginning([dialogue for _, dialogue in trained], name)
    sequences = [sequence(dialogue, len(prompt)) for _, dialogue in trained]
    episodes = [number for number, _ in trained]
    epochs, steps, run_lengths = flatten_versions([version for entry in sequences for version in entry.versions])
    samples = [sample for episode in finished for sample in episode.record.samples]
    routing = b"".join(dialogue.turns[-1].sample.routing for _, dialogue in trained)  # a turn's has that of all tokens before it
    rewards = [shaping.reward(episode.score, episode.longest_turn, reward, workflow.max_new_tokens) for episode in finished]
    return Group(
        group_id=lease.group_id, attempt=lease.attempt, purpose=lease.purpose, prompt_id=lease.prompt_id,
        prompt=Int32.of(prompt), lengths=Int32.of([len(entry.tokens) for entry in sequences]),
        tokens=Int32.of([token for entry in sequences for token in entry.tokens]),
        logprobs=Float32.of(np.array([logprob for entry in sequences for logprob in entry.logprobs], np.float32)),
        loss_mask=Bool.of([flag for entry in sequences for flag in entry.mask]),
        rewards=Float32.of([rewards[number] for number in episodes]),
        scores=Float32.of([finished[number].score for number in episodes]),
        epochs=epochs, steps=steps, run_lengths=run_lengths,
        num_interruptions=sum(sample.num_interruptions for sample in samples),
        tokens_interrupted=sum(sample.tokens_interrupted for sample in samples),
        generation_s=max(episode.generation_s for episode in finished), reward_s=max(episode.reward_s for episode in finished),
        first_text=finished[0].first_text[:2000 if lease.purpose is Purpose.evaluation else 200], episodes=Int32.of(np.array(episodes, np.int32)),
        answers=[episode.answer for episode in finished] if lease.purpose is Purpose.evaluation else [],
        part_scores=_means([episode.part_scores for episode in finished if len(episode.part_scores) > 1]),
        routing=Uint8.of(np.frombuffer(routing, np.uint8)) if routing else None)


def _means(scores: list[dict[str, float]]) -> dict[str, float]:
    """Of the parts of weighted sums, each over the episodes that it judged."""
    found = {name: [each[name] for each in scores if name in each] for each in scores for name in each}
    return {name: sum(values) / len(values) for name, values in found.items()}


def _trained(record: EpisodeRecord, name: str) -> Iterator[Dialogue]:
    found = [dialogue for dialogue in record.dialogues if dialogue.trained and dialogue.turns]
    if not found:
        raise WorkflowError(f"workflow {name} left nothing to train on: an episode must have a turn of the model in a conversation that is trained")
    yield from found


def _common_beginning(dialogues: list[Dialogue], name: str) -> list[int]:
    """The tokens that all dialogues begin with, none of them sampled in one of these dialogues."""
    common = dialogues[0].turns[0].outside
    for dialogue in dialogues[1:]:
        other = dialogue.turns[0].outside
        if other[: len(common)] != common:
            same = next((place for place, (one, two) in enumerate(zip(common, other, strict=False)) if one != two), min(len(common), len(other)))
            common = common[:same]
    if not common:
        raise WorkflowError(f"workflow {name}: conversations of a group begin with different tokens; all must begin with the same one. Begin "
                            "them with the episode's prompt, or use a chat template")
    return common


def sequence(dialogue: Dialogue, skip: int) -> Sequence:
    """The tokens of `dialogue` without the first `skip`, which come from outside. Tokens from outside have a log-prob of 0, are not trained on, and
    have the version of the sampled token before them; those before the first one have that one's."""
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    versions: list[Version] = []
    last = dialogue.turns[0].sample.versions[0]
    for number, turn in enumerate(dialogue.turns):
        outside, sample = turn.outside[skip if number == 0 else 0:], turn.sample
        tokens += [*outside, *sample.tokens]
        logprobs += [*([0.0] * len(outside)), *sample.logprobs]
        mask += [*([False] * len(outside)), *([True] * len(sample.tokens))]
        versions += [*([last] * len(outside)), *sample.versions]
        last = sample.versions[-1]
    return Sequence(tokens, logprobs, mask, versions)
