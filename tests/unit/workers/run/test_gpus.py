"""GPUs that a job was given and cannot use: each cause has its own remedy. The GPUs are fake, the refusal is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("megatron.core")

from tests.support.megatron_case import config, write_model
from workers.config import Config, ConfigError, Device, Dtype, Transport, WeightsConfig
from workers.run import gpus, gpus_seen
from workers.run.gpus import Found, Gpu, cpus_of, problem, require_gpu, set_environment
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.megatron.parallel.process_group import _join

H100, T4 = Gpu("H100", (9, 0), "0000:1b:00.0"), Gpu("T4", (7, 5), "0000:1c:00.0")
ON_CUDA_13 = Found("2.14.1", "13.0", "2.30.7", "580.95.05")


def found(**changes: object) -> Found:
    return msgspec.structs.replace(ON_CUDA_13, **changes)


@pytest.mark.parametrize(("seen", "half", "visible", "words"), [
    (found(gpus=[H100]), True, None, ""),
    (found(gpus=[H100, T4]), False, None, ""),
    (found(gpus=[H100, T4]), True, None, "T4 does not compute in bfloat16"),
    (found(cuda="", torch="2.13.0+cpu"), True, None, "torch 2.13.0+cpu is built for CPUs. Install one for GPUs"),
    (found(driver="550.54.14"), True, None, "needs driver 580 or newer, and the node has 550.54.14"),
    (found(cuda="12.8", driver="520.61"), True, None, "needs driver 525 or newer"),
    (found(driver=""), True, None, "no NVIDIA driver"),
    (found(), True, "", "CUDA_VISIBLE_DEVICES='' shows none of them. Ask for GPUs (cluster.train.gpus)"),
    (found(), True, None, "torch sees none of its GPUs"),
    (found(cuda="12.8", driver="550.54"), True, None, "torch sees none of its GPUs"),
    (found(error="system not yet initialized"), True, None, "CUDA does not start: system not yet initialized")])
def test_each_cause_has_its_remedy(seen: Found, half: bool, visible: str | None, words: str) -> None:
    told = problem(seen, half, visible)
    assert told == "" if not words else words in told


def test_the_driver_is_what_the_kernel_says(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert gpus_seen.driver_version(str(file)) == ""
    for line in ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024",
                 "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build"):
        file.write_text(line + "\nGCC version: gcc 12.2.0\n")
        assert gpus_seen.driver_version(str(file)) == "550.54.14"


def test_any_interpreter_with_torch_says_what_it_sees(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, gpus_seen.__file__], capture_output=True, text=True, check=True, cwd=tmp_path,
                          env={"PATH": os.environ["PATH"]})
    assert gpus.found(json.loads(done.stdout.splitlines()[-1])).torch == gpus_seen.look()["torch"]


def test_training_that_was_given_gpus_does_not_begin_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_seen, "look", lambda: msgspec.to_builtins(found(driver="550.54")))
    setup = config(device=Device.cuda)
    with pytest.raises(ConfigError, match=r"trainer.device=cuda: torch 2.14.1 .* driver 580 .* trainer.device=cpu trains on CPUs"):
        MegatronEngine(setup, write_model("llama", tmp_path))
    for device in (Device.auto, Device.cpu):
        setup.trainer.device = device
        require_gpu(setup)


def test_what_cuda_reads_is_set_once_and_a_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Config()
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_CUMEM_ENABLE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    setup.trainer.device, setup.weights = Device.cuda, WeightsConfig(transport=Transport.zmq)
    set_environment(setup)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "NCCL_CUMEM_ENABLE" not in os.environ and "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    setup.weights.transport = Transport.nccl
    set_environment(setup)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and "PYTORCH_ALLOC_CONF" not in os.environ and os.environ["NCCL_CUMEM_ENABLE"] == "0"
    setup.trainer.device = Device.cpu
    set_environment(setup)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_the_interface_that_a_user_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import distributed

    from workers.trainer.megatron.parallel import process_group

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(process_group, "_store", lambda gang: None)
    monkeypatch.setattr(distributed, "init_process_group", lambda *arguments, **keywords: None)
    _join(Gang(0, 2, 0, "127.0.0.1", 1234, "eno1"))
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("ib0", "eno1")


def test_a_rank_keeps_to_the_cpus_next_to_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / H100.pci).mkdir()
    (tmp_path / H100.pci / "local_cpulist").write_text("0-2,8,10-11\n")
    assert cpus_of(H100.pci, tmp_path) == {0, 1, 2, 8, 10, 11} and cpus_of(T4.pci, tmp_path) == set()
    allowed, bound = {1, 2, 3, 11}, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: bound.append(cpus))
    monkeypatch.setattr(gpus_seen, "look", lambda: msgspec.to_builtins(found(gpus=[H100, T4])))
    monkeypatch.setattr(gpus, "cpus_of", lambda pci: cpus_of(pci, tmp_path))
    assert gpus.bind(0) == "bound to the 3 of 4 CPUs that are next to its GPU" and bound == [{1, 2, 11}]
    assert gpus.bind(1) == "" and len(bound) == 1, "nothing is known of it"
    allowed = {1, 2}
    assert gpus.bind(0) == "" and len(bound) == 1, "it has no others"


def test_bfloat16_is_what_is_asked_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_seen, "look", lambda: msgspec.to_builtins(found(gpus=[T4])))
    require_gpu(config(device=Device.cuda, dtype=Dtype.float32))
    with pytest.raises(ConfigError, match="trainer.dtype=float32"):
        require_gpu(config(device=Device.cuda, dtype=Dtype.bfloat16))


def test_a_driver_that_is_too_old_is_told_although_it_counts_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(number: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", raises)
    seen = gpus_seen.look()
    assert seen["gpus"] == [] and seen["error"] == "The NVIDIA driver on your system is too old"
    assert "needs driver 580" in problem(found(driver="550.54", error=seen["error"]), True, None)
