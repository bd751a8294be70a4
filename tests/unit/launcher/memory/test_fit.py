"""Memory at plan time: what the estimate says of known models, what is refused, and that what is named instead fits."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from launcher.config.cluster import GpuRequest
from launcher.config.gpu_types import gib_of_type
from launcher.config.schema import FullConfig
from launcher.launch import before_start, on_slurm
from launcher.memory import capacity, micro_batches
from launcher.memory.activations import GIB, Layout, kept_bytes, layout
from launcher.memory.capacity import Capacities, Capacity, bytes_of, look, types_in
from launcher.memory.estimate import RankMemory, bytes_in_words, rank_memory, replica_memory, server_memory
from launcher.memory.fit import changed, check, nearest, needs
from launcher.memory.parameters import count_weights
from launcher.slurm import queries
from launcher.slurm.queries import NodeKind
from workers.config import (
    Advantage,
    AllocationConfig,
    ClusterKind,
    ConfigError,
    Dtype,
    EngineParallelConfig,
    LoraConfig,
    ModelSource,
    ParallelConfig,
    Recompute,
    RunKind,
    Server,
)
from workers.model.architecture import Architecture
from workers.model.experts import MixtureOfExperts
from workers.model.parallel_limits import check_engine
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError

COMMON: dict[str, Any] = {"max_positions": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "eos_token_ids": ()}
QWEN_7B = Architecture("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, tied=False, **COMMON)
QWEN_1B = Architecture("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, tied=True, **COMMON)
LLAMA_70B = Architecture("llama", 128256, 8192, 28672, 80, 64, 8, 128, tied=False, **COMMON)
QWEN_30B_A3B = Architecture("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, tied=False, mixture=MixtureOfExperts(128, 8, 768, True), **COMMON)
MODELS = [QWEN_7B, QWEN_1B, LLAMA_70B, QWEN_30B_A3B]


def config(devices: int = 128, per_node: int = 8, gpu_gb: float = 0.0, tokens: int = 32768, **trainer: Any) -> FullConfig:
    """Answers of up to 27k tokens on a SLURM cluster, in bfloat16."""
    full = FullConfig()
    full.model.path = "/model"
    full.cluster.kind = ClusterKind.slurm
    full.cluster.train.time = full.cluster.inference.time = "60"
    full.cluster.train.gpu_memory_gb = gpu_gb
    full.allocation = AllocationConfig(devices, replica_size=per_node or 1, devices_per_node=per_node)
    full.engine.context_length, full.workflow.max_new_tokens = 28672, 27648
    full.workflow.group_size, full.engine.dtype = 16, Dtype.bfloat16
    full.trainer = dataclasses.replace(full.trainer, batch_groups=512, num_minibatches=4, microbatch_tokens=tokens,
                                       **{"dtype": Dtype.bfloat16, **trainer})
    return full


def rank(full: FullConfig, architecture: Architecture, gpu: bool = True) -> RankMemory:
    return rank_memory(full, architecture, count_weights(architecture), layout(full, full.plan().num_train_devices, gpu))


def here(**sizes: float) -> Capacities:
    return Capacities(True, **{name: Capacity(size, "it", "the test") for name, size in sizes.items()})


# -- the estimate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "billions"), [(QWEN_7B, 7.62), (QWEN_1B, 1.54), (LLAMA_70B, 70.6), (QWEN_30B_A3B, 30.5)])
def test_models_have_as_many_parameters_as_their_makers_say(architecture: Architecture, billions: float) -> None:
    assert count_weights(architecture).total / 1e9 == pytest.approx(billions, rel=3e-3)


@pytest.mark.parametrize(("dtype", "sharded", "alone"), [(Dtype.bfloat16, 12, 18), (Dtype.float32, 8, 16)])
def test_bytes_for_each_parameter_are_those_of_megatrons_table(dtype: Dtype, sharded: int, alone: int) -> None:
    for copies in (1, 4):
        full = config(devices=8 + copies, per_node=1, dtype=Dtype(dtype))
        full.allocation.inference_fraction = 8 / (8 + copies)
        found, number = rank(full, QWEN_7B), count_weights(QWEN_7B).total
        assert full.plan().num_train_devices == copies
        assert (found.parameters + found.gradients + found.optimizer) / number == pytest.approx(alone - sharded + sharded / copies, rel=1e-3)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(["tp", "pp", "cp", "ep"]), st.sampled_from(list(Recompute)), st.booleans(), st.booleans())
def test_splitting_more_takes_no_more_on_any_rank(architecture: Architecture, way: str, recompute: Recompute, gpu: bool, sequence: bool) -> None:
    assume(way != "ep" or architecture.mixture is not None)
    assume(way != "tp" or architecture.mixture is None or sequence)
    sizes = []
    for number in (1, 2, 4):
        full = config(recompute=recompute, parallel=ParallelConfig(sequence=sequence, **{way: number}))
        sizes.append(rank(full, architecture, gpu))
    for less, more in itertools.pairwise(sizes):
        assert more.parameters <= less.parameters and more.gradients <= less.gradients
        assert way in ("pp", "ep") or more.activations <= less.activations * 1.001
        assert more.total <= less.total * (1.0 if way == "tp" else 1.05)


@settings(deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from([1, 2, 4]), st.booleans())
def test_what_is_made_again_is_not_kept(architecture: Architecture, tp: int, gpu: bool) -> None:
    kept = [rank(config(recompute=mode, parallel=ParallelConfig(tp=tp)), architecture, gpu).activations for mode in Recompute]
    assert kept[0] > kept[1] > kept[2]


def test_the_first_pipeline_stage_keeps_all_micro_batches_in_flight() -> None:
    full = config(parallel=ParallelConfig(pp=4))
    spread = layout(full, 32, gpu=True)
    first, last = (kept_bytes(full, QWEN_7B, spread, range(7), in_flight, in_flight == 1) for in_flight in (4, 1))
    assert first / last == pytest.approx(4, rel=0.15) and rank(full, QWEN_7B).activations == first


def test_a_supervised_run_has_one_response_to_a_prompt() -> None:
    """Whatever the workflow says, which it does not use."""
    full = config(share_prompts=True)
    full.engine.context_length, full.workflow.max_new_tokens = 4096, 16
    full.run.kind = RunKind.supervised
    alone = copy.deepcopy(full)
    alone.workflow.group_size = 1
    assert rank(full, QWEN_7B) == rank(alone, QWEN_7B)
    full.run.kind = RunKind.rl
    assert rank(full, QWEN_7B).activations > rank(alone, QWEN_7B).activations


def test_a_micro_batch_is_no_larger_than_a_minibatch() -> None:
    full = config()
    full.engine.context_length, full.workflow.max_new_tokens = 64, 16
    full.trainer.batch_groups = full.trainer.num_minibatches = 4
    assert layout(full, 8, gpu=True).tokens == 16 * 64


def test_an_offloaded_optimizer_is_in_the_hosts_memory() -> None:
    none, half = (rank(config(optimizer_offload=share), QWEN_7B) for share in (0.0, 0.5))
    assert half.optimizer == none.optimizer / 2 and half.host - none.host == pytest.approx(none.optimizer / 12 * 16 / 2)
    assert rank(config(optimizer_offload=0.5), QWEN_7B, gpu=False).optimizer == none.optimizer, "there is nothing to offload to"


def test_a_reference_model_and_a_critic_are_models_too() -> None:
    full = config()
    alone = rank(full, QWEN_7B)
    full.algorithm.kl_weight = 0.1
    assert rank(full, QWEN_7B).parameters == 2 * alone.parameters and rank(full, QWEN_7B).gradients == alone.gradients
    full.algorithm.advantage = Advantage.gae
    head = QWEN_7B.vocab_size * QWEN_7B.hidden_size
    assert rank(full, QWEN_7B).gradients == 2 * alone.gradients - 4 * head


def test_adapters_take_gradients_and_state_of_themselves_alone() -> None:
    """A reference model is the policy without them."""
    parallel = ParallelConfig(tp=2)
    whole, adapted = (rank(config(parallel=parallel, lora=LoraConfig(rank=number)), QWEN_7B) for number in (0, 16))
    own = (adapted.parameters - whole.parameters) / 2
    assert 20e6 < own < 40e6, "40 million in all, of which each rank has half of one of each pair and the other one"
    assert adapted.gradients == pytest.approx(4 * own) and adapted.optimizer == pytest.approx(whole.optimizer * own / (whole.parameters / 2))
    assert whole.total - adapted.total >= 0.95 * (whole.gradients + whole.optimizer)
    full = config(parallel=parallel, lora=LoraConfig(rank=16))
    full.algorithm.kl_weight = 0.1
    assert rank(full, QWEN_7B).parameters == adapted.parameters


def test_a_replica_holds_two_versions_and_its_cache() -> None:
    full, weights = config(), count_weights(QWEN_7B)
    full.allocation.replica_size = 1
    found = replica_memory(full, QWEN_7B, weights)
    assert found["weights"] == 2 * 2 * weights.total
    assert found["KV cache"] == 65 * 28672 * 2 * 28 * 4 * 128 * 2
    full.allocation.replica_size = 3
    assert replica_memory(full, QWEN_7B, weights)["weights"] == 3 * found["weights"], "an engine on each device"
    for server in (Server.synthetic, Server.sglang):
        full.engine.server = server
        assert replica_memory(full, QWEN_7B, weights).keys() == {"processes"}


def test_a_gpu_of_sglang_holds_its_part_of_the_weights_and_of_a_request() -> None:
    full, weights = config(), count_weights(QWEN_7B)
    full.engine.server = Server.sglang
    whole, cache = 2 * weights.total, 28672 * 2 * 28 * 4 * 128 * 2
    for parallel, share in ((EngineParallelConfig(), 1.0), (EngineParallelConfig(tp=2), 0.5), (EngineParallelConfig(tp=2, pp=2), 0.25)):
        full.engine.parallel = parallel
        assert server_memory(full, QWEN_7B, weights) == {"weights": whole * share, "KV cache of one request": cache * share}
    full.engine.parallel = EngineParallelConfig(tp=28)
    assert server_memory(full, QWEN_7B, weights)["KV cache of one request"] == pytest.approx(cache / 4), "7 ranks hold each head"
    full.engine.parallel = EngineParallelConfig(tp=4, dp_attention=4)
    held = server_memory(full, QWEN_7B, weights)
    assert held["KV cache of one request"] == cache, "one rank does the attention of a request"
    attention = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584)
    whole_on_each = attention + 152064 * 3584
    assert held["weights"] == pytest.approx(2 * ((weights.total - whole_on_each) / 4 + whole_on_each)), "of the attention, and of the embedding"


def test_a_model_that_is_too_large_for_a_gpu_of_sglang_is_spread_further() -> None:
    full = config(gpu_gb=80, recompute=Recompute.full, parallel=ParallelConfig(tp=8, pp=4), optimizer_offload=1.0)
    full.engine.server, full.allocation.replica_size, full.cluster.inference.gpu_memory_gb = Server.sglang, 1, 80
    with pytest.raises(ConfigError, match=r"engine.context_length=28672, engine.parallel.tp=1: an inference GPU takes at least about 1\d\d GiB .*, "
                                          r"and 90% of a GPU \(engine.mem_fraction\) has 72 GiB .* The nearest that fits: engine.parallel.tp=2 "
                                          r"allocation.replica_size=2"):
        check(full, LLAMA_70B, look(full))
    full.engine.parallel.tp = full.allocation.replica_size = 2
    full.engine.mem_fraction = 0.95
    assert any(line.startswith("an inference GPU takes at least about 7") for line in check(full, LLAMA_70B, look(full)))
    full.cluster.inference.gpu_memory_gb, full.cluster.inference.devices_per_node = 16, 8
    with pytest.raises(ConfigError, match="The nearest that fits: engine.parallel.tp=16 allocation.replica_size=16"):  # two nodes
        check(full, LLAMA_70B, look(full))
    full.engine.parallel.tp, full.engine.server = 16, Server.sglang
    of_node, of_all = (replica_memory(full, LLAMA_70B, count_weights(LLAMA_70B), nodes)["processes"] for nodes in (2, 1))
    assert of_node < of_all


@pytest.mark.parametrize(("architecture", "parallel", "words"), [
    (QWEN_7B, EngineParallelConfig(tp=3), "num_attention_heads=28"), (QWEN_7B, EngineParallelConfig(tp=14), "num_key_value_heads=4"),
    (QWEN_7B, EngineParallelConfig(pp=29), "num_hidden_layers=28"), (QWEN_7B, EngineParallelConfig(tp=2, ep=2), "has no experts"),
    (QWEN_30B_A3B, EngineParallelConfig(tp=3, ep=3, dp_attention=3), "num_experts=128")])
def test_models_that_sglang_cannot_split_so_are_refused(architecture: Architecture, parallel: EngineParallelConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.parallel\..*{words}"):
        check_engine(architecture, parallel)
    for possible in (EngineParallelConfig(), EngineParallelConfig(tp=4), EngineParallelConfig(tp=4, dp_attention=2, pp=3)):
        check_engine(architecture, possible)


@pytest.mark.parametrize(("number", "words"), [
    (12.34 * GIB, "12.3 GiB"), (140.4 * GIB, "140 GiB"), (35 * 2**20, "35 MiB"), (1023 * 2**20, "1023 MiB")])
def test_sizes_are_for_people(number: float, words: str) -> None:
    assert bytes_in_words(number) == words


# -- what does not fit -----------------------------------------------------------------------------------------------------


def test_what_fits_is_told() -> None:
    full = config(gpu_gb=80, recompute=Recompute.full, parallel=ParallelConfig(tp=4))
    lines = check(full, QWEN_7B, look(full))
    assert lines[0].startswith("a training rank takes about ") and " of 80 GiB (parameters 3.55 GiB, gradients 7.09 GiB, optimizer" in lines[0]
    assert lines[1].startswith("an inference replica takes about ") and len(lines) == 2


def test_without_a_known_room_all_is_only_told() -> None:
    full = config()
    assert " of " not in check(full, LLAMA_70B, look(full))[0]


def test_what_cannot_fit_is_refused_with_the_nearest_that_does() -> None:
    full = config(gpu_gb=80)
    with pytest.raises(ConfigError, match=r"^trainer.microbatch_tokens=32768, trainer.recompute=none.*a training rank takes about \d+ GiB "
                                          r"\(parameters 14.2 GiB.*a GPU has 80 GiB \(cluster.train.gpu_memory_gb=80\). "
                                          "The nearest that fits: trainer.recompute=full$"):
        check(full, QWEN_7B, look(full))


def test_where_nothing_fits_that_is_said() -> None:
    full = config(devices=2, per_node=1, gpu_gb=8)
    with pytest.raises(ConfigError, match="No layout that could be found fits: use devices with more memory"):
        check(full, LLAMA_70B, look(full))


def test_a_layout_that_the_model_cannot_have_is_refused_first() -> None:
    full = config(gpu_gb=80, parallel=ParallelConfig(tp=8))
    with pytest.raises(ConfigError, match="trainer.parallel.tp=8: must divide the model's num_attention_heads=28"):
        check(full, QWEN_7B, look(full))


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(MODELS), st.integers(8, 200), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([2, 16, 128]), st.booleans())
def test_the_nearest_fits_and_no_part_of_it_does(architecture: Architecture, gpu_gb: int, tp: int, pp: int, devices: int, fixed: bool) -> None:
    assume(devices > 2 or tp * pp == 1)
    full = config(devices=devices, per_node=min(8, devices // 2), gpu_gb=gpu_gb, parallel=ParallelConfig(tp=tp, pp=pp))
    if fixed:
        full.trainer.parallel.dp = full.plan().num_train_devices // (tp * pp)
    weights, room = count_weights(architecture), look(full)
    assume(not all(need.fits for need in needs(full, architecture, weights, room)))
    changes = nearest(full, architecture, weights, room)
    if changes is None:
        return
    better = changed(full, changes)
    better.check()
    assert all(need.fits for need in needs(better, architecture, weights, room))
    for key in changes.keys() - {"trainer.parallel.dp"}:
        rest = {other: value for other, value in changes.items() if other != key}
        try:
            found = needs(changed(full, rest), architecture, weights, room)
        except ConfigError:
            continue  # no split without it
        assert not all(need.fits for need in found), f"{key} need not be changed"


def test_of_a_run_that_goes_on_only_what_may_be_changed_is_named() -> None:
    full = config(gpu_gb=40)
    weights, room = count_weights(MODELS[0]), look(full)
    anything = nearest(full, MODELS[0], weights, room)
    assert anything is not None and anything.keys() - {"trainer.microbatch_tokens"}
    with pytest.raises(ConfigError, match="No layout that could be found fits"):
        check(full, MODELS[0], room, ["trainer.microbatch_tokens"])
    assert nearest(full, MODELS[0], weights, room, list(anything)) == anything


def test_an_inference_replica_gets_fewer_slots() -> None:
    full = config()
    full.allocation.replica_size, full.cluster.inference.mem = 1, "100G"
    with pytest.raises(ConfigError, match=r"engine.num_slots=64, engine.context_length=28672: an inference replica takes.*a job on its node has "
                                          r"100 GiB \(cluster.inference.mem=100G\). The nearest that fits: engine.num_slots=16"):
        check(full, QWEN_7B, look(full))


def test_ranks_share_the_memory_of_their_node() -> None:
    full = config(recompute=Recompute.full, optimizer_offload=1.0)
    full.cluster.train.mem = "100G"
    with pytest.raises(ConfigError, match=r"the ranks of a training node take about \d+ GiB .*a job on its node has 100 GiB"):
        check(full, QWEN_7B, look(full))
    full = config(devices=4, per_node=0, tokens=28672, recompute=Recompute.full)
    full.cluster.train.gpus, full.cluster.train.mem = GpuRequest.none, "2T"
    assert [line for line in check(full, QWEN_1B, look(full)) if line.startswith("the ranks of a training node take about")]


def test_on_this_machine_all_processes_share_its_memory() -> None:
    full = config(devices=2, per_node=0, recompute=Recompute.full)
    full.cluster.kind = ClusterKind.local
    full.engine.num_slots = 1
    full.weights.dir = "auto"
    room = Capacities(on_gpus=False, machine=Capacity(400 * GIB, "this machine", "the test"))
    line = check(full, QWEN_7B, room)[-1]
    assert "all processes on this machine take about" in line and "published and held weights 70.9 GiB" in line
    with pytest.raises(ConfigError, match="this machine has 8 GiB"):
        check(full, QWEN_7B, Capacities(on_gpus=False, machine=Capacity(8 * GIB, "this machine", "the test")))


def test_changes_leave_the_config_as_it_is() -> None:
    full = config()
    other = changed(full, {"trainer.parallel.tp": 4, "trainer.recompute": Recompute.full, "engine.num_slots": 3})
    assert (other.trainer.parallel.tp, other.trainer.recompute, other.engine.num_slots) == (4, Recompute.full, 3)
    assert (full.trainer.parallel.tp, full.trainer.recompute, full.engine.num_slots) == (1, Recompute.none, 64) and full.run is other.run


# -- the memory there is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [
    ("h100", 79), ("H200", 140), ("nvidia_h100_80gb_hbm3", 80), ("nvidia_a100-sxm4-80gb", 80), ("nvidia_a100_80gb_pcie_1g.10gb", 10), ("a100", 0),
    ("v100", 0), ("gh200", 0), ("nvidia_gh200_480gb", 0), ("nvidia_h100_nvl", 0), ("mi300x", 192), ("nvidia_l40s", 44), ("", 0), ("tesla", 0)])
def test_the_type_of_a_gpu_says_its_memory_or_nothing(name: str, size: int) -> None:
    assert gib_of_type(name) == size


@pytest.mark.parametrize(("text", "size"), [
    ("64G", 64 * GIB), ("64GB", 64 * GIB), ("1000", 1000 * 2**20), ("2T", 2048 * GIB), ("512K", 2**19), ("0", 0), ("", 0)])
def test_memory_is_read_as_sbatch_reads_it(text: str, size: int) -> None:
    assert bytes_of(text) == size


def test_types_stand_in_the_resources_of_nodes() -> None:
    assert types_in(["gpu:h100:8(S:0-1)", "gpu:h100:4,shard:2", "gpu:8", "(null)"]) == {"h100", ""}


def test_slurm_is_asked_for_a_type_that_the_config_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    full = config()
    full.cluster.train.partition = "gpu"
    kinds = [NodeKind(4, 8, 64, 1, gres="gpu:h200:8"), NodeKind(2, 0, 64, 1, gres="(null)")]
    monkeypatch.setattr(queries, "node_kinds", lambda name, patience_s: kinds)
    assert look(full).gpu == Capacity(140 * GIB, "a GPU of type h200", "cluster.train.gpu_memory_gb says otherwise")
    full.cluster.train.gpu_type = "a100"
    assert look(full).gpu is None

    def away(name: str, patience_s: float) -> list[NodeKind]:
        raise SlurmError("away")

    full.cluster.train.gpu_type = ""
    monkeypatch.setattr(queries, "node_kinds", away)
    assert look(full).gpu is None


def test_the_memory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = config()
    full.cluster.kind = ClusterKind.local
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(capacity, "CGROUP_LIMIT", tmp_path / "memory.max")
    found = look(full)
    assert not found.on_gpus and found.gpu is None and found.machine is not None and found.machine.size > GIB
    (tmp_path / "memory.max").write_text("1073741824\n")
    limited = look(full).machine
    assert limited is not None and limited.size == GIB
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU-1a, 81559\\nGPU-2b, 40960\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.raises(ConfigError, match="num_devices=128: leaves training 32 devices, and there are 2 GPUs here"):
        look(full)
    full.allocation = AllocationConfig(8)
    assert look(full).gpu == Capacity(40 * GIB, "the smallest GPU here", "nvidia-smi")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="num_devices=8: leaves training 2 devices, and there are 1 GPUs here"):
        look(full)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not look(full).on_gpus


@pytest.mark.parametrize(("visible", "sizes"), [
    (None, [80, 4, 40]), ("", []), ("-1", []), ("0,2", [80, 40]), ("2,-1,0", [40]), ("GPU-2b", [4]), ("GPU-3c,0", [40, 80]), ("MIG-7", [4]),
    ("7", []), ("1, 1", [4, 4])])
def test_gpus_that_the_launcher_sees(visible: str | None, sizes: list[float]) -> None:
    assert capacity.visible_sizes({"GPU-1a": 80, "GPU-2b": 4, "GPU-3c": 40}, visible) == sizes
    assert capacity.visible_sizes({}, visible) == []


# -- at plan time ----------------------------------------------------------------------------------------------------------


def model_folder(folder: Path, hidden: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}))
    return folder


def test_the_plan_tells_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = FullConfig()
    full.launch.dry_run = True
    full.run.dir = str(tmp_path / "run")
    full.model.path = str(model_folder(tmp_path / "small", 64))
    with pytest.raises(ConfigError, match="no \\*.safetensors"):  # a dry run looks at all that a run is prepared from
        on_slurm.launch(full)
    said = capsys.readouterr().out
    assert "a training rank takes about" in said and "all processes on this machine take about" in said
    full.model.path = str(model_folder(tmp_path / "large", 1 << 17))
    with pytest.raises(ConfigError, match="all processes on this machine take about"):
        on_slurm.launch(full)
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_there_yet_is_told_of_later(tmp_path: Path) -> None:
    full, run = FullConfig(), RunFolder(tmp_path)
    full.model.source = ModelSource.tiny
    console = Console(record=True, width=400)
    assert not before_start.tell_memory(full, run, console) and not console.export_text()
    model_folder(run.model, 64)
    assert before_start.tell_memory(full, run, console) and "a training rank takes" in console.export_text()


def test_a_model_that_is_not_supported_is_refused_at_once(tmp_path: Path) -> None:
    full = FullConfig()
    full.model.path = str(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ConfigError, match="'GPT2LMHeadModel' is not supported"):
        before_start.tell_memory(full, RunFolder(tmp_path / "run"), Console())


def test_layouts_are_plain_values() -> None:
    assert layout(config(parallel=ParallelConfig(tp=2, pp=2, cp=2)), 32, gpu=True) == Layout(2, 2, 1, 2, 1, 2, 4, True, True, 32768)


def test_micro_batches_that_nobody_asked_for_are_made_to_fit() -> None:
    full = config(parallel=ParallelConfig(tp=2))
    full.engine.context_length, full.trainer.microbatch_tokens = 4096, 16384
    full.trainer.batch_groups = 512
    size = rank(full, QWEN_7B).total
    enough, little, none = (Capacities(True, gpu=Capacity(share * size, "a GPU", "k")) for share in (1.1, 0.9, 0.1))
    assert not micro_batches.lower(full, QWEN_7B, enough) and full.trainer.microbatch_tokens == 16384
    assert micro_batches.lower(full, QWEN_7B, little) and full.trainer.microbatch_tokens == 8192 and rank(full, QWEN_7B).total <= 0.9 * size
    assert micro_batches.lower(full, QWEN_7B, none) and full.trainer.microbatch_tokens == 4096, "the longest sample must fit"
    full.trainer.microbatch_tokens = 16384
    assert micro_batches.lower(full, QWEN_7B, here(gpu=math.inf, machine=1.0)) and full.trainer.microbatch_tokens == 4096, "all that they decide"
