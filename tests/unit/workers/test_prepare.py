"""What is refused before anything is submitted, as far as weights are concerned."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from tests.support.model_folders import write_random_model
from workers import prepare
from workers.config import ClusterKind, Config, ConfigError, Dtype, LoraConfig, RouterReplay, RoutingShape, Transport
from workers.model.adapter_shapes import pair_shapes
from workers.model.architecture import Architecture
from workers.prepare import check_model, check_weights_folder
from workers.run import paths
from workers.run.folder import RunFolder
from workers.weights.locations import places


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    return write_random_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(paths, "MEMORY", tmp_path / "memory")
    return RunFolder.create(tmp_path / "run")


def config(transport: Transport, where: str, kind: ClusterKind) -> Config:
    result = Config()
    result.weights.transport, result.weights.dir, result.cluster.kind, result.engine.dtype = transport, where, kind, Dtype.bfloat16
    return result


def test_only_a_mixture_has_routing_to_be_replayed(tmp_path: Path) -> None:
    setup = Config()
    for family, shape in (("llama", RoutingShape()), ("qwen3_moe", RoutingShape(2, 0, 2, 4)), ("glm4_moe", RoutingShape(1, 1, 4, 8))):
        write_random_model(tmp_path / family, family)
        setup.algorithm.router_replay = RouterReplay.off
        assert check_model(tmp_path / family, setup).routing == shape
        setup.algorithm.router_replay = RouterReplay.rollout
        if family == "llama":
            with pytest.raises(ConfigError, match=r"algorithm\.router_replay='rollout': must be off with a dense model"):
                check_model(tmp_path / family, setup)
        else:
            check_model(tmp_path / family, setup)


@pytest.mark.parametrize("kind", list(ClusterKind))
@pytest.mark.parametrize(("transport", "where"), [("zmq", "auto"), ("zmq", "given"), ("nccl", "auto"), ("disk", "run"), ("disk", "given")])
def test_what_is_in_the_way_is_said(run: RunFolder, architecture: Architecture, tmp_path: Path, transport: str, where: str,
                                    kind: ClusterKind) -> None:
    setup = config(Transport(transport), str(tmp_path / "given") if where == "given" else where, kind)
    check_weights_folder(setup, run, architecture)
    store, shared = places(run, setup)
    store.mkdir(parents=True)
    if kind is ClusterKind.local:
        with pytest.raises(ConfigError, match=r"weights\.dir=.*must not exist.*Choose another weights\.dir"):
            check_weights_folder(setup, run, architecture)
    else:
        check_weights_folder(setup, run, architecture)  # nodes have their own
    store.rmdir()
    if transport == "disk":
        assert shared is not None
        shared.mkdir(parents=True)
        with pytest.raises(ConfigError, match="must not exist"):
            check_weights_folder(setup, run, architecture)


def test_too_little_room_is_said_before_anything_starts(run: RunFolder, architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "NUM_VERSIONS", 1 << 40)
    with pytest.raises(ConfigError, match=r"weights\.dir='auto': .*the weights take \d+ MiB in .*/memory, where \d+ MiB are free\. Free"):
        check_weights_folder(config(Transport.zmq, "auto", ClusterKind.local), run, architecture)
    check_weights_folder(config(Transport.zmq, "auto", ClusterKind.slurm), run, architecture)
    shutil.rmtree(run.path)


def test_adapters_alone_need_room_for_merged_versions_on_this_machine_and_little_on_shared_storage(
        run: RunFolder, architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = config(Transport.disk, str(tmp_path / "given"), ClusterKind.local)
    setup.weights.adapter_only, setup.trainer.lora = True, LoraConfig(rank=1)
    model = 2 * sum(map(math.prod, architecture.tensor_shapes().values()))
    adapters = 4 * sum(map(math.prod, pair_shapes(architecture, setup.trainer.lora).values()))
    free = {tmp_path: 3 * adapters, tmp_path / "memory": 2 * model}
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    check_weights_folder(setup, run, architecture)
    for short, words in ((tmp_path, "3 versions"), (tmp_path / "memory", "2 versions")):
        free[short] -= 1
        with pytest.raises(ConfigError, match=f"{words} of the weights take .* in {short}, "):
            check_weights_folder(setup, run, architecture)
        free[short] += 1
