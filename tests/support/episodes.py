"""Workflows without engines or reward processes: a model whose tokens follow from what stands before them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workers.config import RewardConfig, WorkflowConfig
from workers.messages.codec import encode, from_workers
from workers.messages.from_worker import GroupParked
from workers.messages.groups import samples
from workers.messages.parts import Group, Lease, Partial, Purpose, Version
from workers.reward.pool.pool import RewardPool, VerifierError
from workers.rollout.engines.client import Generation, SamplingParams
from workers.rollout.engines.sampler import Sample
from workers.rollout.workflows.episode import Halted, Run
from workers.rollout.workflows.partials import park
from workers.rollout.workflows.rendering import PlainText, TextFormat
from workers.rollout.workflows.workflow import Parts, Workflow

END = 0
"""The token that ends a turn."""
OLD = Version(1, 1)
PROMPT = "12 + 30 ="


def make_lease(**changes: Any) -> Lease:
    group_id = "e1.7" if changes.get("purpose") is Purpose.evaluation else "g7"
    return Lease(**{"group_id": group_id, "attempt": 1, "purpose": Purpose.training, "version": Version(1, 1), "prompt_id": "p9", "prompt": PROMPT,
                    "verifier": "numeric", "reference": "42", "seed": 5, **changes})


class Chatter:
    """Stands for the sampler. Texts are UTF-8 bytes; a token is drawn by what stands before it, `seed` and all, and one in `ends_in` ends a turn.
    After `budget` tokens generation is halted. `says`: what it says at each turn, instead. Each token is sent to the expert of its own number."""

    def __init__(self, budget: int | None = None, version: Version = OLD, ends_in: int = 6, says: Callable[[str], str] | None = None) -> None:
        self.budget, self.version, self.ends_in, self.says = budget, version, ends_in, says
        self.num_sampled = 0
        self.rids: set[str] = set()
        self.params: list[SamplingParams] = []

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def knows(self, tokens: Sequence[int]) -> bool:
        return max(tokens) < 256

    def text(self, tokens: list[int], stop: tuple[str, ...]) -> str:
        text = bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")
        cuts = [place for place in (text.find(string) for string in stop) if place >= 0]
        return text[: min(cuts)] if cuts else text

    async def sample(self, lease: Lease, rid: str, prompt: list[int], params: SamplingParams, seed: int, sample: Sample) -> Sample:
        self.rids.add(rid)
        self.params.append(params)
        planned = [*self.says(self.text(prompt, ())).encode(), END] if self.says else None
        while not sample.finished:
            await asyncio.sleep(0)
            if self.budget == 0:
                break
            drawn = zlib.crc32(np.array([*prompt, *sample.tokens, seed], np.int64).tobytes())
            token = planned[len(sample.tokens)] if planned else END if drawn % self.ends_in == 0 else 97 + drawn % 26
            sample.add(Generation([token], [-(1 + drawn % 7) / 8], [(self.version, 0, 1)], "stop", routing=experts([*prompt, *sample.tokens])))
            self.num_sampled += 1
            self.budget = None if self.budget is None else self.budget - 1
            sample.cut = token != END and len(sample.tokens) >= params.max_new_tokens
            sample.finished = sample.cut or token == END
        return sample


def experts(tokens: Sequence[int]) -> bytes:
    """One for each token."""
    return bytes(token % 251 for token in tokens)


def assert_routed(group: Group) -> None:
    """Every token but a sample's last has come with its own expert."""
    for view in samples(group):
        assert view.routing is not None and view.routing.tobytes() == experts([*group.prompt.tolist(), *view.tokens[:-1].tolist()])


class Judge:
    """Stands for the reward pool: the score of a completion by `score`; programs print what `python` says. `fails`: no score at all."""

    def __init__(self, score: Callable[[str], float] = lambda completion: (zlib.crc32(completion.encode()) % 5) / 4,
                 python: Callable[[str], str] = str.upper, fails: bool = False) -> None:
        self._score, self._python, self._fails = score, python, fails
        self.asked: list[tuple[str, str, str, str]] = []

    async def score(self, prompt: str, completion: str, reference: str, verifier: str) -> float:
        await asyncio.sleep(0)
        self.asked.append((prompt, completion, reference, verifier))
        if self._fails:
            raise VerifierError("no score")
        return self._score(completion)

    async def execute(self, code: str) -> str:
        await asyncio.sleep(0)
        return self._python(code)


def make_workflow(chatter: Chatter, rewards: Judge | RewardPool | None = None, run: Run | None = None, *, context: int = 400,
                  text: TextFormat | None = None, **config: Any) -> Workflow:
    settings = WorkflowConfig(**{"group_size": 2, "max_new_tokens": 8, **config})
    parts = Parts(chatter, rewards or Judge(), settings, RewardConfig(), context, text or PlainText())  # type: ignore[arg-type]
    return Workflow(parts, run)


async def run_or_park(workflow: Workflow, lease: Lease) -> Group | Partial:
    """The group, or what is given back of it, as it arrives elsewhere."""
    record = workflow.begin(lease)
    try:
        group = await workflow.run(lease, record)
        assert_routed(group)
        return group
    except* Halted:
        pass
    arrived = from_workers(1 << 24).decode(encode(GroupParked(park(lease, record))))
    assert isinstance(arrived, GroupParked)
    return arrived.partial


def leaf(error: BaseException) -> BaseException:
    """The first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
