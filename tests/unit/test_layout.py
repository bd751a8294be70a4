"""The shape of the tree: small folders of small modules with names of their own, in one direction, each with its tests where it is looked for."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.unit.test_imports import ROOT, read_imports

SOURCES = [path for top in ("launcher", "workers", "benchmarks") for path in sorted((ROOT / top).rglob("*.py"))]
PARTS = {
    "client.py": "one end of a transport", "server.py": "one end of a transport", "messages.py": "what one transport carries",
    "broadcast.py": "one end of broadcasts of weights", "element.py": "an element of an array, by role", "worker.py": "a worker, by role",
    "engine.py": "trains, or generates", "model.py": "the model, by engine", "gym.py": "reasoning-gym's tasks, and their scores"}
"""Names that more than one module has: the same part of several transports, servers or roles. Sections of the config are named by their subjects."""


def names(paths: list[Path]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in paths:
        if not path.name.startswith("__") and not path.is_relative_to(ROOT / "benchmarks"):
            found[path.name].append(str(path.relative_to(ROOT)))
    return found


def test_modules_are_short() -> None:
    long = {str(path.relative_to(ROOT)): count for path in SOURCES if (count := len(path.read_text().splitlines())) > 250}
    assert not long


def test_functions_are_short() -> None:
    long = [(str(path.relative_to(ROOT)), node.name) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 50]
    assert not long


@pytest.mark.parametrize("top", ["launcher", "workers", "benchmarks", "tests"])
def test_folders_are_small(top: str) -> None:
    folders = defaultdict(list)
    for path in (ROOT / top).rglob("*.py"):
        if path.name != "__init__.py":
            folders[path.parent].append(path.name)
    assert len(folders) > 1 and not {str(folder.relative_to(ROOT)): len(modules) for folder, modules in folders.items() if len(modules) > 16}


def test_a_name_says_which_module_is_meant() -> None:
    twice = {name: paths for name, paths in names([path for path in SOURCES if path.parts[-3:-1] != ("workers", "config")]).items() if len(paths) > 1}
    assert not {name: paths for name, paths in twice.items() if name not in PARTS}


def test_folders_import_in_one_direction() -> None:
    """What lies in a folder may know what lies in the folder around it, and the other way round; nothing else goes in a circle."""
    graph: dict[str, set[str]] = defaultdict(set)
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.parent for path in SOURCES}
    for entry in read_imports():
        here, there = modules.get(entry.module), modules.get(entry.name) or modules.get(f"{entry.name}.__init__")
        if here is not None and there is not None and not here.is_relative_to(there) and not there.is_relative_to(here):
            graph[str(here)].add(str(there))
    while leaves := [folder for folder in graph if not graph[folder] & graph.keys()]:
        for folder in leaves:
            del graph[folder]
    assert not graph


@pytest.mark.parametrize("kind", ["unit", "wire"])
def test_tests_stand_where_their_modules_do(kind: str) -> None:
    folders = {path.parent.relative_to(ROOT / "tests" / kind) for path in (ROOT / "tests" / kind).rglob("test_*.py")}
    assert len(folders) > 10 and not [str(folder) for folder in folders if not (ROOT / folder).is_dir()]
