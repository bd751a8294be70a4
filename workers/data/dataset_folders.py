"""Which files of a Hugging Face dataset's folder hold a split.

    save_to_disk of one split       state.json, data-00000-of-00001.arrow
    save_to_disk of several         dataset_dict.json, one folder like that for each
    as the hub lays them out        [data/ | SUBSET/]SPLIT-00000-of-00002.parquet, SPLIT.jsonl, SPLIT/0000.parquet, ...
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from workers.config import ConfigError
from workers.data.rows import suffix

_SHARD = re.compile(r"(?P<split>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(-[0-9a-f]{8,})?")
_ABOUT = ("dataset_info.json", "dataset_infos.json")
_NUMBER = re.compile(r"(part-)?[0-9]+")


def files_of_split(folder: Path, split: str, subset: str = "", prefix: str = "data.") -> list[Path]:
    """The files of `split` in their order; `prefix` begins the config keys in errors.

    Raises `ConfigError` if there is no such split or subset, or a file of it is missing.
    """
    if not folder.is_dir():
        raise ConfigError(f"{prefix}path={str(folder)!r}: there is no such folder. Give the folder of a Hugging Face dataset")
    if (folder / "state.json").is_file():
        return _saved(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = _read(folder / "dataset_dict.json").get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        return _saved(folder / _chosen(split, names, f"{prefix}split", folder))
    return _published(folder, split, subset, prefix)


def _saved(folder: Path) -> list[Path]:
    state = _read(folder / "state.json")
    if state.get("_indices_data_files"):
        raise ConfigError(f"{folder}: its rows are a selection, by an old version of datasets. Save it again after flatten_indices()")
    try:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder}/state.json: names no data files ({error!r}). Save the dataset again with save_to_disk") from error
    for file in files:
        if file.parent != folder or not file.is_file():
            raise ConfigError(f"{folder}/state.json: names {file.name}, which is not there. Copy the folder again")
    return files


def _published(folder: Path, split: str, subset: str, prefix: str) -> list[Path]:
    found: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if suffix(path) and path.name not in _ABOUT and path.is_file() and not any(part.startswith(".") for part in inside.parts):
            own_subset, own_split = _names(inside)
            found[own_subset][own_split].append(path)
    if not found:
        raise ConfigError(f"{prefix}path={str(folder)!r}: holds no Parquet, Arrow or JSON files. Give the folder of a Hugging Face dataset")
    if len(found) == 1 and (not subset or prefix != "data."):  # data.subset is that of data.path
        subset = next(iter(found))
    splits = found[_chosen(subset, sorted(found), "data.subset", folder)]
    files = splits[_chosen(split, sorted(splits), f"{prefix}split", folder)]
    _check_whole(files, folder)
    return files


def _names(inside: Path) -> tuple[str, str]:
    """Subset and split of a file, by its place in the folder."""
    parents, stem = list(inside.parent.parts), inside.name.removesuffix(suffix(inside))
    shard = _SHARD.fullmatch(stem)
    if shard is not None:
        split = shard["split"]
    elif _NUMBER.fullmatch(stem) and parents:
        split = parents.pop()
    else:
        split = stem
    return "/".join(part for part in parents if part != "data"), split


def _check_whole(files: list[Path], folder: Path) -> None:
    if len({suffix(file) for file in files}) > 1 or len({file.parent for file in files}) > 1:
        raise ConfigError(f"{folder}: {files[0].relative_to(folder)} and {files[-1].relative_to(folder)} hold the same split. Delete one of them")
    shards = [_SHARD.fullmatch(file.name.removesuffix(suffix(file))) for file in files]
    numbers = [int(shard["number"]) for shard in shards if shard is not None]
    count = next((int(shard["count"]) for shard in shards if shard is not None), 0)
    if count and numbers != list(range(count)):
        missing = sorted(set(range(count)) - set(numbers))
        raise ConfigError(f"{folder}: {files[0].relative_to(folder)} is one of {count} files, and "
                          f"{f'number {missing[0]} is missing' if missing else 'some are there twice'}. Copy the folder again")


def _chosen(name: str, names: list[str], key: str, folder: Path) -> str:
    if name in names:
        return name
    what, near = "subset" if key == "data.subset" else "split", difflib.get_close_matches(name, names, n=1)
    raise ConfigError(f"{key}={name!r}: {folder} has no such {what}{f'; did you mean {near[0]!r}?' if near else '.'} "
                      f"Use one of {', '.join(map(repr, names)) or 'none: there are none'}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not readable ({error}). Save the dataset again with save_to_disk") from error
