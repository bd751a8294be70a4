"""How the whole suite runs: files side by side on some processes (`-n 3`), the tests of one file in their order on one of them.

Tests marked `long` are left out unless HEADWAY_LONG=1 (make test-long) or they are asked for by name: whole runs that take a way to which a
shorter test leads as well.

Property tests draw the same examples in every run, so that a change is judged by what it changes; HYPOTHESIS_PROFILE=explore draws others each time.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there: ranks are copies of a process that has it
if os.environ.get("HEADWAY_TEST_GPU") != "1":  # make gpu has its own
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Processes of other tests run beside these: how long an example takes says nothing.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "suite")
settings.load_profile(PROFILE)
if PROFILE == "suite":
    # Hypothesis also draws constants that it finds in the modules loaded so far: these depend on which files ran before in the same process.
    providers.is_local_module_file = lambda path: False

TOLD = pytest.StashKey[list[str]]()
"""Lines for the end of the output, by whoever collects tests."""
TOGETHER = ("tests/slurm/", "tests/conformance/", "tests/sglang/")
"""Folders whose tests share what is slow to start (a cluster, an engine), or must not run beside each other."""

WAITING = ("tests/slurm/", "tests/e2e/test_evaluation.py", "tests/wire/workers/transport/", "tests/wire/workers/coordinator/",
           *(f"tests/wire/workers/rollout/{name}/" for name in ("engines", "nodes", "weights")))
"""What mostly waits (for other machines' clocks, for what must not happen) is for one process; the others compute meanwhile."""
LONGEST_FIRST = (*TOGETHER, "tests/e2e/", "tests/fake_device/", "tests/fuzz/", "tests/wire/")
"""What takes long begins first; the rest fills up. A file of minutes that begins last is waited for by itself."""


class ByFile(LoadScopeScheduling):
    """Gives a process one file after the other; the folders in `TOGETHER` count as one file each."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    def _assign_work_unit(self, node: Any) -> None:
        waits = node is self.nodes[0]
        if suits := next((scope for scope in self.workqueue if scope.startswith(WAITING) == waits), None):
            self.workqueue.move_to_end(suits, last=False)
        super()._assign_work_unit(node)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background: what tests start would not hear Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "long: runs with HEADWAY_LONG=1 only")
    if hasattr(config, "workerinput") or not config.option.numprocesses:  # who collects
        gc.disable()  # while everything is imported, all of which stays


def pytest_collection_finish() -> None:
    """What stands by now is not looked through again by every later collection of garbage."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is long; put what takes long among the rest first, everything else stays in its order."""
    left_out = [] if os.environ.get("HEADWAY_LONG") == "1" else [
        item for item in items if item.get_closest_marker("long") and not any(arg.endswith(f"::{item.name}") for arg in config.args)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    if left_out:
        config.stash.setdefault(TOLD, []).append(f"{len(left_out)} long tests were left out. All of them: make test-long")

    def place(item: pytest.Item) -> int:
        return next((number for number, folder in enumerate(LONGEST_FIRST) if item.nodeid.startswith(folder)), len(LONGEST_FIRST))

    items.sort(key=place)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of xdist's: these collect, and another process prints
        session.config.workeroutput["told"] = session.config.stash.get(TOLD, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[TOLD] = getattr(node, "workeroutput", {}).get("told", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(TOLD, []):
        terminalreporter.write_line(line)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    """Whatever `--dist` says."""
    config.option.loadscopereorder = False  # by number of tests: ours are in order already
    return ByFile(config, log)
