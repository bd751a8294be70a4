"""What is answered to an argument that cannot be: KEY=VALUE without a such key, a group without a such option, a value of another type.

    argument --shape--> key and value --schema--> is there such a key, has the value its type? --no--> ConfigError with the nearest that there is

Hydra would refuse all this too, in its own words, and after the first one.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.cli import schema_keys
from launcher.cli.help_page import COMMANDS
from launcher.config.schema import FullConfig
from workers.config import ConfigError

Groups = Mapping[str, Sequence[str]]
"""The groups of the configuration, and the options of each."""
SWEEP_FOLDER = "hydra.sweep.dir"


def check(arguments: Sequence[str], groups: Groups, sweep: bool) -> list[str]:
    """The arguments as Hydra takes them: names that users give below a key (cluster.train.sbatch.nice=5) are added. Raises `ConfigError`."""
    return [_check(argument, groups, sweep) for argument in arguments]


def overruled(arguments: Sequence[str]) -> list[str]:
    """A line for each argument that a later one overrules, as scripts do that append to what they were given."""
    last = {argument.partition("=")[0].lstrip("+"): argument for argument in arguments}
    pairs = ((argument, last[argument.partition("=")[0].lstrip("+")]) for argument in arguments)
    return [f"{argument} has no effect: {later} comes after it" for argument, later in pairs if later != argument]


def parse(argument: str, groups: Groups = MappingProxyType({})) -> Override:
    """One argument, KEY=VALUE. Raises `ConfigError`."""
    key, equals, value = argument.partition("=")
    if key.startswith("~"):
        raise ConfigError(f"{argument}: nothing can be taken out of the configuration. Set the key to another value: {key[1:] or 'KEY'}=VALUE")
    if not equals:
        raise ConfigError(f"{argument}: not KEY=VALUE. {_meant(argument, groups)}")
    if not key or key != key.strip():
        raise ConfigError(f"{argument}: there is no key before the '='. Write KEY=VALUE without spaces around '='")
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        text = value.replace("'", "")
        raise ConfigError(f"{argument}: its value cannot be read. Lists are written {key}=[a,b], mappings {key}={{a: 1}}, and a text with signs "
                          f"other than letters, digits and -_./:+%@ is quoted twice, for the shell too: \"{key}='{text}'\"") from None


def _meant(argument: str, groups: Groups) -> str:
    """What somebody who wrote a bare word may have meant."""
    path = Path(argument).expanduser()
    if argument in groups:
        return f"Write {argument}=OPTION with one of {', '.join(groups[argument])}"
    if bringing := [f"{group}={argument}" for group in groups if argument in groups[group]]:
        return f"Did you mean {' or '.join(bringing)}?"
    if near := difflib.get_close_matches(argument, COMMANDS, 1):
        return f"Did you mean the command `headway {near[0]}`?"
    if (path / "config.json").is_file():
        model = not (path / "jobs").is_dir()
        return f"For a model folder: model=hf model.path={argument}" if model else f"For a run folder: headway status {argument}"
    if os.sep not in argument and ":" in argument:
        return f"Write {argument.replace(':', '=', 1)}"
    if (known := schema_keys.find(argument)) is not None:
        return f"Write {argument}=VALUE, without spaces: {known.told} ({known.kind})"
    return "`headway --help` shows the commands, `headway config` the keys"


def _check(argument: str, groups: Groups, sweep: bool) -> str:
    override = parse(argument, groups)
    name, added = override.key_or_group, override.is_add() or override.is_force_add()
    plain = argument.lstrip("+")
    if not name:
        raise ConfigError(f"{argument}: there is no key before the '@'. Write KEY=VALUE")
    if isinstance(override.value(), Glob):
        raise ConfigError(f"{argument}: glob is not known here. Give the values one by one: headway sweep ... {name}=a,b")
    if name in groups or override.package is not None:
        _check_group(override, plain, groups)
        if override.is_sweep_override() and not sweep:
            raise ConfigError(f"{argument}: several values need a sweep: headway sweep ... {argument}. Otherwise give one of them")
        return argument
    if name.split(".")[0] == "hydra":
        if name != SWEEP_FOLDER:
            raise ConfigError(f"{argument}: this key is without effect here. Leave it out; {SWEEP_FOLDER} says where the runs of a sweep are made")
        if not override.value() or not isinstance(override.value(), str | QuotedString):
            raise ConfigError(f"{argument}: must be the path of one folder, in which the runs of the sweep are made")
        return argument
    if name.split(".")[0] not in {key.split(".")[0] for key in schema_keys.all_keys()} and "." not in name and "/" not in name:
        _refuse_name(argument, name, groups)
    check_key(name, plain)
    if override.is_sweep_override() and not sweep:
        raise ConfigError(_ambiguous(argument, name))
    if not override.is_sweep_override():
        check_value(name, override.value(), plain)
    elif not override.is_discrete_sweep():
        raise ConfigError(f"{argument}: only lists of values can be swept: {name}=a,b or {name}=range(FIRST,END)")
    else:
        for value in override.sweep_iterator():
            plain_value = Override._convert_value(value)  # without signs of quotation, inside lists too
            check_value(name, plain_value, f"{name}={schema_keys.written(plain_value)}")
    return f"++{plain}" if added or not _stands(name) else plain


def _stands(name: str) -> bool:
    """Whether the schema itself has the key, and all that stands below it; what users name themselves has to be added."""
    known = schema_keys.all_keys().get(name)
    return typing.get_origin(known.type) is not dict if known is not None else name in schema_keys.sections()


def _refuse_name(argument: str, name: str, groups: Groups) -> None:
    """Refuse a single word that is neither a group nor a section."""
    words = [*groups, *sorted(one for one in schema_keys.sections() if "." not in one)]
    if near := difflib.get_close_matches(name, words, 1):
        raise ConfigError(f"{argument}: there is no {name}. Did you mean {near[0]}? `headway config` lists groups and keys")


def check_key(name: str, said: str) -> None:
    """Refuse a key that there is not, with those that are most like it; `said`: how and where it was given. Raises `ConfigError`."""
    if schema_keys.find(name) is not None or schema_keys.is_section(name):
        return
    alike = difflib.get_close_matches(name, [*schema_keys.sections(), *schema_keys.all_keys()], 1, 0.8)
    if alike and alike[0] in schema_keys.sections():
        raise ConfigError(f"{said}: there is no key {name}. Did you mean the section {alike[0]}?")
    near = schema_keys.nearest(name)
    lines: dict[str, list[str]] = {}
    for one in near:
        lines.setdefault(schema_keys.all_keys()[one].told, []).append(one)
    told = ", or ".join(f"{', '.join(names)} ({line})" for line, names in lines.items())
    raise ConfigError(f"{said}: there is no key {name}. " + (f"Did you mean {told}?" if told else "`headway config` lists all keys"))


def check_value(name: str, value: object, said: str) -> None:
    """Refuse a value of another type than the key's. Raises `ConfigError`."""
    if isinstance(value, str) and "${" in value:
        return
    known, (part, section) = schema_keys.find(name), schema_keys.named_section(name)
    if isinstance(value, str) and name.endswith((".path", ".dir")) and re.match(r"~[^/]", value) and os.path.expanduser(value) == value:
        raise ConfigError(f"{said}: there is no user {value[1:].split('/')[0]} here. Give the whole path")
    any_key = f"{name}.{schema_keys.ANY}"
    if known is None or (isinstance(value, dict) and value and schema_keys.named_section(any_key)[0] == any_key):
        if not isinstance(value, dict):
            raise ConfigError(f"{said}: {name} is a section of keys. Give one of them, such as {_first(name)}=VALUE")
        for inner, one in value.items():
            check_key(f"{name}.{inner}", said)
            check_value(f"{name}.{inner}", one, said)
        return
    schema = _schema()
    try:
        if part:
            OmegaConf.update(schema, part, section(), force_add=True)
        OmegaConf.update(schema, name, value, merge=known.kind == "list of sections", force_add=True)
    except (OmegaConfBaseException, ValueError):
        raise ConfigError(f"{said}: must be {_article(known.kind)}. {name}: {known.told}") from None


def _first(section: str) -> str:
    part, _ = schema_keys.named_section(section)
    known = section.replace(part, f"{part.rpartition('.')[0]}.{schema_keys.ANY}", 1) if part else section
    return next(f"{section}{name.removeprefix(known)}" for name in schema_keys.all_keys() if name.startswith(f"{known}."))


def _article(kind: str) -> str:
    return kind if kind.startswith(("one of", "true", "text", "NAME", "null")) else f"a {kind}"


def _schema() -> DictConfig:
    """The schema without values, in which one can be tried."""
    return _made().copy()


@functools.cache
def _made() -> DictConfig:
    return OmegaConf.structured(FullConfig)


def _ambiguous(argument: str, name: str) -> str:
    value = argument.partition("=")[2]
    known = schema_keys.find(name)
    one_list = known is not None and known.kind.startswith("list")
    meant = f"a list is written {name}=[{value}]" if one_list else f"several values need a sweep: headway sweep ... {name}={value}"
    return f"{argument}: {meant}; a text with a comma is quoted: \"{name}='{value}'\""


def _check_group(override: Override, argument: str, groups: Groups) -> None:
    """Refuse an option that a group has not, with those that it has. Raises `ConfigError`."""
    name, given = override.key_or_group, override.value()
    if name not in groups:
        raise ConfigError(f"{argument}: there is no group {name}. Groups: {', '.join(groups)}")
    if override.package and not schema_keys.is_section(override.package):
        raise ConfigError(f"{argument}: there is no section {override.package}. Write {name}=OPTION")
    for option in override.sweep_string_iterator() if override.is_discrete_sweep() else [given]:
        if isinstance(option, dict):
            raise ConfigError(f"{argument}: {name} takes the name of an option. Give keys one by one: {name}.KEY=VALUE")
        for one in option if isinstance(option, list) else [option]:
            check_option(name, str(one).removesuffix(".yaml"), argument, groups)


def check_option(group: str, option: str, said: str, groups: Groups) -> None:
    """Refuse an option that the group has not. Raises `ConfigError`."""
    options = groups[group]
    if option in options:
        return
    if option == "None":
        raise ConfigError(f"{said}: a group cannot be without an option. Leave it out, or choose one of {', '.join(options)}")
    near = difflib.get_close_matches(option, options, len(options), 0.5)
    elsewhere = [f"{other}={option}" for other in groups if option in groups[other]]
    told = f"Did you mean {elsewhere[0]}? " if elsewhere else ""
    raise ConfigError(f"{said}: group {group} has no {option!r}. {told}There is {', '.join([*near, *(one for one in options if one not in near)])}")
