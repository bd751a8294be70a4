"""What servers are started with: flags, devices, and the config that decides them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.config import AllocationConfig, ClusterKind, Config, ConfigError, Dtype, EngineConfig, EngineParallelConfig, Server
from workers.messages.parts import Version
from workers.rollout.engines import replica
from workers.rollout.engines.servers.devices import of_job, of_replica, of_server
from workers.rollout.engines.servers.process import SGLANG_START, ServerProcess
from workers.rollout.engines.servers.sglang.options import flags
from workers.run.folder import RunFolder


def sglang(**changes: object) -> EngineConfig:
    return EngineConfig(**{"server": Server.sglang, **changes})  # type: ignore[arg-type]


def test_flags_of_sglang() -> None:
    config = sglang(dtype=Dtype.bfloat16, num_slots=96, context_length=2048, mem_fraction=0.8, device="cuda",
                    parallel=EngineParallelConfig(tp=4, pp=2, ep=2, dp_attention=2), extra_args=["--disable-cuda-graph"])
    config.check()
    words = flags(config, Path("/models/x"), Version(0, 0))
    given_as = {flag: value for flag, value in pairwise(words) if flag.startswith("--") and not value.startswith("--")}
    assert given_as == {
        "--model-path": "/models/x", "--weight-version": "0.0", "--dtype": "bfloat16", "--context-length": "2050", "--max-running-requests": "96",
        "--tp-size": "4", "--pp-size": "2", "--ep-size": "2", "--attn-dp-size": "2", "--log-level-http": "warning", "--device": "cuda",
        "--mem-fraction-static": "0.8"}
    assert words[-3:] == ["--sleep-on-idle", "--skip-server-warmup", "--disable-cuda-graph"]
    plain = flags(sglang(), Path("/models/x"), Version(0, 0))
    assert not {"--attn-dp-size", "--device", "--mem-fraction-static", "--api-key", "--host", "--port"} & set(plain)


@pytest.mark.parametrize("server", [Server.sglang, Server.embedded])
def test_servers_are_told_to_keep_routing_only_where_it_is_replayed(server: Server) -> None:
    for tells in (False, True):
        words = ServerProcess(EngineConfig(server=server), Path("/models/x"), Path("/log"), tells_routing=tells)._command(Version(0, 0), 3)
        assert ("--enable-return-routed-experts" in words) is tells


@pytest.mark.parametrize("argument", ["--tp-size=2", "--tp", "--host", "--port=1", "--api-key=secret", "--api_key=secret", "--admin-api", "--mod",
                                      "--config=x.yaml", "--data-parallel-size"])
def test_flags_that_headway_sets_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.extra_args=.*flags that Headway sets itself"):
        sglang(extra_args=["--disable-cuda-graph", argument]).check()


@pytest.mark.parametrize("arguments", [["--chunked-prefill-size", "8192"], ["--enable-deterministic-inference"], ["--attention-backend=fa3"], []])
def test_other_flags_are_passed_on(arguments: list[str]) -> None:
    sglang(extra_args=arguments).check()


@pytest.mark.parametrize(("changes", "words"), [
    ({"parallel": EngineParallelConfig(tp=2)}, "engine.parallel.tp=2: must be 1 with engine.server=embedded"),
    ({"python": "/x"}, "engine.python='/x': must be empty with engine.server=embedded"),
    ({"server": Server.synthetic, "extra_args": ["-v"]}, "engine.extra_args"),
    ({"server": Server.sglang, "parallel": EngineParallelConfig(tp=4, ep=3)}, "engine.parallel.ep=3: must divide engine.parallel.tp=4"),
    ({"server": Server.sglang, "parallel": EngineParallelConfig(tp=0)}, "engine.parallel.tp=0: must be at least 1"),
    ({"server": Server.sglang, "mem_fraction": 1.0}, "engine.mem_fraction=1.0"),
    ({"max_restarts": -1}, "engine.max_restarts=-1"), ({"health_timeout_s": 0.0}, "engine.health_timeout_s=0.0"),
])
def test_impossible_engines_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**changes).check()
    assert words in str(caught.value)


def test_a_replica_has_a_server_for_each_unit_of_devices() -> None:
    config = Config(allocation=AllocationConfig(num_devices=16, replica_size=8), engine=sglang(parallel=EngineParallelConfig(tp=2, pp=2)))
    config.model.path = "/models/x"
    config.check()
    assert config.num_servers == 2
    config.allocation.replica_size = 6
    with pytest.raises(ConfigError, match=r"allocation\.replica_size=6: must be a multiple of the 4 devices of one server.*Use 4"):
        config.check()
    assert Config(allocation=AllocationConfig(replica_size=3)).num_servers == 3


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_no_two_servers_of_a_machine_share_a_gpu(unit: int, num_servers: int, num_replicas: int, everything: bool) -> None:
    size = unit * num_servers
    allocation = AllocationConfig(num_devices=size * num_replicas + 1, replica_size=size)
    names = [str(3 * index) for index in range(allocation.num_devices)]
    visible = "all" if everything else ",".join(names)
    devices = [of_replica(visible, number, allocation) for number in range(num_replicas)]
    seen = [device for mine in devices for server in range(num_servers) for device in of_server(mine, server, unit).split(",")]
    expected = [str(index) for index in range(allocation.num_devices)] if everything else names
    assert sorted(seen) == sorted(expected[1:]), "the first is training's"


def test_the_gpus_of_a_job_are_those_that_slurm_gave_it() -> None:
    assert of_job("4,5,GPU-a,7", 2) == ["4", "5"] and of_job(None, 3) == ["0", "1", "2"]
    assert of_server(of_job("4,5,GPU-a,7", 4), 1, 2) == "GPU-a,7"
    for visible in ("4", ""):
        with pytest.raises(ConfigError, match=r"allocation\.replica_size=2: this job has \d GPUs"):
            of_job(visible, 2)
    with pytest.raises(ConfigError, match=r"allocation\.num_devices=4: the launcher sees 1 GPUs"):
        of_replica("0", 0, AllocationConfig(num_devices=4))


def test_replicas_of_one_machine_have_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker is another process: it must not get what the first one holds."""
    run = RunFolder.create(tmp_path / "run")
    monkeypatch.delenv("HEADWAY_GPUS", raising=False)
    config = Config(allocation=AllocationConfig(num_devices=3, replica_size=1), engine=sglang())
    assert replica.local_devices(run, config, 1) == ["2"]
    code = ("import sys; from pathlib import Path; from workers.config import *; from workers.rollout.engines import replica; "
            "from workers.run.folder import RunFolder; "
            "print(replica.local_devices(RunFolder(Path(sys.argv[1])), Config(allocation=AllocationConfig(num_devices=3), "
            "engine=EngineConfig(server=Server.sglang)), 1))")
    answers = [subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert answers == ["['1']\n"] * 2, "what ended has given its place back"
    assert replica.local_devices(run, Config(engine=sglang(device="cpu")), 1) is None and replica.local_devices(run, Config(), 1) is None


def test_each_node_of_a_replica_has_its_share_of_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, config = RunFolder(tmp_path), Config(allocation=AllocationConfig(replica_size=4), engine=sglang(parallel=EngineParallelConfig(tp=4)))
    config.cluster.kind = ClusterKind.slurm
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert replica.local_devices(run, config, 2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="this job has 1 GPUs"):
        replica.local_devices(run, config, 2)


@pytest.mark.parametrize(("version", "words"), [
    ("", "has no SGLang. Install SGLang 0.5.21 or newer, before 0.6"), ("0.5.20.post2", "has SGLang 0.5.20.post2: must be SGLang 0.5.21"),
    ("0.6.0rc1", "has SGLang 0.6.0rc1"), ("0.5.21", ""), ("0.5.23.dev3+g0123abc", "")])
def test_an_sglang_that_cannot_be_used_is_told_by_its_version(tmp_path: Path, version: str, words: str) -> None:
    if version:
        package = tmp_path / f"sglang-{version}.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    answer = subprocess.run([sys.executable, str(SGLANG_START), "--check"], capture_output=True, text=True, check=False,
                            env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert answer.returncode == (2 if words else 0) and words in answer.stderr
    assert not words or (answer.stderr.startswith("engine.server=sglang: ") and "engine.python" in answer.stderr)


def test_its_start_needs_nothing_but_the_standard_library() -> None:
    code = f"import json, runpy, sys; runpy.run_path({str(SGLANG_START)!r}); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in json.loads(done.stdout) if name.partition(".")[0] in ("workers", "launcher", "msgspec", "psutil", "sglang")] == []
