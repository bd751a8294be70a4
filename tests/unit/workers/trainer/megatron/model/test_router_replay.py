"""One router's replay: which choice counts when, and what of it has a gradient. Whole models: tests/wire/.../parallel/test_layouts.py."""

from __future__ import annotations

import torch

from workers.trainer.megatron.model.router_replay import RouterReplay

FIRST = torch.tensor([[[0, 1], [2, 3]], [[1, 2], [3, 0]]], dtype=torch.uint8)  # two tokens, two layers
SECOND = torch.tensor([[[3, 2], [1, 0]], [[0, 2], [2, 1]]], dtype=torch.int16)


def own(scores: torch.Tensor, topk: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(scores, topk, dim=1)


def experts(replay: RouterReplay, scores: torch.Tensor) -> list[list[int]]:
    values, chosen = replay.get_replay_topk(scores, 2, default_compute_topk=own)
    assert torch.equal(values, scores.gather(1, chosen)) and chosen.dtype is torch.int64
    return chosen.tolist()


def test_the_told_experts_are_chosen_whatever_their_scores_and_their_scores_learn() -> None:
    scores = torch.arange(8.0).view(2, 4).requires_grad_()
    replay = RouterReplay(1)
    replay.begin(gradients=True)
    replay.choose(FIRST)
    values, chosen = replay.get_replay_topk(scores, 2, default_compute_topk=own)
    assert chosen.tolist() == [[2, 3], [3, 0]]
    (values * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[0, 0, 1, 2], [4, 0, 0, 3]]


def test_what_is_made_again_goes_where_it_went_in_the_order_in_which_it_went() -> None:
    """Micro-batches of a pipeline stage: two forward passes, one of them without a choice, before the first is made again."""
    replay, scores = RouterReplay(0), torch.arange(8.0).view(2, 4)
    replay.begin(gradients=True)
    with torch.no_grad():
        for chosen, expected in ((FIRST, [[0, 1], [1, 2]]), (None, [[3, 2], [3, 2]])):
            replay.choose(chosen)
            assert experts(replay, scores) == expected
    assert experts(replay, scores) == [[0, 1], [1, 2]]
    with torch.no_grad():
        replay.choose(SECOND)
        assert experts(replay, scores) == [[3, 2], [0, 2]]
    assert experts(replay, scores) == [[3, 2], [3, 2]] and experts(replay, scores) == [[3, 2], [0, 2]]
    replay.begin(gradients=False)
    assert experts(replay, scores) == [[3, 2], [3, 2]], "nothing is left of it"


def test_where_nothing_is_made_again_nothing_is_kept() -> None:
    replay, scores = RouterReplay(0), torch.arange(8.0).view(2, 4)
    for gradients in (False, True):  # a pass without gradients, and one whose activations are kept
        replay.begin(gradients)
        with torch.set_grad_enabled(gradients):
            for chosen in (FIRST, SECOND, FIRST):
                replay.choose(chosen)
                assert experts(replay, scores) == chosen[:, 0].tolist()
