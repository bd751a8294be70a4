"""What the model has said in an episode, turn by turn: what is trained on, and what another worker goes on from.

    dialogue   [outside | sampled] [outside | sampled] ...       outside: the prompt, users, tools; sampled: the model, token for token

An episode that was given back half-way is run again from its beginning: a call of the model with the very tokens before it that an earlier
call had gets that call's sample, whole or to go on with, so that nothing is sampled twice. Calls are found by these tokens and not by their
order, which may differ where calls run beside each other; calls with the same tokens, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.rollout.engines.sampler import Sample


@dataclass
class Turn:
    """One call of the model: the tokens before it since the turn before, or since the dialogue's beginning, and what it sampled."""

    outside: list[int]
    sample: Sample


@dataclass(eq=False)
class Dialogue:
    """One sequence of tokens as the model sees it, in turns. `trained`: it is trained on."""

    turns: list[Turn] = field(default_factory=list)
    trained: bool = True


class EpisodeRecord:
    """The calls of one episode so far. `recorded`: all tokens before a call of an earlier run of it, and what that call sampled; `over`: no more
    come; `judged`: the text that was judged last by then."""

    def __init__(self, recorded: Iterable[tuple[list[int], Sample]] = ()) -> None:
        self.over, self.judged = False, ""
        self._calls: list[tuple[Dialogue, Turn]] = []
        self._recorded: dict[tuple[int, ...], list[Sample]] = {}
        for before, sample in recorded:
            self._recorded.setdefault(tuple(before), []).append(sample)

    @property
    def dialogues(self) -> list[Dialogue]:
        """In the order of their first calls."""
        return list(dict.fromkeys(dialogue for dialogue, _ in self._calls))

    @property
    def samples(self) -> list[Sample]:
        """Of all calls."""
        return [turn.sample for _, turn in self._calls]

    @property
    def num_unused(self) -> int:
        """Recorded samples that no call has asked for."""
        return sum(bool(sample.tokens) for samples in self._recorded.values() for sample in samples)

    def begin(self, dialogue: Dialogue, before: list[int], outside: list[int], max_new_tokens: int) -> Sample:
        """Note a call: the next turn of `dialogue`, after the tokens `before`, of which the last are `outside`. Returns its sample: a
        recorded one, or an empty one."""
        turn = Turn(list(outside), self._found(before, max_new_tokens))
        dialogue.turns.append(turn)
        self._calls.append((dialogue, turn))
        return turn.sample

    def held(self) -> list[tuple[int, Turn]]:
        """What is to be given back, in the order of the calls: each turn, with its dialogue's number. A recorded sample that no
        call has asked for stands in a dialogue of its own, after all tokens before it."""
        numbers = {dialogue: number for number, dialogue in enumerate(self.dialogues)}
        unused = [Turn(list(before), sample) for before, samples in self._recorded.items() for sample in samples]
        return [(numbers[dialogue], turn) for dialogue, turn in self._calls] + list(enumerate(unused, len(numbers)))

    def _found(self, before: list[int], max_new_tokens: int) -> Sample:
        found = self._recorded.get(tuple(before), []) if self._recorded else []
        for index, sample in enumerate(found):
            if len(sample.tokens) <= max_new_tokens:  # the same call, then
                if len(sample.tokens) == max_new_tokens and not sample.finished:
                    sample.finished = sample.cut = True
                del found[index]
                return sample
        return Sample()


@dataclass
class GroupRecord:
    """The lease's prompt as token ids, and its episodes."""

    prompt: list[int]
    episodes: list[EpisodeRecord]

    @property
    def num_live(self) -> int:
        """Episodes in which more may be sampled."""
        return sum(not episode.over for episode in self.episodes)
