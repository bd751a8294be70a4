"""How the whole suite runs: files side by side on two processes (`-n 2`), the tests of one file in their order on one of them.

Property tests draw the same examples in every run, so that a change is judged by what it changes; HYPOTHESIS_PROFILE=explore draws others each time.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

# Processes of other tests run beside these: how long an example takes says nothing.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "suite")
settings.load_profile(PROFILE)
if PROFILE == "suite":
    # Hypothesis also draws constants that it finds in the modules loaded so far: these depend on which files ran before in the same process.
    providers.is_local_module_file = lambda path: False

TOGETHER = ("tests/slurm/", "tests/conformance/", "tests/sglang/")
"""Folders whose tests share what is slow to start (a cluster, an engine), or must not run beside each other."""

LONGEST_FIRST = (*TOGETHER, "tests/e2e/", "tests/wire/")
"""What takes long begins first; the rest fills up."""


class ByFile(LoadScopeScheduling):
    """Gives a process one file after the other; the folders in `TOGETHER` count as one file each."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first; everything else stays in its order."""
    def place(item: pytest.Item) -> int:
        return next((number for number, folder in enumerate(LONGEST_FIRST) if item.nodeid.startswith(folder)), len(LONGEST_FIRST))

    items.sort(key=place)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    """Whatever `--dist` says."""
    config.option.loadscopereorder = False  # by number of tests: ours are in order already
    return ByFile(config, log)
