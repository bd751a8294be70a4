"""Which dtype is computed in: what this machine's kernels run, tried; and what is made of auto and of what was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from launcher.config.cluster import GpuRequest
from launcher.config.schema import FullConfig
from launcher.preflight.device_choice import Found, ask, settle
from workers.config import ClusterKind, ConfigError, Dtype, RunKind, Server
from workers.model import dtypes

PLAIN: Found = {"cpu": {"name": "CPU with AVX2", "runs": ["float32"], "best": "float32"}}
BOTH: Found = {"cpu": {"name": "CPU with AVX512", "runs": ["float32", "bfloat16"], "best": "bfloat16"}}
SLOW: Found = {"cpu": {**BOTH["cpu"], "best": "float32"}}
GPU: Found = {**PLAIN, "cuda": {"name": "H200", "runs": ["float32", "bfloat16", "float16"], "best": "bfloat16"}}


def config(engine: str = "auto", trainer: str = "auto", **values: Any) -> FullConfig:
    result = FullConfig()
    result.engine.dtype, result.trainer.dtype = Dtype(engine), Dtype(trainer)
    for name, value in values.items():
        part, _, key = name.partition("__")
        setattr(getattr(result, part), key, value)
    return result


@pytest.mark.parametrize(("found", "server", "device", "engine", "trainer"), [
    (PLAIN, Server.embedded, "", "float32", "float32"), (BOTH, Server.embedded, "", "bfloat16", "bfloat16"),
    (SLOW, Server.embedded, "", "float32", "float32"), (GPU, Server.embedded, "", "float32", "bfloat16"),
    (GPU, Server.sglang, "", "bfloat16", "bfloat16"), (GPU, Server.sglang, "cpu", "float32", "bfloat16"),
    (BOTH, Server.sglang, "", "bfloat16", "bfloat16")])
def test_auto_is_the_best_of_the_device_that_each_part_uses(found: Found, server: Server, device: str, engine: str, trainer: str) -> None:
    given = config(engine__server=server, engine__device=device)
    told = settle(given, lambda: found).told
    assert (given.engine.dtype.value, given.trainer.dtype.value) == (engine, trainer)
    assert told.startswith(f"dtype: engine and trainer {engine} (auto: " if engine == trainer else f"dtype: engine {engine} (auto: ")
    assert engine == trainer or f", trainer {trainer} (auto: " in told


@pytest.mark.parametrize(("gpus", "dtype", "why"), [(GpuRequest.gres, "bfloat16", "ask for GPUs"), (GpuRequest.none, "float32", "ask for no GPUs")])
def test_on_slurm_nobody_is_asked(gpus: GpuRequest, dtype: str, why: str) -> None:
    given = config(cluster__kind=ClusterKind.slurm)
    given.cluster.inference.gpus = given.cluster.train.gpus = gpus
    assert why in settle(given, pytest.fail).told and (given.engine.dtype.value, given.trainer.dtype.value) == (dtype, dtype)


@pytest.mark.parametrize(("engine", "trainer", "key"), [
    ("bfloat16", "float32", "engine"), ("float32", "bfloat16", "trainer"), ("float16", "auto", "engine")])
def test_what_a_machine_cannot_run_is_refused_with_what_it_can(engine: str, trainer: str, key: str) -> None:
    given = config(engine, trainer)
    wanted = getattr(given, key).dtype.value
    with pytest.raises(ConfigError, match=rf"{key}\.dtype='{wanted}': the kernels .* CPU with AVX2 do not run it; .*{key}\.dtype=float32"):
        settle(given, lambda: PLAIN)


def test_what_was_asked_for_and_runs_stays_and_float32_asks_nobody() -> None:
    given = config("bfloat16", "float32")
    assert settle(given, lambda: SLOW).told == "dtype: engine bfloat16, trainer float32"
    assert settle(config("float32", "float32"), pytest.fail).told == "dtype: engine and trainer float32"


@pytest.mark.parametrize(("kind", "told"), [(RunKind.supervised, "trainer"), (RunKind.evaluation, "engine")])
def test_only_what_computes_is_told_and_no_auto_is_left(kind: RunKind, told: str) -> None:
    given = config(run__kind=kind)
    assert settle(given, lambda: BOTH).told.startswith(f"dtype: {told} bfloat16 (auto: ")
    assert Dtype.auto not in (given.engine.dtype, given.trainer.dtype)


def test_the_trainer_takes_no_float16() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.dtype='float16'.*engine\.dtype may be float16"):
        config(trainer="float16").trainer.check()


@pytest.mark.parametrize("narrow", [False, True])
def test_this_machine_says_what_it_runs(narrow: bool) -> None:
    """What is packed gives what is not packed; a CPU without AVX-512, as the two variables make of any, gets float32."""
    environment = {**os.environ, **({"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"} if narrow else {})}
    ended = subprocess.run([sys.executable, "-m", "workers.model.dtypes"], env=environment, capture_output=True, text=True, timeout=120, check=True)
    cpu = json.loads(ended.stdout)["cpu"]
    assert cpu["best"] in cpu["runs"] and "float32" in cpu["runs"] and cpu["gflops"] > 0
    assert not narrow or cpu["runs"] == ["float32"]
    assert narrow or ask()["cpu"]["runs"] == cpu["runs"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_layers_are_those_of_torch(dtype: torch.dtype) -> None:
    if not dtypes.packs(dtype):
        assert dtypes.speed(dtype) == 0
        return
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 70), (33, 70), (33,)))
    packed = dtypes.packed_linear(x, dtypes.pack(weight), bias)
    assert packed.dtype is dtype
    assert torch.allclose(packed.float(), F.linear(x.float(), weight.float(), bias.float()), atol=1e-4 if dtype is torch.float32 else 0.2)


def test_a_torch_without_onednn_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(dtypes, "pack", absent)
    dtypes.packs.cache_clear()
    assert not dtypes.packs(torch.float32)
    assert dtypes.look()["cpu"] | {"name": ""} == {"name": "", "runs": ["float32"], "best": "float32", "gflops": 0.0}
    dtypes.packs.cache_clear()
