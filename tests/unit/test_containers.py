"""One stack for GPUs: constraints/gpu.txt fits what setup.cfg asks for and what its head says of SGLang; both images are made of it in one way."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "constraints" / "gpu.txt"
FOLDER = ROOT / "slurm" / "containers"
INSTALL, DEFINITION, DOCKERFILE = FOLDER / "install.sh", FOLDER / "headway.def", FOLDER / "headway.Dockerfile"
HEAD = "\n".join(line for line in GPU.read_text().splitlines() if line.startswith("#"))
TARGET = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "platform_machine": "x86_64"}
INSIDE = "/opt/headway/src"


def pins() -> dict[str, str]:
    """The versions that constraints/gpu.txt pins, by name; every line is one exact pin."""
    found: dict[str, str] = {}
    for line in GPU.read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            assert canonicalize_name(name) not in found, name
            found[canonicalize_name(name)] = version
    return found


def needs(extra: str) -> Iterator[Requirement]:
    """What an extra of setup.cfg asks for, with what other extras of ours it names."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"] if not extra else config["options.extras_require"][extra]
    for line in filter(None, (line.partition("#")[0].strip() for line in lines.splitlines())):
        requirement = Requirement(line)
        if requirement.name == config["metadata"]["name"]:
            for other in requirement.extras:
                yield from needs(other)
        elif requirement.marker is None or requirement.marker.evaluate(TARGET):
            yield requirement


def said(pattern: str) -> str:
    """The one thing that the head of constraints/gpu.txt says of `pattern`."""
    (found,) = re.findall(pattern, HEAD)
    return str(found)


@pytest.mark.parametrize("extra", ["", "workers", "gpu"])
def test_the_pins_are_what_setup_cfg_asks_for(extra: str) -> None:
    pinned = pins()
    asked = list(needs(extra))
    assert asked
    assert not [str(one) for one in asked if canonicalize_name(one.name) not in pinned]
    assert not [(str(one), version) for one in asked if not one.specifier.contains(version := pinned[canonicalize_name(one.name)], prereleases=True)]


def test_the_gpu_extra_is_both_roles() -> None:
    names = {requirement.name for requirement in needs("gpu")}
    assert names >= {requirement.name for requirement in needs("workers")} | {"sglang"}
    assert "[gpu]" in INSTALL.read_text()


def test_trainer_and_sglang_have_one_torch_and_one_nccl() -> None:
    pinned = pins()
    assert pinned["sglang"] == said(r"SGLang: +(\S+) requires")
    required = dict(word.split("==") for word in said(r"SGLang: +\S+ requires (.+)").split())
    assert "torch" in required and required.items() <= pinned.items()
    assert pinned["nvidia-nccl-cu13"] == said(r"NCCL: +(\S+), pinned") and pinned["torch"] == said(r"NCCL: +\S+, pinned by torch (\S+)")
    assert [name for name in pinned if "nccl-cu" in name] == ["nvidia-nccl-cu13"]


def test_what_compiles_kernels_is_of_torchs_cuda() -> None:
    pinned, cuda = pins(), said(r"CUDA: +(\d+\.\d+\.\d+),")
    assert pinned["cuda-toolkit"].startswith(f"{cuda}.")
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-nvjitlink"):
        assert pinned[name].startswith(f"{cuda.rpartition('.')[0]}."), name
    for path in (DEFINITION, DOCKERFILE):
        (base,) = re.findall(r"^F(?:rom:|ROM) (?:docker\.io/)?(\S+)", path.read_text(), re.M)
        assert base == f"nvidia/cuda:{cuda}-devel-ubuntu24.04"


def section(name: str) -> list[str]:
    """The lines of a section of the Apptainer definition, without comments."""
    body = re.split(r"^%", DEFINITION.read_text(), flags=re.M)
    (found,) = [part for part in body if part.partition("\n")[0].strip() == name]
    return [line.strip() for line in found.splitlines()[1:] if line.strip() and not line.strip().startswith("#")]


def docker(word: str) -> list[str]:
    return re.findall(rf"^{word} (.+)$", DOCKERFILE.read_text(), re.M)


def test_both_images_get_the_same_files() -> None:
    copied = dict(line.split() for line in section("files"))
    assert all((ROOT / source).exists() and there == f"{INSIDE}/{source}" for source, there in copied.items())
    in_docker = {}
    for *sources, there in map(str.split, docker("COPY")):
        in_docker |= {source: f"{there}{source}" if there.endswith("/") else there for source in sources}
    assert in_docker == copied
    # What a wheel is made of (test_wheel.py), and the pins.
    assert set(copied) == {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "launcher", "workers", "conf", "slurm", "constraints"}


def test_both_images_are_made_by_one_script() -> None:
    script = f"{INSIDE}/{INSTALL.relative_to(ROOT)}"
    assert section("post") == [script] and section("test") == [f"{script} check"]
    assert docker("RUN") == [script, f"{script} check"]
    assert os.access(INSTALL, os.X_OK)


def test_both_images_have_the_same_environment() -> None:
    assert [line.removeprefix("export ") for line in section("environment")] == docker("ENV")
    (path,) = [line for line in docker("ENV") if line.startswith("PATH=")]
    (venv,) = re.findall(r"^VENV=(\S+)$", INSTALL.read_text(), re.M)
    assert path.startswith(f"PATH={venv}/bin:")


def ran(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False)


def test_the_script_parses() -> None:
    assert ran("-n", str(INSTALL)).returncode == 0
    done = ran(str(INSTALL), "chekc")
    assert done.returncode == 2 and "chekc" in done.stderr


def test_a_dry_run_only_resolves(tmp_path: Path) -> None:
    """With an interpreter whose environments hold a pip and a uv that write down what they are asked for."""
    log, interpreter, apt = tmp_path / "log", tmp_path / "python3.12", tmp_path / "bin" / "apt-get"
    tool = f'#!/bin/sh\necho "$(basename "$0") $*" >> {log}\n'
    make = "import sys; from pathlib import Path; folder = Path(sys.argv[1]) / 'bin'; folder.mkdir(parents=True)\n" \
           f"for name in ('pip', 'uv', 'python'): (folder / name).write_text({tool!r}); (folder / name).chmod(0o755)\n"
    interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} - \"$3\" <<'END'\n{make}END\n")
    apt.parent.mkdir()
    apt.write_text(tool)
    for program in (interpreter, apt):
        program.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = ran(str(INSTALL), HEADWAY_DRY_RUN="1", HEADWAY_PYTHON=str(interpreter), TMPDIR=str(temporary), PATH=f"{apt.parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    pip, uv = log.read_text().splitlines()
    assert re.fullmatch(r"pip install .*uv==[\d.]+", pip)
    assert uv.startswith("uv pip install ") and " --dry-run " in uv and f" -c {GPU} " in uv and uv.endswith(f" {ROOT}[gpu]")
    assert not list(temporary.iterdir())
