"""What a group of this run can be. A worker that sends anything else is broken, or no worker: nothing of it gets any further. Pure.

    token ids      in the model's vocabulary
    sequences      within engine.context_length, with the prompt; so many episodes as were leased
    log-probs      at most 0, and of tokens that can have been drawn at all
    rewards        what reward.* makes of scores, which are in [0, 1]
    versions       of weights that there have been (those of an earlier incarnation that were lost since: lineage.py)
    routing        with algorithm.router_replay=rollout, of every token that was fed: experts that there are, no one twice for a token in a layer

That the arrays fit together is checked before: messages/groups.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.config import Config, RoutingShape
from workers.messages.codec import MessageError
from workers.messages.from_worker import GroupRejected
from workers.messages.groups import check_group, check_partial, distinct, group_firsts
from workers.messages.parts import Group, Partial, Purpose, Version

MIN_LOGPROB, MAX_LOGPROB = -100.0, 1e-2
"""The probability of a token that was drawn is none that float32 cannot hold (e^-87), nor over 1 by more than rounding."""
MAX_SEQUENCES = 10_000
"""Of one episode; each conversation is one, or each turn of a partial."""
UNBOUNDED = 2**31
Rules = dict[str, bool]


@dataclass(frozen=True)
class Bounds:
    """`vocab_size`: 2^31 where the model's is not known; `num_episodes`: of a lease; `rewards`: the least and the greatest."""

    vocab_size: int
    context_length: int
    num_episodes: dict[Purpose, int]
    rewards: tuple[float, float]
    routing: RoutingShape | None = None

    @staticmethod
    def of(config: Config) -> Bounds:
        """The bounds of a run, whose rewards are rounded to float32 on their way."""
        least, greatest = config.reward.wrong - config.reward.overlong_penalty, config.reward.correct
        rounding = 1e-6 * (abs(least) + abs(greatest))
        return Bounds(config.model.vocab_size or UNBOUNDED, config.engine.context_length,
                      {Purpose.training: config.workflow.group_size, Purpose.evaluation: config.evaluation.num_samples},
                      (least - rounding, greatest + rounding), config.replayed)

    def check(self, piece: Group | Partial, newest: Version) -> None:
        """Raise `MessageError`, naming the rule, unless `piece` is one of this run. `newest`: the newest weights that anybody may have."""
        if isinstance(piece, Group):
            check_group(piece)
            self._require(f"group {piece.group_id}", self._group_rules(piece))
        else:
            check_partial(piece)
            self._require(f"group {piece.group_id}, given back", self._partial_rules(piece))
        epochs, steps = np.asarray(piece.epochs), np.asarray(piece.steps)
        late = np.flatnonzero((epochs > newest.epoch) | ((epochs == newest.epoch) & (steps > newest.step)))
        if late.size:
            version = Version(int(epochs[late[0]]), int(steps[late[0]]))
            raise MessageError(f"group {piece.group_id}: it has tokens of version {version}, and the newest that there is is {newest}")

    def check_rejected(self, message: GroupRejected) -> None:
        """The same of a group that is not to be trained on."""
        most = self.num_episodes[Purpose.training] * MAX_SEQUENCES * self.context_length
        self._require(f"group {message.group_id}, rejected", {
            "its score must be from 0 to 1": 0 <= message.score <= 1, f"it must have at most {most} tokens": message.num_tokens <= most})

    @staticmethod
    def _require(what: str, rules: Rules) -> None:
        for rule, holds in rules.items():
            if not holds:
                raise MessageError(f"{what}: {rule}")

    def _group_rules(self, group: Group) -> Rules:
        number, (least, greatest) = self.num_episodes[group.purpose], self.rewards
        return {
            f"it must have {number} episodes of at most {MAX_SEQUENCES} sequences each":
                group_firsts(group).size == number and group.lengths.size <= number * MAX_SEQUENCES,
            f"prompt and sample must have at most engine.context_length={self.context_length} tokens":
                group.prompt.size + int(group.lengths.max()) <= self.context_length,
            "some token must be trained on": bool(group.loss_mask.any()),
            self._vocabulary: self._known(group.prompt) and self._known(group.tokens),
            self._logprobs: _drawn(group.logprobs),
            "scores must be from 0 to 1": bool(((group.scores >= 0) & (group.scores <= 1)).all()),
            self._routing: self._routed(group.routing, group.prompt.size * group.lengths.size + group.tokens.size - group.lengths.size)
                if group.purpose is Purpose.training else group.routing is None,
            f"rewards must be from {least:g} to {greatest:g} (reward.wrong, correct, overlong_penalty)":
                bool(((group.rewards >= least) & (group.rewards <= greatest)).all()),
        }

    def _partial_rules(self, partial: Partial) -> Rules:
        number, turns = self.num_episodes[Purpose.training], partial.turns
        outside = np.zeros(1) if turns is None else np.asarray(turns.outside_lengths)
        episodes = np.arange(partial.lengths.size) if turns is None else np.asarray(turns.episodes)
        conversations = np.zeros(episodes.size, np.int64) if turns is None else np.asarray(turns.conversations)
        _, places = np.unique(np.stack([episodes, conversations]), axis=1, return_inverse=True)
        lengths = np.bincount(places.ravel(), np.asarray(partial.lengths) + outside)
        return {
            "it must be for training": partial.purpose is Purpose.training,
            f"it must have {number} samples": turns is not None or partial.lengths.size == number,
            f"it must be of {number} episodes of at most {MAX_SEQUENCES} turns each":
                bool((episodes < number).all()) and episodes.size <= number * MAX_SEQUENCES,
            f"a conversation must have at most engine.context_length={self.context_length} tokens": bool((lengths <= self.context_length).all()),
            self._vocabulary: self._known(partial.tokens) and (turns is None or self._known(turns.outside)),
            self._logprobs: _drawn(partial.logprobs),
            self._routing: partial.routing is None or self._routed(partial.routing),
        }

    @property
    def _vocabulary(self) -> str:
        return f"token ids must be below {self.vocab_size}, the model's vocabulary"

    @property
    def _logprobs(self) -> str:
        return f"log-probs must be from {MIN_LOGPROB:g} to 0"

    @property
    def _routing(self) -> str:
        shape = self.routing
        return "it must have no routing (algorithm.router_replay=off)" if shape is None else (
            f"it must have {shape.experts_per_token} of {shape.num_experts} experts for each token but the last, in {shape.num_layers} layers")

    def _routed(self, routing: np.ndarray | None, num_tokens: int | None = None) -> bool:
        """Whether `routing` is that of `num_tokens` tokens (None: of any number)."""
        shape = self.routing
        if shape is None or routing is None:
            return shape is None and routing is None
        if routing.size % shape.token_bytes or num_tokens not in (None, routing.size // shape.token_bytes):
            return False
        known = vars(routing).get("fits")  # a replayed one's values are not those that were judged (recording/contents.py)
        if known is None:
            experts = np.asarray(routing).view(shape.dtype).reshape(-1, shape.experts_per_token)
            known = vars(routing)["fits"] = not experts.size or (int(experts.max()) < shape.num_experts and distinct(experts))
        return bool(known)

    def _known(self, tokens: np.ndarray) -> bool:
        return tokens.size == 0 or int(tokens.max()) < self.vocab_size


def _drawn(logprobs: np.ndarray) -> bool:
    return bool(((logprobs >= MIN_LOGPROB) & (logprobs <= MAX_LOGPROB)).all())
