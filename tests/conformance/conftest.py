"""The engine that a test talks to: `@pytest.mark.parametrize("engine", [...], indirect=True)` says which, or the fixture's default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance import engines
from tests.conformance.endpoint import Endpoint

HERE = Path(__file__).parent


class Engines:
    """The engine that was asked for last. There is one at a time: tests are in an order in which each is started once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._running = contextlib.ExitStack()
        self._name = ""
        self._endpoint: Endpoint | None = None

    def get(self, name: str) -> Endpoint:
        """The engine `name`, as in sglang-qwen3."""
        if name != self._name or self._endpoint is None:
            self.close()
            kind, family = name.split("-")
            start = {"embedded": engines.embedded, "sglang": engines.sglang}[kind]
            self._endpoint = self._running.enter_context(start(self._folders.mktemp(name), family))
            self._name = name
        return self._endpoint

    def close(self) -> None:
        """End the engine that runs."""
        self._running.close()
        self._endpoint = None


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The engines of this suite, which end with it: other tests look at what processes are left."""
    running = Engines(tmp_path_factory)
    yield running
    running.close()


@pytest.fixture(params=["embedded-llama", pytest.param("sglang-qwen3", marks=engines.sglang_here)])
def engine(request: pytest.FixtureRequest, running: Engines) -> Endpoint:
    """An engine of each kind."""
    return running.get(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one engine stand together: SGLang takes long to start."""
    def name(item: pytest.Item) -> str:
        return item.callspec.params.get("engine", "") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""

    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    for place, item in zip(places, sorted((items[place] for place in places), key=name), strict=True):
        items[place] = item
