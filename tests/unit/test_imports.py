"""Who may import whom: read from the sources, imports inside functions included."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("launcher", "workers")
HEAVY = ("torch", "zmq", "megatron", "sglang", "transformers")
PICKLES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve")


class Import(NamedTuple):
    """`module` imports `name`, at `line`."""

    module: str
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} imports {self.name}"


def names_of(node: ast.AST) -> Iterator[str]:
    """The modules that an import statement, or a call of `import_module` or `__import__` with a constant, names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module is not None, "imports are absolute here"
        for alias in node.names:
            deeper = ROOT.joinpath(*node.module.split("."), alias.name)
            yield f"{node.module}.{alias.name}" if deeper.is_dir() or deeper.with_suffix(".py").is_file() else node.module
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        if called in ("import_module", "__import__"):
            yield node.args[0].value


@functools.cache
def read_imports() -> list[Import]:
    """All of ours, read once, by the process that asks."""
    found = []
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found += [Import(module, name, getattr(node, "lineno", 0))
                      for node in ast.walk(ast.parse(path.read_text(), str(path))) for name in names_of(node)]
    return found


def below(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def assert_none(wrong: list[Import]) -> None:
    assert not wrong, "\n" + "\n".join(map(str, wrong))


def only(module: str, *allowed: str) -> list[Import]:
    """Imports of ours in `module` and below it that are not below `allowed` or `module` itself."""
    return [entry for entry in read_imports() if below(entry.module, module) and below(entry.name, *OURS) and not below(entry.name, module, *allowed)]


def test_the_sources_are_read() -> None:
    modules = {entry.module for entry in read_imports()}
    assert len(modules) > 60 and {"launcher.__main__", "workers.transport.client", "workers.trainer.megatron.engine"} <= modules
    inside = [entry for entry in read_imports() if entry.module == "workers.entry" and entry.name == "workers.trainer.element"]
    assert inside, "imports inside functions count"


@pytest.mark.parametrize(("source", "names"), [
    ("import a.b, c", ["a.b", "c"]), ("from a import b", ["a"]), ("def f():\n    import a", ["a"]), ("importlib.import_module('a')", ["a"]),
    ("__import__('a')", ["a"]), ("from workers import config", ["workers.config"]), ("from workers.config import Config", ["workers.config"]),
    ("from workers.coordinator import core, Nothing", ["workers.coordinator.core", "workers.coordinator"]), ("print('a')", [])])
def test_every_kind_of_import_is_seen(source: str, names: list[str]) -> None:
    assert [name for node in ast.walk(ast.parse(source)) for name in names_of(node)] == names


def test_the_launcher_knows_light_modules_of_the_workers_alone() -> None:
    light = ("workers.entry", "workers.node_look", "workers.config", "workers.run.folder", "workers.run.files", "workers.run.incarnations",
             "workers.run.checkpoints", "workers.run.outage", "workers.run.processes", "workers.run.retention", "workers.slurm.command",
             "workers.model.architecture", "workers.model.parallel_limits", "workers.model.adapter_shapes", "workers.trainer.batch.pipeline_schedule")
    assert_none(only("launcher", *light))


def test_the_launcher_imports_nothing_heavy() -> None:
    assert_none([entry for entry in read_imports() if below(entry.module, "launcher") and below(entry.name, *HEAVY)])


def test_workers_never_import_the_launcher() -> None:
    assert_none([entry for entry in read_imports() if below(entry.module, "workers") and below(entry.name, "launcher")])


def test_only_the_transport_imports_zmq() -> None:
    importers = [entry for entry in read_imports() if below(entry.name, "zmq")]
    assert importers
    assert_none([entry for entry in importers if not below(entry.module, "workers.transport")])


def test_rollout_and_trainer_do_not_know_each_other() -> None:
    assert_none([entry for entry in read_imports() if below(entry.module, "workers.rollout") and below(entry.name, "workers.trainer")])
    assert_none([entry for entry in read_imports() if below(entry.module, "workers.trainer") and below(entry.name, "workers.rollout")])


def test_the_coordinator_is_pure_but_for_its_process() -> None:
    impure = ("asyncio", "time", "datetime", "random", "socket", "threading", "subprocess", "os", "zmq", "torch", "workers.coordinator.process")
    pure = [entry for entry in read_imports()
            if below(entry.module, "workers.coordinator") and not below(entry.module, "workers.coordinator.process")]
    assert pure
    others = only("workers.coordinator", "workers.messages", "workers.config", "workers.evaluation.statistics", "workers.run.own_pause")
    assert_none([entry for entry in others if entry in pure])
    assert_none([entry for entry in pure if below(entry.name, *impure)])


def test_the_coordinators_process_changes_its_state_by_inputs_alone() -> None:
    """Else headway replay could not tell what happened: whatever has `core` in its path is never assigned to."""
    changed = []
    for path in sorted((ROOT / "workers" / "coordinator" / "process").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []
            changed += [f"{path.name}:{node.lineno}" for target in targets for part in ast.walk(target)
                        if isinstance(part, ast.Attribute) and ast.unparse(part.value).split(".")[-1] in ("core", "_core")]
    assert not changed, f"recording/inputs.py has what may change it: {changed}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count: they only hide a circle."""
    packages = {module.removesuffix(".__init__"): module for module in {entry.module for entry in read_imports()}}
    graph: dict[str, set[str]] = {module: set() for module in packages.values()}
    for entry in read_imports():
        if (name := packages.get(entry.name, entry.name)) in graph and name != entry.module:
            graph[entry.module].add(name)
    while leaves := [module for module, names in graph.items() if not names & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, f"these import each other, or what does: {sorted(graph)}"


def test_algorithms_stand_alone() -> None:
    assert_none(only("workers.algorithms"))


def test_messages_stand_alone() -> None:
    assert_none(only("workers.messages"))


def test_config_stands_alone_and_light() -> None:
    assert_none(only("workers.config"))
    assert_none([entry for entry in read_imports()
                 if below(entry.module, "workers.config") and below(entry.name, *HEAVY, "hydra", "omegaconf", "numpy")])


def test_data_knows_neither_sockets_nor_workers() -> None:
    assert_none([entry for entry in read_imports() if below(entry.module, "workers.data") and below(
        entry.name, "workers.transport", "workers.coordinator", "workers.rollout", "workers.trainer")])


def test_transport_carries_without_knowing_what_for() -> None:
    """But for weights, which are too large for messages: what streams them reads and writes the node's store."""
    store = tuple(f"workers.weights.{name}" for name in ("manifest", "mmap", "store", "partial_version", "delta"))
    known = [entry for entry in read_imports() if below(entry.name, *store) and below(entry.module, "workers.transport.weights")]
    others = only("workers.transport", "workers.messages", "workers.config", "workers.run.folder", "workers.run.files", "workers.run.digests",
                  "workers.run.own_pause", "workers.run.outage")
    assert known
    assert_none([entry for entry in others if entry not in known])
    assert_none([entry for entry in read_imports() if entry.module in store and below(entry.name, *HEAVY)])


def test_nothing_is_pickled() -> None:
    assert_none([entry for entry in read_imports() if below(entry.name, *PICKLES)])


@pytest.mark.parametrize("module", ["launcher.__main__", "launcher.launch.on_slurm", "launcher.monitoring.status", "launcher.monitoring.watch",
                                    "launcher.monitoring.stop", "launcher.jobs.submit"])
def test_the_launcher_starts_light(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
