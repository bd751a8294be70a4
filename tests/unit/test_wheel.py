"""The wheel: it holds conf/ and slurm/, and what is installed from it works from any folder, without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def ran(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves its work beside the sources, and takes up again what it finds there."""
    copy, into = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for name in ("launcher", "workers", "conf", "slurm"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return into / ran([sys.executable, "-c", BUILD, str(into)], copy).splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_every_file_is_in_it(installed: Path) -> None:
    for name in ("conf", "slurm"):
        assert files(installed / "launcher" / "share" / name) == files(ROOT / name)
    for name in ("launcher", "workers"):
        ours = {path for path in files(ROOT / name) if not path.startswith("share/")}
        assert ours == {path for path in files(installed / name) if not path.startswith("share/conf/") and not path.startswith("share/slurm/")
                        and path != "share/__init__.py"}
    assert {path.parts[0] for path in map(Path, files(installed))} <= {"launcher", "workers", next(installed.glob("*.dist-info")).name}


@pytest.mark.parametrize("arguments", [["--help"], ["--dry-run", "experiment=tiny"], ["--dry-run", "experiment=code_tiny"]], ids=" ".join)
def test_it_works_from_an_empty_folder(arguments: list[str], installed: Path, tmp_path: Path) -> None:
    found = ran([sys.executable, "-c", "import launcher, workers; print(launcher.__file__, workers.__file__)"], tmp_path, PYTHONPATH=str(installed))
    assert found.count(str(installed)) == 2
    assert ran([sys.executable, "-m", "launcher", *arguments], tmp_path, PYTHONPATH=str(installed))
