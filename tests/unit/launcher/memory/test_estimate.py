"""The estimate of a training rank's memory against what a real engine holds, on one rank."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from launcher.memory import activations
from launcher.memory import estimate as memory
from launcher.memory.activations import kept_bytes, layer_bytes, layout
from launcher.memory.estimate import rank_memory
from launcher.memory.parameters import count_weights
from tests.support.model_folders import write_random_model
from workers.config import Advantage, AlgorithmConfig, Config, Dtype, LoraConfig, LoraTarget, Recompute, TrainerConfig, Transport
from workers.model.adapter_shapes import pair_shapes
from workers.trainer.batch import sequence_layout as packed_layout
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.model import lm_head
from workers.trainer.megatron.trained_model import TrainedModel
from workers.weights import publisher

SHAPE: dict[str, Any] = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 8, "max_position_embeddings": 2048}
PROMPT, RESPONSE = 100, 201
SIGMOID: dict[str, Any] = {"moe_intermediate_size": 96, "n_routed_experts": 16, "first_k_dense_replace": 2}
LARGER: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {**SIGMOID, "head_dim": 32}, "deepseek_v3": {**SIGMOID, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
                                                            "qk_rope_head_dim": 16, "v_head_dim": 32}}


class SavedBytes:
    """Inside the block: the highest number of bytes that autograd keeps for backward passes, each storage counted once.

    Storages at `without` are not counted: parameters are kept anyway.
    """

    def __init__(self, without: set[int]) -> None:
        self.peak = self._now = 0
        self._holders: dict[int, int] = {}
        self._without = without
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(self, tensor), lambda saved: saved.tensor)

    def add(self, storage: Any, number: int) -> None:
        """`number` more holders of it, or one less."""
        address = storage.data_ptr()
        if address in self._without:
            return
        before = self._holders.get(address, 0)
        self._holders[address] = before + number
        if not before or not self._holders[address]:
            self._now += number * storage.nbytes()
        self.peak = max(self.peak, self._now)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, traceback)


class _Saved:
    def __init__(self, counter: SavedBytes, tensor: torch.Tensor) -> None:
        self.tensor, self._counter = tensor, counter
        counter.add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._counter.add(self.tensor.untyped_storage(), -1)


def config(dtype: str, recompute: str = "none", samples: int = 1) -> Config:
    result = Config()
    result.trainer = TrainerConfig(dtype=Dtype(dtype), recompute=Recompute(recompute), batch_groups=1, num_minibatches=1, microbatch_tokens=4096)
    result.engine.context_length, result.workflow.max_new_tokens, result.workflow.group_size = PROMPT + RESPONSE, RESPONSE, samples
    return result


def group(samples: int) -> TrainGroup:
    rng = np.random.default_rng(0)
    return TrainGroup(
        group_id="g", prompt=rng.integers(0, 500, PROMPT).astype(np.int32), rewards=np.ones(samples, np.float32),
        responses=[rng.integers(0, 500, RESPONSE).astype(np.int32) for _ in range(samples)],
        behavior_logprobs=[np.full(RESPONSE, -6, np.float32)] * samples, loss_mask=[np.ones(RESPONSE, bool)] * samples,
        versions=[np.zeros(RESPONSE, np.int32)] * samples)


def storages(model: torch.nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def measured(engine: MegatronEngine, samples: int) -> int:
    with SavedBytes(storages(engine._policy.trained.model)) as saved:
        engine.train_step([group(samples)], [[0]], None, None if engine._critic else [np.ones(samples, np.float32)])
    return saved.peak


def optimizer_bytes(trained: TrainedModel) -> int:
    """Moments, and float32 weights that are not the model's own."""
    own, total = storages(trained.model), 0
    for part in trained.optimizer.chained_optimizers:
        for options in part.optimizer.param_groups:
            total += sum(weight.nbytes for weight in options["params"] if weight.untyped_storage().data_ptr() not in own)
        total += sum(state[name].nbytes for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    return total


@pytest.mark.parametrize(("family", "dtype", "changes", "algorithm"), [
    ("llama", "float32", {}, {}), ("qwen2", "bfloat16", {"tie_word_embeddings": True}, {}), ("qwen3_moe", "bfloat16", {}, {}),
    ("glm4_moe", "bfloat16", {}, {}), ("deepseek_v3", "float32", {}, {"kl_weight": 0.1}),
    ("qwen3", "bfloat16", {}, {"kl_weight": 0.1, "advantage": Advantage.gae}), ("qwen3", "float32", {}, {"kl_weight": 0.1, "teacher": "teacher"})])
def test_parameters_gradients_and_optimizer_are_what_megatron_holds(
        tmp_path: Path, family: str, dtype: str, changes: dict[str, Any], algorithm: dict[str, Any]) -> None:
    architecture, setup = write_random_model(tmp_path / "model", family, **SHAPE | LARGER.get(family, {}) | changes), config(dtype)
    setup.algorithm = AlgorithmConfig(**algorithm)
    if setup.algorithm.teacher:
        setup.algorithm.teacher = str(tmp_path / "teacher")
        write_random_model(tmp_path / "teacher", "llama", **SHAPE | {"num_hidden_layers": 5})
    engine = MegatronEngine(setup, tmp_path / "model")
    measured(engine, 1)  # the moments are made at the first update
    models = [engine._policy.trained] + ([engine._critic.trained] if engine._critic else [])
    buffers = [buffer for trained in models for buffer in trained.parallel[0].buffers + trained.parallel[0].expert_parallel_buffers]
    frozen = sum(parameter.nbytes for parameter in engine._reference._passes._pieces[0].parameters()) if engine._reference else 0
    estimate = rank_memory(setup, architecture, count_weights(architecture), layout(setup, 1, gpu=False))
    assert estimate.parameters == pytest.approx(sum(buffer.param_data.nbytes for buffer in buffers) + frozen, rel=2e-3)
    assert estimate.gradients == pytest.approx(sum(buffer.grad_data.nbytes for buffer in buffers), rel=2e-3)
    assert estimate.optimizer == pytest.approx(sum(map(optimizer_bytes, models)), rel=2e-3)


@pytest.mark.parametrize(("family", "dtype", "recompute", "samples"), [
    ("llama", "float32", "none", 1), ("llama", "bfloat16", "none", 4), ("qwen3", "bfloat16", "none", 4), ("qwen3", "float32", "selective", 4),
    ("mistral", "bfloat16", "selective", 1), ("qwen2", "float32", "full", 4), ("qwen3", "bfloat16", "full", 1), ("qwen3_moe", "float32", "none", 4),
    ("qwen3_moe", "bfloat16", "full", 4), ("glm4_moe", "float32", "none", 4), ("glm4_moe", "bfloat16", "selective", 1),
    ("deepseek_v3", "float32", "none", 4), ("deepseek_v3", "bfloat16", "selective", 1), ("deepseek_v3", "bfloat16", "full", 4)])
def test_activations_are_what_autograd_keeps(tmp_path: Path, family: str, dtype: str, recompute: str, samples: int) -> None:
    """Within 6% where layers keep them, within 15% where they are made again: of one layer at a time."""
    architecture = write_random_model(tmp_path, family, **SHAPE | LARGER.get(family, {}))
    setup = config(dtype, recompute, samples)
    spread = dataclasses.replace(layout(setup, 1, gpu=False), tokens=PROMPT + samples * (RESPONSE - 1))
    estimate = kept_bytes(setup, architecture, spread, range(architecture.num_layers), 1)
    if recompute == "full":  # gradients of the layer that is worked on are no saved tensors
        estimate += spread.tokens * layer_bytes(setup, architecture, spread, architecture.mixture is not None)[1]
    assert measured(MegatronEngine(setup, tmp_path), samples) == pytest.approx(estimate, rel=0.15 if recompute == "full" else 0.06)


@pytest.mark.parametrize(("family", "dtype", "recompute", "targets", "algorithm"), [
    ("llama", "float32", "none", list(LoraTarget), {}), ("qwen3", "bfloat16", "full", list(LoraTarget), {"kl_weight": 0.1}),
    ("qwen3", "bfloat16", "none", list(LoraTarget), {"advantage": Advantage.gae}), ("qwen3_moe", "float32", "none", list(LoraTarget)[:4], {})])
def test_with_adapters_all_that_stays_is_estimated_and_activations_are_no_more(
        tmp_path: Path, family: str, dtype: str, recompute: str, targets: list[LoraTarget], algorithm: dict[str, Any]) -> None:
    """Gradients, whose buffer is a little longer for its alignment, to 2%; activations are an upper bound. The reference takes nothing."""
    architecture = write_random_model(tmp_path, family, **SHAPE | LARGER.get(family, {}))
    plain = config(dtype, recompute)
    plain.algorithm = AlgorithmConfig(**algorithm)
    setup = dataclasses.replace(plain, trainer=dataclasses.replace(plain.trainer, lora=LoraConfig(rank=8, targets=targets)))
    engine, spread = MegatronEngine(setup, tmp_path), layout(setup, 1, gpu=False)
    saved = measured(engine, 1)
    models = [engine._policy.trained] + ([engine._critic.trained] if engine._critic else [])
    estimate, whole = (rank_memory(one, architecture, count_weights(architecture), spread) for one in (setup, plain))
    assert estimate.parameters == pytest.approx(sum(parameter.nbytes for one in models for parameter in one.model.parameters()), rel=2e-3)
    assert estimate.gradients == pytest.approx(sum(buffer.grad_data.nbytes for one in models for buffer in one.parallel[0].buffers), rel=2e-2)
    assert estimate.optimizer == pytest.approx(sum(map(optimizer_bytes, models)), rel=2e-3)
    tokens = dataclasses.replace(spread, tokens=PROMPT + RESPONSE - 1)
    again = tokens.tokens * layer_bytes(setup, architecture, tokens, architecture.mixture is not None)[1] if recompute == "full" else 0.0
    assert saved <= kept_bytes(setup, architecture, tokens, range(architecture.num_layers), 1) + again
    assert estimate.gradients + estimate.optimizer < 0.2 * (whole.gradients + whole.optimizer) and estimate.total < whole.total


def test_constants_of_the_workers_are_what_the_estimate_takes_them_for() -> None:
    assert activations.LOGITS_BYTES == {False: lm_head.MAX_LOGITS_BYTES, True: lm_head.MAX_LOGITS_BYTES_ACCELERATOR}
    assert activations.MAX_BRANCH_TOKENS == packed_layout.MAX_BRANCH_TOKENS
    assert (memory.PUBLISHED, memory.STAGED) == (publisher.KEPT + 1, 1 + 1)


@pytest.mark.parametrize(("transport", "where", "local", "published", "held"), [
    ("zmq", "auto", True, 3, 2), ("zmq", "auto", False, 3, 2), ("nccl", "auto", False, 3, 2), ("zmq", "/fast", False, 0, 0),
    ("disk", "auto", True, 3, 0), ("disk", "run", True, 2, 0), ("disk", "run", False, 2, 0), ("disk", "/shared", False, 2, 0)])
def test_weights_in_the_memory_of_nodes(tmp_path: Path, transport: str, where: str, local: bool, published: int, held: int) -> None:
    architecture, setup = write_random_model(tmp_path, "llama", **SHAPE), config("float32")
    setup.weights.transport, setup.weights.dir, setup.engine.dtype = Transport(transport), where, Dtype.bfloat16
    stored, model = memory.stored_weights(setup, architecture, count_weights(architecture), local), 2 * count_weights(architecture).total
    assert (stored.published, stored.held) == (published * model, held * model)
    setup.weights.adapter_only, setup.trainer.lora = True, LoraConfig(rank=4)
    adapters = 4 * sum(map(math.prod, pair_shapes(architecture, setup.trainer.lora).values()))
    stored = memory.stored_weights(setup, architecture, count_weights(architecture), local)
    merged = 2 * model if where == "auto" or transport == "disk" else 0
    assert adapters < model / 3 and (stored.published, stored.held) == (published * adapters, held * adapters + merged)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_the_share_of_a_node_is_that_of_the_stages_that_begin_on_it(stages: int, ranks_per_node: int) -> None:
    for copies in (1, 2, 3, 4, 16):
        ranks = stages * copies
        begins = [stage * copies // ranks_per_node for stage in range(stages)]
        most = max(begins.count(node) for node in set(begins))
        assert most / stages <= memory.node_share(ranks, ranks_per_node, stages) <= min(1.0, (most + 1) / stages)
