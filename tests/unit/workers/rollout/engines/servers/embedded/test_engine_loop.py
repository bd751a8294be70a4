"""Weights that are loaded beside those that serve, and exchanged in the middle of decoding: against Hugging Face's forward under both versions."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conformance.models import broken_folders, prompt_of, write_pair
from workers.model.architecture import ModelError, read_architecture
from workers.rollout.engines.servers.embedded.engine_loop import Engine
from workers.rollout.engines.servers.embedded.model import Model
from workers.rollout.engines.servers.embedded.model_runner import Forward
from workers.rollout.engines.servers.embedded.requests import Request, Sampling
from workers.rollout.engines.servers.embedded.scheduler import Scheduler

CONTEXT, SLOTS, CHUNK = 256, 6, 16
TOLERANCE = 1e-5
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), "llama")


class Rig:
    """An engine whose steps the test makes itself, in the place of its thread; `versions`: the folders behind the names."""

    def __init__(self, folder: Path) -> None:
        architecture = read_architecture(folder)
        self.model = Model(folder, architecture, torch.float32, SLOTS, CONTEXT)
        self.scheduler = Scheduler(SLOTS, CONTEXT, CHUNK, "0")
        self.engine = Engine(Forward(self.model, 1), self.scheduler, None, lambda request: None)
        self.versions = {"0": folder}
        self.requests: list[Request] = []

    def submit(self, prompt: list[int], length: int) -> Request:
        seed = len(self.requests)
        self.requests.append(Request(f"r{seed}", prompt, length, sampling=Sampling(seed=seed)))
        self.engine.submit(self.requests[-1])
        return self.requests[-1]

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.engine._run_commands()
            assert self.engine._step(), "nothing to do"

    def exchange(self, folder: Path, mode: str) -> Future[None]:
        version = str(len(self.versions))
        self.versions[version] = folder
        return self.engine.exchange_weights(self.engine.load_weights(folder), version, mode)

    def finish(self) -> None:
        while not all(request.finish for request in self.requests):
            self.step()

    def errors(self, request: Request) -> list[tuple[str, float, float]]:
        """(version, largest error under it, and under the other folder) of each span."""
        found = []
        for span in request.spans:
            own = self.versions[span.version]
            other = next(folder for folder in self.versions.values() if folder != own)
            found.append((span.version, *(_error(folder, request, span.start, span.end) for folder in (own, other))))
        return found


@torch.no_grad()
def _error(folder: Path, request: Request, start: int, end: int) -> float:
    ids = torch.tensor([request.prompt + request.output])
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits[0, len(request.prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(request.prompt):, None])[:, 0]
    return float((torch.tensor(request.logprobs) - expected).abs()[start:end].max())


def test_every_token_is_of_the_version_that_its_span_names(pair: tuple[Path, Path]) -> None:
    """Exchanges meet requests that wait, that are in mid-prefill, that have just begun and that are far on; samples of one prompt among them."""
    rig = Rig(pair[0])
    siblings = [rig.submit(prompt_of(20, 1), 60) for _ in range(3)]
    rig.submit(prompt_of(7, 2), 90)
    rig.step(12)
    rig.submit(prompt_of(100, 3), 40)
    rig.step(2)
    late = [rig.submit(prompt_of(9, 4), 50), rig.submit(prompt_of(11, 5), 30)]
    rig.engine._run_commands()
    in_prefill = rig.requests[4]
    assert in_prefill.row is not None and not in_prefill.output and late[0] in rig.scheduler.queue
    swapped = rig.exchange(pair[1], "retract")
    rig.step()
    swapped.result(0)
    rig.step(25)
    rig.exchange(pair[0], "retract")
    rig.finish()
    assert [len(request.output) for request in rig.requests] == [request.max_new_tokens for request in rig.requests]
    assert all([span.version for span in request.spans] == ["0", "1", "2"] for request in siblings)
    assert in_prefill.spans[0].version == "1" and in_prefill.num_retractions == 2 and late[1].spans[-1].version == "2"
    for request in rig.requests:
        assert [span.start for span in request.spans] == [0, *(span.end for span in request.spans[:-1])]
        for version, error, other in rig.errors(request):
            assert error < TOLERANCE and other > 1000 * TOLERANCE, (request.rid, version, error, other)


def test_in_place_computes_nothing_again_and_names_the_versions_all_the_same(pair: tuple[Path, Path]) -> None:
    rig = Rig(pair[0])
    request = rig.submit(prompt_of(30), 40)
    rig.step(10)
    rig.exchange(pair[1], "in_place")
    prefilled, before = rig.scheduler.prefill_tokens, len(request.output)
    rig.finish()
    assert rig.scheduler.prefill_tokens == prefilled and request.num_retractions == 0
    assert [(span.version, span.start, span.end) for span in request.spans] == [("0", 0, before), ("1", before, 40)]
    (_, error, _), (_, mixed, _) = rig.errors(request)
    assert error < TOLERANCE < mixed
    fresh = rig.submit(prompt_of(30), 10)
    rig.finish()
    assert fresh.cached_tokens == 0 and rig.errors(fresh)[0][1] < TOLERANCE, "no prefix of the old weights serves a new request"


def test_it_decodes_under_the_old_weights_until_the_new_ones_are_whole(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And so it does where they cannot be loaded."""
    rig, going_on, begun = Rig(pair[0]), threading.Event(), threading.Event()
    load = rig.model.load_weights

    def slowly(source: Any) -> Any:
        begun.set()
        assert going_on.wait(DEADLINE_S)
        return load(source)

    monkeypatch.setattr(rig.model, "load_weights", slowly)
    request = rig.submit(prompt_of(12), 40)
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(rig.engine.load_weights, pair[1])
        assert begun.wait(DEADLINE_S)
        rig.step(15)
        assert not loading.done() and len(request.output) >= 14
        going_on.set()
        rig.engine.exchange_weights(loading.result(DEADLINE_S), "1", "retract")
    rig.versions["1"], cut = pair[1], len(request.output)
    rig.finish()
    assert [(span.version, span.end) for span in request.spans] == [("0", cut), ("1", 40)]
    assert max(error for _, error, _ in rig.errors(request)) < TOLERANCE


def test_weights_that_cannot_be_loaded_change_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    rig = Rig(pair[0])
    request, weights = rig.submit(prompt_of(12), 60), rig.model.weights
    for folder in broken_folders(pair[0], tmp_path).values():
        rig.step(5)
        with ThreadPoolExecutor(1) as thread, pytest.raises(ModelError, match=str(folder)):
            thread.submit(rig.engine.load_weights, folder).result(DEADLINE_S)
    rig.finish()
    assert rig.model.weights is weights and [(span.version, span.end) for span in request.spans] == [("0", 60)]
    assert request.num_retractions == 0 and _error(pair[0], request, 0, 60) < TOLERANCE


def test_the_old_weights_are_freed_by_the_exchange_and_what_is_not_taken_at_once(pair: tuple[Path, Path]) -> None:
    rig = Rig(pair[0])
    rig.submit(prompt_of(12), 20)
    rig.step(3)
    old, unused = weakref.ref(rig.model.weights), weakref.ref(rig.engine.load_weights(pair[1]))
    assert unused() is None, "loading keeps nothing"
    swapped = rig.exchange(pair[1], "retract")
    assert old() is not None
    rig.step()
    swapped.result(0)
    assert old() is None
    rig.finish()
