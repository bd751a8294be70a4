"""What is wrong in a file of conf/, or of a folder of the user's own, told with file and line; and which keys such files set.

The groups that are chosen name the files: those of the command line, those that these name in their `defaults:`, those of conf/config.yaml.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher.cli import mistakes, schema_keys
from launcher.cli.mistakes import Groups
from workers.config import ConfigError

_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)
_MEANINGS = {
    "mapping values are not allowed": "a second ':' in the line; a text with a colon is quoted",
    "cannot start any token": "a sign that YAML does not know there, such as a tab: it is indented by spaces",
    "could not find expected ':'": "a line without ':'",
    "expected <block end>": "the indentation does not fit that of the lines above",
    "expected ',' or": "a [list] or {mapping} without its end",
    "duplicate": "the same key twice",
}
GLOBAL = "experiment", "eval"


@dataclass(frozen=True)
class Setting:
    """A key that a file sets, and where."""

    key: str
    value: object
    path: Path
    line: int

    @property
    def said(self) -> str:
        """How errors begin."""
        return f"{self.path}:{self.line}: {self.key}={schema_keys.written(self.value)}"


@dataclass(frozen=True)
class ConfigFile:
    """A file of a group: its option, where its keys stand in the config, and its content as YAML's nodes."""

    group: str
    option: str
    path: Path
    package: str
    root: yaml.MappingNode | None
    loader: yaml.SafeLoader

    def defaults(self) -> list:
        """The entries of `defaults:`."""
        for name, node in self.root.value if self.root is not None else ():
            if name.value == "defaults":
                if not isinstance(node, yaml.SequenceNode):
                    raise ConfigError(f"{self.path}:{name.start_mark.line + 1}: defaults: must be a list, a line with '- ' for each")
                return self._value(node)
        return []

    def settings(self) -> Iterator[Setting]:
        """Every key that the file sets. Raises `ConfigError` for one that there is not, or that stands there twice."""
        yield from self._below(self.root, self.package) if self.root is not None else ()

    def _below(self, node: yaml.MappingNode, prefix: str) -> Iterator[Setting]:
        for name, value in self._pairs(node, prefix):
            key, line = f"{prefix}.{name.value}".lstrip("."), name.start_mark.line + 1
            if node is self.root and name.value == "defaults":
                continue
            if node is self.root and name.value == "hydra":
                raise ConfigError(f"{self.path}:{line}: hydra: is without effect here. Leave it out")
            if not isinstance(name, yaml.ScalarNode):
                raise ConfigError(f"{self.path}:{line}: a mapping stands where a key is expected. Quote it if it is a text")
            if "." in name.value:
                raise ConfigError(f"{self.path}:{line}: {name.value}: a file has no keys with dots. Write {name.value.split('.')[0]}: and below it, "
                                  f"indented, {name.value.partition('.')[2]}: ...")
            mistakes.check_key(key, f"{self.path}:{line}")
            if isinstance(value, yaml.MappingNode) and schema_keys.is_section(key) and schema_keys.find(key) is None:
                yield from self._below(value, key)
            else:
                yield Setting(key, self._value(value), self.path, line)

    def _pairs(self, node: yaml.MappingNode, prefix: str) -> list[tuple[yaml.Node, yaml.Node]]:
        """The keys of a mapping, those of a merge (`<<: *gpu`) with it, which its own come before."""
        seen: set[str] = set()
        for name, _ in node.value:
            if str(name.value) in seen:
                raise ConfigError(f"{self.path}:{name.start_mark.line + 1}: {f'{prefix}.{name.value}'.lstrip('.')} stands there twice. "
                                  "Leave one of them out")
            seen.add(str(name.value))
        try:
            self.loader.flatten_mapping(node)
        except yaml.MarkedYAMLError as error:
            raise ConfigError(f"{self.path}:{node.start_mark.line + 1}: what is merged by `<<` must be a mapping. Correct it") from error
        node.value = list({str(name.value): (name, value) for name, value in node.value}.values())
        return node.value

    def _value(self, node: yaml.Node) -> typing.Any:
        for one in _scalars(node, set()):
            if one.style is None and ":" in one.value and one.tag.endswith((":int", ":float")):
                raise ConfigError(f"{self.path}:{one.start_mark.line + 1}: {one.value}: YAML takes this for one number, "
                                  f"{self.loader.construct_object(one)}. Quote it: '{one.value}'")
        try:
            return self.loader.construct_object(node, deep=True)
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.path}:{node.start_mark.line + 1}: a value that cannot be read, such as one with a tag (!name). "
                              "Correct it") from error


def _scalars(node: yaml.Node, seen: set[int]) -> Iterator[yaml.ScalarNode]:
    """All below `node`, each once: a file may refer to itself."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for one in node.value:
            yield from _scalars(one, seen)
    elif isinstance(node, yaml.MappingNode):
        for _, one in node.value:
            yield from _scalars(one, seen)


def read(path: Path, group: str, package: str = "") -> ConfigFile:
    """A file of `group`. Raises `ConfigError` where it cannot be read."""
    try:
        text = path.read_text("utf-8")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', '') or 'not a text'}). Correct that, or choose another "
                          f"{group or 'folder'}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        meaning = next((meaning for words, meaning in _MEANINGS.items() if words in str(error.problem)), "it cannot be read from there on")
        raise ConfigError(f"{path}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {meaning}. Correct it") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: it holds signs that are no text. Correct it") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: must hold KEY: VALUE lines, not a list or a text. See {path.parent} for others")
    header = _PACKAGE.search(text)
    named = package or (header[1] if header else "")
    if group in GLOBAL and named != "_global_" and not package:
        raise ConfigError(f"{path}:1: an {group} sets keys of all sections: its first line must be `# @package _global_`")
    where = "" if named == "_global_" else group.replace("/", ".") if named in ("", "_group_") else named
    return ConfigFile(group, path.stem, path, where, root, loader)


def chosen(arguments: Sequence[str], folders: Sequence[Path], groups: Groups) -> list[ConfigFile]:
    """The files that the config is made of, without conf/config.yaml. Raises `ConfigError` naming the one that cannot be."""
    own = {override.key_or_group: str(override.value()) for override in map(mistakes.parse, arguments) if override.key_or_group in groups}
    main = next(path for folder in folders if (path := folder / "config.yaml").is_file())
    choices = {group: str(option) for entry in read(main, "").defaults() if isinstance(entry, dict)
               for group, option in entry.items() if group in groups} | own
    found: dict[tuple[str, str], ConfigFile] = {}
    waiting = [(group, option, "") for group, option in choices.items()]
    while waiting:
        group, option, package = waiting.pop()
        place = _find(folders, group, option)
        if (group, option) in found or place is None:
            continue
        file = found[group, option] = read(place, group, package)
        waiting += _named(file, own, groups)
    return [file for (group, option), file in found.items()]


def _named(file: ConfigFile, own: dict[str, str], groups: Groups) -> Iterator[tuple[str, str, str]]:
    """Group, option and package of the files that another one names in its `defaults:`; for other groups the command line comes first."""
    for entry in file.defaults():
        for name, options in entry.items() if isinstance(entry, dict) else [(file.group, entry)]:
            group, _, package = str(name).split()[-1].lstrip("/").partition("@")  # "override /model", "/data@parts.one"
            for given in options if isinstance(options, list) else [options]:
                option, _, inner = str(given).partition("@")
                if "optional" in str(name).split()[:-1] and option not in groups.get(group, ()):
                    continue
                if (group, option) == (file.group, file.option):
                    raise ConfigError(f"{file.path}: defaults: names itself. Leave it out")
                if given in (None, "_self_"):
                    continue
                _check_entry(file, str(name), group, option, groups)
                if group in own and group != file.group:
                    continue
                mistakes.check_option(group, option, f"{file.path}: defaults", groups)
                below = package or inner
                yield group, option, f"{file.package}.{below}" if below else ""


def _check_entry(file: ConfigFile, name: str, group: str, option: str, groups: Groups) -> None:
    """Raise `ConfigError` for an entry of `defaults:` whose group there is not, or which an experiment does not say to override."""
    if group not in groups:
        near = difflib.get_close_matches(group, groups, 1)
        raise ConfigError(f"{file.path}: defaults: there is no group {group}. " + (f"Did you mean {near[0]}?" if near else
                                                                                  f"There is {', '.join(groups)}"))
    if file.group in GLOBAL and group != file.group and "override" not in name.split() and "@" not in name:
        raise ConfigError(f"{file.path}: defaults: {name}: {option}: another option of this group is chosen already. "
                          f"Write `- override /{group}: {option}`")


def _find(folders: Sequence[Path], group: str, option: str) -> Path | None:
    return next((path for folder in folders if (path := folder / group / f"{option.removesuffix('.yaml')}.yaml").is_file()), None)


def explain(error: Exception, arguments: Sequence[str], folders: Sequence[Path], groups: Groups) -> str:
    """Why a config could not be composed: the first thing that is wrong in a file, else what was said of it."""
    try:
        for file in chosen(arguments, folders, groups):
            for setting in file.settings():
                mistakes.check_value(setting.key, setting.value, setting.said)
    except ConfigError as found:
        return str(found)
    for argument in arguments:
        name, _, value = argument.lstrip("+").partition("=")
        part, _ = schema_keys.named_section(name)
        if part and argument in str(error):  # only what stands there already can be changed key by key
            below, _, own = part.rpartition(".")
            inner = f"{name.removeprefix(part).lstrip('.')}: {value}" if name != part else value.strip("{}")
            return f"{name}={value}: {below} has no {own} yet. A new one is given as a whole: '{below}={{{own}: {{{inner}}}}}'"
    said = "files name each other in their defaults" if isinstance(error, RecursionError) else \
        " ".join(str(error.__cause__ or error).split("\n")[0].split())
    read_too = ", ".join(str(file.path) for file in chosen(arguments, folders, groups) if file.path.is_relative_to(folders[0]))
    return (f"{' '.join(arguments)}: no configuration can be put together of these ({said}). Leave them out one by one to find which"
            f"{f'; read for them: {read_too}' if len(folders) > 1 and read_too else ''}")
