"""What the trainer trains on: groups of responses to one prompt, as numpy arrays, checked before they are used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class TrainGroup:
    """The responses to one prompt, n of them, with what was recorded while they were sampled.

    `prompt` int32 [P]; per response i: `responses` int32 [L_i], `behavior_logprobs` float32 [L_i] (log-probs at sampling
    time, at the sampling temperature), `loss_mask` bool [L_i] (tokens that are trained on), `versions` int32 [L_i] (the
    weight version that sampled each token); `rewards` float32 [n]; `episodes` int32 [n] the episode that each response
    is of, ascending from 0 (None: one each). `routing`: the experts that the engine
    chose for the inputs of response i, prompt and response but its last token: uint8 or uint16 [P + L_i - 1, layers with experts, experts a token].
    """

    group_id: str
    prompt: NDArray[np.int32]
    responses: list[NDArray[np.int32]]
    behavior_logprobs: list[NDArray[np.float32]]
    loss_mask: list[NDArray[np.bool_]]
    rewards: NDArray[np.float32]
    versions: list[NDArray[np.int32]]
    episodes: NDArray[np.int32] | None = None
    routing: list[NDArray[np.uint8 | np.uint16]] | None = None

    @property
    def num_samples(self) -> int:
        """How many responses the group holds."""
        return len(self.responses)

    @property
    def num_valid_tokens(self) -> int:
        """How many response tokens are trained on."""
        return int(sum(mask.sum() for mask in self.loss_mask))

    def check(self, vocab_size: int) -> None:
        """Raise ValueError naming the group, the value, the rule and the remedy where the group cannot be trained on."""
        where = f"group {self.group_id}"
        _check_tokens(f"{where}: prompt", self.prompt, vocab_size)
        if not self.responses:
            raise ValueError(f"{where}: has no responses, it must have at least one. Drop the group")
        for name in ("behavior_logprobs", "loss_mask", "versions", "rewards"):
            number = len(getattr(self, name))
            if number != self.num_samples:
                raise ValueError(f"{where}: {name} has {number} entries for {self.num_samples} responses. Give one for each")
        _check_array(f"{where}: rewards", self.rewards, np.float32, self.num_samples)
        if not np.isfinite(self.rewards).all():
            raise ValueError(f"{where}: rewards {self.rewards.tolist()} must be finite. Check the verifier")
        if self.episodes is not None:
            _check_array(f"{where}: episodes", self.episodes, np.int32, self.num_samples)
        if self.routing is not None and [len(rows) for rows in self.routing] != [len(self.prompt) + len(tokens) - 1 for tokens in self.responses]:
            raise ValueError(f"{where}: routing of {[len(rows) for rows in self.routing]} tokens must be of the prompt and each response without its "
                             "last token. Set algorithm.router_replay=off")
        for index, response in enumerate(self.responses):
            name = f"{where}, response {index}"
            _check_tokens(name, response, vocab_size)
            _check_array(f"{name}: behavior_logprobs", self.behavior_logprobs[index], np.float32, len(response))
            _check_array(f"{name}: loss_mask", self.loss_mask[index], np.bool_, len(response))
            _check_array(f"{name}: versions", self.versions[index], np.int32, len(response))
            if not np.isfinite(self.behavior_logprobs[index][self.loss_mask[index]]).all():
                raise ValueError(f"{name}: behavior_logprobs of trained tokens must be finite. "
                                 "Have the server return the log-prob of every sampled token, or clear loss_mask there")


def _check_array(name: str, array: np.ndarray, dtype: type, length: int) -> None:
    if array.dtype != dtype:
        raise ValueError(f"{name} has dtype {array.dtype}, it must be {np.dtype(dtype)}. Convert it with .astype()")
    if array.shape != (length,):
        raise ValueError(f"{name} has shape {array.shape}, it must be ({length},). Align it with the response's tokens")


def _check_tokens(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    _check_array(name, tokens, np.int32, tokens.size)
    if tokens.size == 0:
        raise ValueError(f"{name}: is empty, it must hold at least one token. Drop it, or end a response with its stop token")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name}: token {low if low < 0 else high} is outside the vocabulary of {vocab_size}. "
                         "Use the tokenizer that came with the model")


def check_per_response(name: str, values: list[list[np.ndarray]], groups: list[TrainGroup]) -> None:
    """Raise ValueError unless `values` (group, response, token) is aligned with the responses and finite where trained."""
    if len(values) != len(groups):
        raise ValueError(f"{name} is for {len(values)} groups, the batch has {len(groups)}. Give one list for each group")
    for group, rows in zip(groups, values, strict=True):
        if [len(row) for row in rows] != [len(response) for response in group.responses]:
            raise ValueError(f"group {group.group_id}: {name} is not aligned with the responses. Give one value for each response token")
        if not all(np.isfinite(row[mask]).all() for row, mask in zip(rows, group.loss_mask, strict=True)):
            raise ValueError(f"group {group.group_id}: {name} must be finite for trained tokens. Recompute it with the current weights")


def check_step(groups: list[TrainGroup], minibatches: list[list[int]], proximal: list[list[np.ndarray]] | None) -> None:
    """Raise ValueError unless `minibatches` hold each group once, and `proximal`, if given, fits them (`check_per_response`)."""
    if sorted(index for part in minibatches for index in part) != list(range(len(groups))):
        raise ValueError(f"minibatches {minibatches} must hold each of the {len(groups)} groups once. Divide the batch with divide_batch")
    if proximal is not None:
        check_per_response("proximal log-probs", proximal, groups)
