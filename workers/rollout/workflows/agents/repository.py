"""A repository with a failing test, as the `answer` of a row tells it, and whether its tests pass."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath

import msgspec

from workers.sandbox.containers.container import Container, pack
from workers.sandbox.outcome import SandboxError


class Repository(msgspec.Struct, forbid_unknown_fields=True):
    """`files`, `tests`: from paths to texts; `archive`: path of a tar with the files, instead of them or beneath; `command`: runs the tests, by bash,
    in the repository's folder; they have passed where it exits with 0 and its output holds `passed`, which a program that leaves too early has not
    written."""

    tests: dict[str, str]
    command: str
    passed: str
    files: dict[str, str] = {}
    archive: str = ""

    def packed(self) -> bytes:
        """All that the agent finds, as a tar. Raises `OSError` where the archive cannot be read."""
        return (Path(self.archive).read_bytes() if self.archive else b"") + pack(self.files | self.tests)

    def passes(self, container: Container, files: bytes) -> bool:
        """Whether the tests pass on `files`, as an agent has left them, with the tests as they were, and not what stands compiled for them. Raises
        `SandboxError` where it is the node that runs nothing."""
        ran = container.run(files, f"export PYTHONPYCACHEPREFIX=$(mktemp -d); {self.command}", pack(self.tests))
        if ran.failure and (failure := container.run(pack({}), "true").failure):
            raise SandboxError(f"no container can be run now: {failure}")
        return ran.status == 0 and self.passed in ran.output


def read_repository(reference: str) -> Repository:
    """Raises ValueError with what is wrong, and the remedy."""
    try:
        repository = msgspec.json.decode(reference, type=Repository)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is no repository ({error}). See docs/shell_agent.md") from error
    for path in (*repository.files, *repository.tests):
        parts = PurePosixPath(path)
        if parts.is_absolute() or not path or ".." in parts.parts:
            raise ValueError(f"the path {path!r} leads out of the repository. Give one within")
    for name in ("tests", "command", "passed"):
        if not getattr(repository, name):
            raise ValueError(f"{name!r} is empty. It says how a repository is judged")
    if repository.archive:
        _check_archive(repository.archive)
    return repository


def _check_archive(path: str) -> None:
    if not Path(path).is_absolute():
        raise ValueError(f"archive={path!r} is a relative path, which leads elsewhere on each node. Give an absolute one")
    try:
        with tarfile.open(path, "r:"):
            pass
    except (OSError, tarfile.TarError) as error:
        raise ValueError(f"archive={path!r} is no tar that can be read here ({error}). Make one with `git archive`, not compressed") from error
