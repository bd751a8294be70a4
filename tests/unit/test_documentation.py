"""Every command of the documentation is tried as far as this machine goes: composed and planned, parsed, or looked up; keys, options, files and links
that do not exist fail here."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hydra import compose, initialize_config_dir

from launcher.__main__ import CONF, STARTS, main
from launcher.cli import composing
from launcher.config.schema import FullConfig, as_yaml, register, to_object
from launcher.launch import on_slurm
from launcher.memory import capacity
from launcher.preflight import device_choice
from tests.support.documented import PAGES, ROOT, Command, World, commands, spans
from workers.run.folder import RunFolder

register()

OWN_KEYS = "|".join(part.name for part in dataclasses.fields(FullConfig))
ALL = list({command.words: command for command in reversed(commands())}.values())[::-1]
PATH = os.environ["PATH"]
SHOWS = ("config", "runs")
PARSED = ("plan", "status", "watch", "logs", "replay", "stop", "resume", "report", "rollouts", "trace")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """What a reader has: models, a site, conf/, and the finished runs RUN and runs/first, on a machine without SLURM and GPUs."""
    folder = tmp_path_factory.mktemp("reader")
    made = World(folder)
    (folder / "conf" / "prompts").symlink_to(CONF / "prompts")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_object(compose("config", ["experiment=demo"]))
    for name in ("RUN", "runs/first", "shared/me/runs/first"):
        run = RunFolder.create(folder / name)
        run.config_yaml.write_bytes(as_yaml(config))
        run.config.write_bytes(msgspec.json.encode(config.for_workers()))
        for model in (run.final_model, run.exports / "120"):
            shutil.copytree(folder / "models" / "Qwen3-0.6B", model)
        (run.exports / "120" / "manifest.json").write_text('{"version": {"epoch": 1, "step": 120}}')
        run.evaluations.write_text('{"step": 120, "accuracy": 0.5}\n')
    patch = pytest.MonkeyPatch()
    patch.setenv("PATH", str(folder))
    patch.setattr(capacity, "memory_here", lambda: 64 * 2.0**30)
    patch.setattr(on_slurm, "prepare", lambda *given, **named: None)  # it looks at models, data and functions themselves
    cpu = {"cpu": {"name": "CPU", "runs": ["float32"], "best": "float32"}}
    patch.setattr(device_choice, "settle", functools.partial(device_choice.settle, ask=lambda: cpu))
    patch.chdir(folder)
    with composing.opened(CONF, folder / "conf") as composer:  # Hydra looks through all groups: once is enough
        patch.setattr(composing, "opened", lambda conf, extra=None: contextlib.nullcontext(composer))
        yield made
    patch.undo()


def headway(*arguments: str) -> int:
    """Run the command in this process; returns its exit status."""
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "argv", ["headway", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        patch.undo()
    return 0


def settled(words: list[str]) -> list[str]:
    """Arguments without what is left to the reader, and with a model where the command leaves it so."""
    known = [word for word in words if "..." not in word and not word.startswith("[")]
    return known if any(map(brings_a_model, known)) else [*known, "model.path=/models/Qwen3-0.6B"]


def brings_a_model(word: str) -> bool:
    """Whether an argument says which model."""
    name = word.removeprefix("experiment=")
    own = CONF / "experiment" / f"{name}.yaml"
    return word.startswith(("model.path=", "model=", "evaluation.run=")) or (name != word and (not own.exists() or "/model:" in own.read_text()))


class Parsed(Exception):
    """A command line was understood."""


def understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command's own parser read its arguments, and nothing more."""
    def patched(name: str) -> None:
        original = getattr(argparse.ArgumentParser, name)

        def parse(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
            original(self, *given, **named)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)

    patched("parse_args")
    patched("parse_intermixed_args")
    with pytest.raises(Parsed):
        headway(*words)


def try_headway(words: list[str], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan what would be started, show what is shown, and parse the rest."""
    if not words:
        assert headway() == 0
    elif "--help" in words or words in ([name] for name in (*STARTS, *SHOWS, *PARSED)):
        assert headway(world.here(words[0]), "--help") == 0
    elif words[0] in PARSED:
        understood([world.here(word) for word in words], monkeypatch)
    elif words[0] in SHOWS:
        assert headway(*(world.here(word) for word in words if not word.startswith("["))) == 0
    elif "--shell-completion" not in words:
        command, rest = (words[:1], words[1:]) if words[0] in STARTS else ([], words)
        dry = [] if "--cfg" in words else ["--dry-run"]
        assert headway(*command, *dry, *map(world.here, settled(rest))) == 0


@pytest.mark.parametrize("command", [one for one in ALL if one.words[0] == "headway" and not one.needs], ids=str)
def test_headway(command: Command, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    try_headway(list(command.words[1:]), world, monkeypatch)


MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("command", [one for one in ALL if one.words[0] == "make"], ids=str)
def test_make(command: Command) -> None:
    for variable in (word.partition("=")[0] for word in command.words[1:] if "=" in word):
        assert f"$({variable})" in MAKEFILE, f"the Makefile reads no {variable}"
    done = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, "PATH": PATH})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [one for one in ALL if one.words[:2] == ("python", "-m") and not one.needs], ids=str)
def test_modules(command: Command, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name, arguments = command.words[2], list(command.words[3:])
    if name == "launcher":
        try_headway(arguments, world, monkeypatch)
        return
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"there is no module {name}"
    source = Path(spec.origin).with_name("__main__.py") if spec.submodule_search_locations else Path(spec.origin)
    text = source.read_text()
    assert "__main__" in text or source.name == "__main__.py", f"{name} is no program"
    known = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= known


@pytest.mark.parametrize("command", [one for one in ALL if "slurm/launch.sbatch" in one.words], ids=str)
def test_sbatch(command: Command, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / "slurm" / "launch.sbatch").is_file()
    try_headway(list(command.words[command.words.index("slurm/launch.sbatch") + 1:]), world, monkeypatch)


def test_there_are_commands_of_every_kind_and_few_that_cannot_be_tried() -> None:
    kinds = [command.words[0] for command in ALL]
    assert kinds.count("headway") > 60 and kinds.count("make") > 10 and kinds.count("python") > 10 and "sbatch" in kinds
    assert sum(bool(command.needs) for command in ALL) < len(ALL) / 10


def missing(path: str) -> str:
    """The first part of a config key that does not exist; '' where all do, or where anything may follow."""
    where: Any = FullConfig
    for name in path.split("."):
        if not dataclasses.is_dataclass(where):
            return "" if typing.get_origin(where) is dict else name
        hints = typing.get_type_hints(where)
        if name not in hints:
            return name
        where = hints[name]
    return ""


KEY = re.compile(rf"\+?((?:{OWN_KEYS})\.[a-z_0-9.]*[a-z_0-9])(?==|$)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_in_text_exist(page: Path) -> None:
    files = (".py", ".json", ".jsonl", ".yaml", ".md")
    for number, span in spans(page):
        for word in span.split():
            if (match := KEY.match(word)) and not word.endswith(files):
                assert not missing(match[1]), f"{page.name}:{number}: {match[1]}: there is no {missing(match[1])!r}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"[{text}]({target}): no such file"
        assert not anchor or found.suffix != ".md" or anchor in anchors(found), f"[{text}]({target}): no such heading"


def test_the_layout_draws_the_folders_that_there_are() -> None:
    layout = (ROOT / "docs/layout.md").read_text().split("## Layout")[1].split("## Rules")[0]
    drawn, at = set(), list[str]()
    for indent, folder in re.findall(r"^( {4,})([a-z_]+)/\s", layout, re.MULTILINE):
        at = [*at[:len(indent) // 2 - 2], folder]
        drawn.add("/".join(at))
    assert len(drawn) > 30 and not [folder for folder in sorted(drawn) if not (ROOT / folder).is_dir()]
    there = {path.parent.name for root in ("launcher", "workers") for path in (ROOT / root).glob("*/__init__.py")}
    assert not there - set(re.findall(r"[a-z_]+(?=/)", layout))


def found(module: str) -> Path:
    [path] = [path for top in ("workers", "launcher") if (path := ROOT / top / module).is_file()]
    return path


def linked(one: Path, other: Path) -> bool:
    """Whether `one` imports `other`, or starts it by its name as a module."""
    package, _, name = ".".join(other.relative_to(ROOT).with_suffix("").parts).rpartition(".")
    named = package if name == "__main__" else f"{package}.{name}"
    source = one.read_text()
    return bool(re.search(rf"\b{re.escape(named)}\b", source) or re.search(rf"from {re.escape(package)} import [^\n]*\b{name}\b", source))


@pytest.mark.parametrize("number", range(3), ids=["prompt", "version", "signal"])
def test_the_ways_through_the_code_hold(number: int) -> None:
    """Each module is there, and is reached from one before it: by an import of either, by starting it, or by the message named between."""
    ways = (ROOT / "docs/design.md").read_text().split("## Three ways")[1].split("## Terms")[0].split(":\n\n    ")[1:]
    before, message = list[Path](), ""
    for module, said in re.findall(r"(?:^ *|, )([a-z_/]+\.py)|--(\w+)-->", ways[number], re.MULTILINE):
        if said:
            message = said
            continue
        path = found(module)
        links = [one for one in before if linked(one, path) or linked(path, one)]
        by_message = message and all(any(re.search(rf"\b{message}\b", one.read_text()) for one in ends) for ends in (before, [path]))
        assert not before or links or by_message, f"{module}: nothing before it leads there"
        before, message = [*before, path], ""
    assert len(before) > 20


@pytest.mark.parametrize("wrong", [
    ["experiment=demo", "trainer.num_steps=3"], ["experiment=dmo"], ["experiment=demo", "algorithm=grop"], ["--detach", "cluster=none"],
    ["experiment=demo", "workflow.turn_discount=0.5"],
    ["cluster=mysite", "experiment=paper_7b", "model.path=/models/Qwen3-0.6B", "data.path=x", "trainer.parallel.tp=3"],
    ["status", "RUN", "--jsn"], ["logs", "RUN", "trainer"], ["report", "RUN", "--htm=l"]], ids=" ".join)
def test_a_wrong_command_is_found(wrong: list[str], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        try_headway(wrong, world, monkeypatch)


def test_a_wrong_key_is_found() -> None:
    assert missing("trainer.learning_rate") and missing("staleness.etaa") and missing("trainer.parallel.tpp")
    assert not missing("trainer.parallel.tp") and not missing("reward.parts.format_tags") and not missing("data.columns.prompt")
