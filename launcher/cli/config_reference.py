"""`headway config [NAME ...]`: the groups with their options, and the keys with type, default, unit and a line each. NAME: a group, a section, a key,
or a part of a key's name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.arguments import Parser, refuse
from launcher.cli import schema_keys
from launcher.cli.schema_keys import ANY, Key

PROG = "headway config"
WIDE = 200


def main(arguments: list[str] | None = None, conf: Path = Path("conf")) -> int:
    """Command line; exit status 2 where nothing has such a name."""
    parser = Parser(prog=PROG, description=" ".join((__doc__ or "").split("\n")[0:1]))
    parser.add_argument("names", metavar="NAME", nargs="*", help="group, section, key, or part of a key's name; without one: all groups and sections")
    parser.add_argument("--json", dest="as_json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    console = Console(markup=False, highlight=False)
    console.width = console.width if console.is_terminal else WIDE
    groups = read_groups(conf)
    found: list[Key] = []
    for name in options.names:
        inside = list(matching(name.partition("=")[0].strip("+")))
        if not inside and name not in groups:
            near = schema_keys.nearest(name)
            told = f"Did you mean {', '.join(near)}?" if near else "`headway config` lists them"
            return refuse(f"there is no group, section or key {name}. {told}")
        found += inside
    if options.as_json:
        print(json.dumps([{"key": one.name, "type": one.kind, "default": one.shown, "unit": one.unit, "line": one.line}
                          for one in (found if options.names else schema_keys.all_keys().values())]
                         + [{"group": name, "option": option, "line": line} for name in options.names
                            for option, line in groups.get(name, {}).items()]))
        return 0
    for name in options.names or groups:
        if name in groups:
            console.print(_options(name, groups[name]))
            console.print()
    console.print(_table(found) if options.names else _sections(groups))
    if not options.names:
        console.print("\nheadway config NAME shows the keys of a section, the options of a group, or a key; every key is given as KEY=VALUE.")
    return 0


def read_groups(conf: Path) -> dict[str, dict[str, str]]:
    """The options of each group with the first sentence of what their files say about them."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(conf.glob("*/*.yaml")):
        found.setdefault(path.parent.name, {})[path.stem] = _first_comment(path)
    return found


def _first_comment(path: Path) -> str:
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return re.split(r"(?<!Eq)(?<!Dr)\. (?=[A-Z0-9'])", " ".join(lines))[0].rstrip(".")


def matching(name: str) -> Iterator[Key]:
    """The keys of a section, one key, or those whose name holds `name`. What three roles share is listed once."""
    known = schema_keys.all_keys()
    if name in known:
        yield known[name]
    elif schema_keys.is_section(name):
        yield from (key for own, key in known.items() if own.startswith(f"{name}.") and _listed(own, name))
    elif (given := schema_keys.find(name)) is not None:
        yield given
    else:
        yield from (key for own, key in known.items() if name in own and _listed(own, name))


def _listed(own: str, name: str) -> bool:
    """Whether a key is listed: cluster.inference.* and cluster.reward.* are as cluster.train.*, a part of a mixture as data, unless asked for."""
    return not any(own.startswith(one) and not name.startswith(one.rstrip(".")) for one in ("cluster.inference.", "cluster.reward.", "data.parts."))


def _options(group: str, options: dict[str, str]) -> Table:
    table = _columns(f"{group}=OPTION", "")
    for option, line in options.items():
        table.add_row(f"{group}={option}", Text(line))
    return table


def _table(found: list[Key]) -> Table:
    table = _columns("key", "default", "type", "")
    for key in dict.fromkeys(one.name for one in found):
        one = next(one for one in found if one.name == key)
        table.add_row(one.name.replace(ANY, "NAME"), Text(one.shown), one.kind, Text(one.told))
    return table


def _sections(groups: dict[str, dict[str, str]]) -> Table:
    table = _columns("section", "keys")
    names = dict.fromkeys(one.split(".")[0] for one in schema_keys.all_keys())
    for name in names:
        table.add_row(f"{name}.", Text(", ".join(own.removeprefix(f"{name}.") for own in schema_keys.all_keys() if own.startswith(f"{name}.")
                                                 and _listed(own, name))))
    return table


def _columns(*names: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for number, name in enumerate(names):
        table.add_column(name, no_wrap=number == 0, overflow="fold")
    return table


if __name__ == "__main__":
    sys.exit(main())
